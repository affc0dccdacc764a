"""What looseness costs and gains: every rule answers the same items as exact decoding does, and is compared with it.

    python benchmarks/study.py record --model TARGET [--draft DRAFT] --data FOLDER --out FOLDER --allow-code-execution
        [--rules RULE ...] [--k 8 | --governed] [--parallel 8] [--parts PART ...] [--limit PART=N ...] [--race 60]
    python benchmarks/study.py report FOLDER [FOLDER ...] [--half choose|judge] [--parts PART ...]
        [--dev-sets 4,8,16,32] [--without-loops]

A rule is a setting (`margin:0.3`, "entropy:0.3 agree:4 k=15"), or a preset: a shipped one's name, or a file; or one of
the lists in RULE_LISTS: `table-4` (that of the FLy paper), `window`, `kl-judge`, `sampling`, `begun-exactly`. `plain`
and `exact` always answer as well. Several folders of a report differ in their --seed alone, and count together. With
--governed, one request at a time, everything drafts as it is shipped, and the tokens a second are those that users see.
Without it every step drafts --k tokens, so that no answer depends on times; with --parallel, many answers cost least.
On weights that our kernels cover, exact decoding has the same bits in every batch: an answer that differs from exact's
does so because of a loose token. `report` counts how many of exact's differ from plain decoding's, which then is none.
The draft model keeps an item's prompt from one setting to the next, so under --governed the first setting that drafts
pays for reading it; the settings take turns in being first.

Items are answered in an order that has nothing to do with what they are (a hash of their ids), in chunks of all parts
in turn, so a run that is cut short has a sample. Each chunk is a run of `pyfly-cpp eval` in a folder of its own
(PART-BEGIN-END). It can be killed at any moment; the same command resumes. With --race N, rules whose recovery is
clearly (95 %) below 99 % after N items of code and maths are left out of the chunks that follow.

With --dev-sets, the report also shows how far a rule's recovery and tokens per step on so few items are from those on
all: the error of whoever tunes on a few items. Nothing is recorded for that. With --without-loops, items of which a
rule's answer or exact decoding's loops are left out of what is said of that rule: a loop is quick to draft.

The files of --data, in the formats of docs/tasks.md: gsm8k_test.jsonl, humaneval.jsonl, mbpp_sanitized.jsonl,
creative_writing_prompts.jsonl, csqa_dev.jsonl. The instructions are in instructions.jsonl beside this script.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from common import markdown, print_machine

from pyfly_cpp.decoding import PLAIN, Decoding
from pyfly_cpp.decoding.presets import SHIPPED, load_preset
from pyfly_cpp.decoding.resolve import resolve, resolve_setting
from pyfly_cpp.errors import PyflyError
from pyfly_cpp.machine.conditions import CONDITIONS, describe_machine, describe_model
from pyfly_cpp.machine.rows import DataError, Row, Where, read_lines_so_far
from pyfly_cpp.measure import evaluation, journal
from pyfly_cpp.measure.generator import Generator, Sampling
from pyfly_cpp.measure.loaded import files_of, load_generator
from pyfly_cpp.measure.quality import SettingResult, answered_by_all, summarise
from pyfly_cpp.measure.report import interval
from pyfly_cpp.measure.statistics import Interval, bootstrap, ratio, ratio_of_ratios, wilson
from pyfly_cpp.measure.tasks.code import CodeTask
from pyfly_cpp.measure.tasks.registry import TASKS
from pyfly_cpp.measure.tasks.task import Item, Task, Verdict
from pyfly_cpp.models.named import resolve_model

# ---- Instructions whose form code can check --------------------------------------------------------------------------

Check = Callable[[Any, str], bool]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _has_sentences(n: int, text: str) -> bool:
    return len(re.findall(r"[.!?]+['\")]*(?=\s|$)", text)) == n and re.search(r"[.!?]+['\")]*$", text) is not None


def _is_csv(asked: dict[str, Any], text: str) -> bool:
    rows = [[cell.strip() for cell in line.split(",")] for line in _lines(text)]
    names = [cell.lower() for cell in rows[0]] if rows else []
    whole = all(len(row) == len(asked["columns"]) and all(row) for row in rows)
    return names == asked["columns"] and len(rows) == asked["rows"] + 1 and whole


def _is_json(asked: dict[str, Any], text: str) -> bool:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.keys() == asked.keys() and all(_fits(asked[k], found[k]) for k in asked)


def _fits(asked: Any, value: Any) -> bool:
    """Whether a field's value is what is asked for: one of a list; a list of so many texts; or a kind."""
    if isinstance(asked, list):
        return value in asked
    if isinstance(asked, int):
        return isinstance(value, list) and len(value) == asked and all(isinstance(one, str) for one in value)
    if asked in ("whole", "number"):
        kinds = int if asked == "whole" else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and value >= 1
    return isinstance(value, {"text": str, "truth": bool}[asked])


CHECKS: dict[str, Check] = {
    "words": lambda asked, text: asked[0] <= len(text.split()) <= asked[1],
    "lines": lambda asked, text: len(_lines(text)) == asked,
    "numbered": lambda n, text: all(re.match(rf"{i}\.\s+\S", line) for i, line in enumerate(_lines(text)[:n], 1)),
    "prefix": lambda asked, text: all(line.startswith(asked) for line in _lines(text)),
    "json": _is_json,
    "sentences": _has_sentences,
    "contains": lambda asked, text: all(re.search(rf"\b{re.escape(word)}\b", text, re.I) for word in asked),
    "lacks": lambda asked, text: asked not in text,
    "csv": _is_csv,
}
"""All conditions by their names: whether what is asked for holds for a text."""


class Instructions(Task):
    """Rows: `id`, `prompt`, `checks` (conditions by name, all of which must hold)."""

    name = "instructions"
    title = "instructions about the form of an answer"
    max_tokens = 220
    criterion = "followed"

    def parse(self, where: Where) -> Item:
        checks = where.row.get("checks")
        if not isinstance(checks, dict) or not checks or not checks.keys() <= CHECKS.keys():
            raise where.error(f"the field 'checks' must hold conditions of {', '.join(CHECKS)}.")
        return Item.of(where, {**where.fields("prompt"), "checks": checks})

    def score(self, item: Item, text: str, tokens: Sequence[int]) -> Verdict:
        """Correct: all conditions hold; a fence around all of the answer, as chat models like it, is left out."""
        fenced = re.fullmatch(r"\s*```\w*\n(.*?)\n?```\s*", text, re.S)
        plain = (fenced[1] if fenced else text).strip()
        failed = [name for name, asked in item.fields["checks"].items() if not CHECKS[name](asked, plain)]
        return Verdict(not failed, ", ".join(failed), "")


# ---- Recording -------------------------------------------------------------------------------------------------------

HERE = Path(__file__).parent
PARTS: dict[str, tuple[Task, str, int | None]] = {
    "gsm8k": (TASKS["gsm8k"], "gsm8k_test.jsonl", 500),
    "humaneval": (TASKS["humaneval"], "humaneval.jsonl", None),
    "mbpp": (TASKS["mbpp"], "mbpp_sanitized.jsonl", None),
    "writing": (TASKS["writing"], "creative_writing_prompts.jsonl", 100),
    "commonsenseqa": (TASKS["commonsenseqa"], "csqa_dev.jsonl", 200),
    "instructions": (Instructions(), "instructions.jsonl", None),
}
"""Task, data file, and the number of items where no --limit is given; None: all."""
POOLS = {"code and maths": ("gsm8k", "humaneval", "mbpp"), "maths and prose": ("gsm8k", "writing", "instructions")}
"""Parts that are also reported together. The first one decides the race; in the second one looseness can act."""
KEEPS = 0.99
"""The recovery that a rule must be able to have to stay in the race."""
RULES = ("margin:0.3", "entropy:0.3")


def kl_judge(tau: float, mask: float = 0.9) -> str:
    """Exact where the target's favourite has a probability above `mask`, in [0.5, 1), else loose while KL(target ||
    draft) <= tau: the untrained judge of arXiv 2601.04766. -p ln p of the favourite is at least its value at the mask
    from there down to 0.026 (mask 0.9), below which this is exact, too. The divergence is that of the target's 16 most
    probable tokens: over all it is infinite for a head that cannot propose some."""
    return f"all(fuzzy-kl-target:{tau}:16,entropy:{-mask * math.log(mask):.6f}:1)"


def paper_rule(theta: float = 0.3, size: int = 6, k: int = 15) -> str:
    """A setting as in the FLy reference code, whose window of W positions begins with the mismatch; 0: none."""
    window = f"agree:{size - 1} tail={size}" if size else "agree:0"
    return f"entropy:{theta} {window} k={k}"


RULE_LISTS: dict[str, tuple[str, ...]] = {
    "table-4": tuple(
        dict.fromkeys(
            [paper_rule(size=size) for size in (0, 4, 6, 8)]
            + [paper_rule(theta=theta) for theta in (0.0, 0.3, 0.6, 1.0)]
            + [paper_rule(k=k) for k in (10, 15, 20, 25)]
        )
    ),
    "window": tuple(
        f"{gate} {window}"
        for gate in ("margin:0.3", "entropy:0.3")
        for window in ("agree:0", "reconverge:6", "agree:2", "agree:6")
    ),
    "kl-judge": tuple(kl_judge(tau) for tau in (0.03, 0.1, 0.3, 1.0)),
    "begun-exactly": tuple(
        f"all({gate},exact-first:{n}){window}"
        for gate, window in (("entropy:0.3", " agree:2"), ("entropy:0.3,margin:1", " agree:2"), ("margin:0.3", ""))
        for n in (2, 8)
    ),
    "sampling": ("stochastic", "entropy:0.3", "margin:0.3", "rfsd-js:0.1"),
}
"""Rules that answer one question, by a name that --rules takes."""


OF_A_CHUNK = ("task", "items", "settings", "part", "data_sha256")
"""Conditions that differ from chunk to chunk of a study."""


def digest(text: str) -> bytes:
    """A hash of a text."""
    return hashlib.sha256(text.encode("utf-8")).digest()


def read_items(part: str, folder: Path, limits: Mapping[str, tuple[int, int]]) -> list[Item]:
    """The items of a part in the order in which they are answered; with a limit (begin, end), those from there on."""
    task, file, n = PARTS[part]
    path = HERE / file if (HERE / file).exists() else folder / file
    begin, end = limits.get(part, (0, n))
    return sorted(task.read(path), key=lambda item: digest(item.id))[begin:end]


def chunks(items: Mapping[str, Sequence[Item]], size: int) -> Iterator[tuple[str, int, Sequence[Item]]]:
    """(part, index of the first item, items), the parts in turn."""
    for begin in range(0, max(map(len, items.values())), size):
        for part, all_items in items.items():
            if begin < len(all_items):
                yield part, begin, all_items[begin : begin + size]


def read_rule(text: str, k: int | None) -> Decoding:
    """A rule as a setting; k: tokens per step where the rule does not say, None: governed. Raises ValueError."""
    if text in SHIPPED or text.endswith(".json"):
        setting = replace(resolve_setting(load_preset(text)), adaptive=None)
    else:
        setting = Decoding.parse(text)
    if setting.is_plain:
        return setting
    return setting.but(adaptive=True) if k is None else replace(setting, draft_max=setting.draft_max or k)


def read_rules(texts: Sequence[str]) -> list[str]:
    """Rules, with those of a list in the place of its name."""
    return [rule for text in texts for rule in RULE_LISTS.get(text, (text,))]


def in_the_race(lines: Sequence[Row], rules: Sequence[str]) -> list[str]:
    """The rules that may still keep the accuracy."""
    found = {rule: compare(lines, rule) for rule in rules}
    return [rule for rule, one in found.items() if one is None or not one.recovery.high < KEEPS]


def open_generator(args: argparse.Namespace, settings: Sequence[Decoding]) -> tuple[Generator, dict[str, Any]]:
    """What answers, and what its answers depend on."""
    args.model, args.draft = (path and resolve_model(path) for path in (args.model, args.draft))
    drafters = resolve(args.model, args.drafter, args.draft)
    reason = f" ({drafters.reason})" if drafters.reason else ""
    print(f"drafts: {drafters.drafter}{reason}", file=sys.stderr)
    threads = {} if args.threads is None else {"n_threads": args.threads, "n_threads_batch": args.threads}
    options = {"n_ctx": args.ctx, "verbose": False, "trace": True, "n_gpu_layers": args.gpu_layers, **threads}
    n_parallel = args.parallel if args.parallel > 1 else None
    generator = load_generator(args.model, drafters, settings, n_parallel, **options)
    drafters = generator.drafters
    machine = describe_machine()
    return generator, {
        **{name: machine[name] for name in CONDITIONS},
        "model": describe_model(args.model),
        "draft_files": [describe_model(path) for path in files_of(drafters, settings)],
        "drafter": " and ".join(map(str, drafters.of(Decoding()).drafters)),
        "k": None if args.governed else args.k,
        "parallel": args.parallel,
        "threads": args.threads,
        "n_ctx": args.ctx,
        "gpu_layers": args.gpu_layers,
        "containment": args.containment,
    }


def record(args: argparse.Namespace) -> None:
    """Answers what is missing, chunk by chunk."""
    limits = dict(read_limit(text) for text in args.limit)
    k = None if args.governed else args.k
    rules = {
        "plain": PLAIN,
        "exact": read_rule("exact", k),
        **{text: read_rule(text, k) for text in read_rules(args.rules)},
    }
    names: dict[str, str] = {}
    for name, setting in rules.items():
        names.setdefault(str(setting), name)
    tasks: dict[str, Task] = {part: PARTS[part][0] for part in args.parts}
    for part, task in tasks.items():
        if isinstance(task, CodeTask):
            tasks[part] = type(task)(task.limits, args.containment)
        evaluation.require_permission(tasks[part], args.allow_code_execution)
    items = {part: read_items(part, args.data, limits) for part in args.parts}
    print_machine()
    generator, conditions = open_generator(args, list(rules.values()))
    ends = time.monotonic() + 60 * (math.inf if args.minutes is None else args.minutes)
    racing = [name for name in names.values() if name not in ("plain", "exact")]
    lines: list[Row] = []  # of code and maths, until the race is decided
    is_decided = args.race is None
    for part, begin, some in chunks(items, 10 if args.parallel == 1 else 4 * args.parallel):
        if time.monotonic() > ends:
            print("The time is up. Run the same command to resume.", file=sys.stderr)
            break
        if not is_decided and begin > 0 and len({line["item"] for line in lines}) >= args.race:
            is_decided, racing = True, in_the_race(lines, racing)
            print(f"still in the race: {', '.join(racing) or 'none'}", file=sys.stderr)
        plan = evaluation.Plan(
            tasks[part], some, [rules[name] for name in ("plain", "exact", *racing)],
            max_tokens=min(tasks[part].max_tokens, args.max_tokens or sys.maxsize), 
            sampling=Sampling(args.temperature, args.seed), allow_code_execution=args.allow_code_execution,
            conditions=(*conditions.items(), ("part", part), ("names", names),
                        ("data_sha256", digest(repr(some)).hex())),
        )  # fmt: skip
        first = limits.get(part, (0, 0))[0] + begin
        folder = args.out / f"{part}-{first:04}-{first + len(some):04}"
        made = evaluation.run(plan, generator, folder, machine=describe_machine())
        print(f"{folder.name}: {len(made)} answers", file=sys.stderr, flush=True)
        lines += named(made, part, names) if part in POOLS["code and maths"] else []


def read_limit(text: str) -> tuple[str, tuple[int, int]]:
    """A part, and the begin and end of its items; raises ValueError."""
    part, _, numbers = text.partition("=")
    begin, _, end = numbers.rpartition(":")
    if part not in PARTS or not end.isdigit() or not (begin or "0").isdigit() or int(end) <= int(begin or 0):
        raise ValueError(f"cannot read --limit {text}; write PART=N or PART=M:N, with a part of {', '.join(PARTS)}.")
    return part, (int(begin or 0), int(end))


def sizes(text: str) -> list[int]:
    """Numbers of items; raises ValueError."""
    found = [int(n) for n in text.split(",")]
    if min(found) < 1:
        raise ValueError(f"cannot read {text}; write numbers >= 1.")
    return found


# ---- Reporting -------------------------------------------------------------------------------------------------------


def named(lines: Sequence[Row], part: str, names: Mapping[str, str]) -> list[Row]:
    """Lines with the names of their rules, and ids that are unique in all parts."""
    own = {"part": part}
    return [
        {**line, **own, "setting": names[line["setting"]], **{key: f"{part}/{line[key]}" for key in ("item", "group")}}
        for line in lines
    ]


def read_study(folders: Sequence[Path]) -> tuple[dict[str, Any], list[Row]]:
    """Conditions and lines of all chunks; with another seed an item is another one, of the same group. Of several
    requests at a time, a rule that has not answered all of a chunk is left out of it: what is finished first is not
    typical. Raises DataError."""
    conditions: dict[str, Any] = {}
    lines: list[Row] = []
    for path in [path for folder in folders for path in sorted(folder.glob(f"*/{journal.RUN}"))]:
        identity = json.loads(path.read_text(encoding="utf-8"))["identity"]
        here = {name: value for name, value in identity.items() if name not in OF_A_CHUNK}
        here.pop("max_tokens")
        seed = here.pop("seed")
        if conditions and here != conditions:
            raise DataError(f"{path.parent} was recorded under other conditions than what stands beside it; part them.")
        conditions = here
        found, _ = read_lines_so_far(path.parent / journal.ITEMS)
        if here["parallel"] > 1:
            n_answers = Counter(line["setting"] for line in found)
            found = [line for line in found if n_answers[line["setting"]] == len(identity["items"])]
        made = named(found, identity["part"], here["names"])
        lines += [{**line, "item": f"{line['item']} seed {seed}", "seed": seed} for line in made]
    if not lines:
        raise DataError(f"{', '.join(map(str, folders))} holds no finished chunk yet; record some answers first.")
    return conditions, lines


class Compared:
    """A rule and exact decoding on the items that both answered."""

    def __init__(self, result: SettingResult, mine: Sequence[Row], exact: Sequence[Row]) -> None:
        self.result, self.mine, self.exact = result, mine, exact

    @property
    def steps(self) -> Interval:
        """Tokens per step over exact's."""
        counts = [[one["stats"][key] for one in pair for key in ("committed", "rounds")] for pair in self.pairs]
        return bootstrap(counts, ratio_of_ratios, [line["group"] for line in self.mine])

    @property
    def pairs(self) -> list[tuple[Row, Row]]:
        return list(zip(self.mine, self.exact))

    @property
    def recovery(self) -> Interval:
        """Right answers over exact's."""
        return self.result.recovery or Interval(math.nan, math.nan, math.nan)

    @property
    def loops(self) -> str:
        """Of answers, with an interval; those that only the rule has, and that only exact decoding has."""
        share = wilson(sum(line["loop"] for line in self.mine), len(self.mine))
        new, gone = (sum(mine["loop"] - exact["loop"] == sign for mine, exact in self.pairs) for sign in (1, -1))
        return f"{100 * share.estimate:.1f} % ({100 * share.low:.1f} to {100 * share.high:.1f}), +{new} -{gone}"

    def margins(self, kind: str) -> list[float]:
        """In nats; `kind`: `"loose"` or `"taken back"`."""
        return [margin for line in self.mine for margin in line["margins"][kind]]


def compare(lines: Sequence[Row], rule: str, without_loops: bool = False) -> Compared | None:
    """A rule on the items that `plain`, `exact` and it have answered (without_loops: exact and it without a loop);
    None where there are none."""
    wanted = dict.fromkeys(("plain", "exact", rule))
    both = answered_by_all(lines, wanted)
    if without_loops:
        both = [answers for answers in both if not (answers["exact"]["loop"] or answers[rule]["loop"])]
    if not both:
        return None
    table = summarise([answers[name] for answers in both for name in wanted], list(wanted), len(both))
    result = next(row for row in table.rows if row.setting == rule)
    return Compared(result, [answers[rule] for answers in both], [answers["exact"] for answers in both])


def report(args: argparse.Namespace) -> None:
    """Prints the page."""
    conditions, lines = read_study(args.folders)
    if args.half:
        lines = [line for line in lines if ("choose", "judge")[digest(f"half {line['group']}")[0] % 2] == args.half]
    parts = [part for part in PARTS if part in args.parts and any(line["part"] == part for line in lines)]
    groups = {part: (part,) for part in parts}
    groups |= {name: pool for name, pool in POOLS.items() if len({*pool} & {*parts}) > 1}
    found = []
    for group, members in groups.items():
        some = [line for line in lines if line["part"] in members]
        for name in conditions["names"].values():
            if (one := compare(some, name, args.without_loops)) is not None:
                found.append((group, name, one))
    how = "governed" if conditions["k"] is None else f"{conditions['k']} drafts per step"
    seeds = sorted({line["seed"] for line in lines})
    print(
        f"{conditions['model']['file']}, {conditions['drafter']}, {how}, {conditions['parallel']} at once, temperature "
        f"{conditions['temperature']:g}, seeds {', '.join(map(str, seeds))}, "
        f"llama-cpp-python {conditions['llama_cpp_python']}"
        f"{f'; the half of the items that is to {args.half}' if args.half else ''}"
        f"{'; without items whose answers loop' if args.without_loops else ''}. Intervals: 95 %."
    )
    pairs = [pair for group, name, one in found if name == "plain" and group in parts for pair in one.pairs]
    n_other = sum(plain["tokens"] != exact["tokens"] for plain, exact in pairs)
    print(f"Answers of exact decoding that are not plain decoding's: {n_other} of {len(pairs)}.")
    for title, head, cells in (
        ("Answers", ANSWERS, answer_cells),
        ("Speed" if conditions["parallel"] == 1 else "Speed (throughput of all texts at once)", SPEED, speed_cells),
        ("Looseness", LOOSENESS, looseness_cells),
    ):
        rows = [
            [group, f"`{name}`", str(len(one.mine)), *cells(one)]
            for group, name, one in found
            if name != "plain" and (head != LOOSENESS or name != "exact")
        ]
        print(f"\n## {title}\n\n{markdown(['part', 'rule', 'items', *head], rows)}")
    if args.dev_sets:
        rows = [
            [group, f"`{name}`", str(len(one.mine)), *cells]
            for group, name, one in found
            if name not in ("plain", "exact")
            for cells in dev_set_cells(one, args.dev_sets)
        ]
        print(f"\n## The error of few items\n\n{markdown(['part', 'rule', 'items', *DEV_SETS], rows)}")


ANSWERS = ("right, %", "points", "recovery, %", "- +", "p", "as exact, %", "cut off, exact's", "loops, new and gone")


def answer_cells(one: Compared) -> list[str]:
    """Verdicts."""
    r = one.result
    cut = f"{r.n_cut}, {sum(line['finish'] in ('length', 'context') for line in one.exact)}"
    if r.flips is None or r.difference is None:
        return [f"{100 * r.n_correct / r.n:.1f}", "", "", "", "", "", cut, one.loops]
    return [
        f"{100 * r.n_correct / r.n:.1f}", interval(r.difference, "{:+.1f}", 100), interval(r.recovery, "{:.1f}", 100),
        f"-{r.flips.harmful} +{r.flips.helpful}", f"{r.flips.p:.2g}", f"{100 * (r.same_output or 0):.0f}", cut,
        one.loops,
    ]  # fmt: skip


SPEED = ("tokens/s", "x exact", "x plain", "tokens per step", "x exact's", "steps drafted, %")


def speed_cells(one: Compared) -> list[str]:
    """Speeds, and what they come from."""
    r = one.result
    drafted = sum(line["drafted_rounds"] for line in one.mine) / sum(line["stats"]["rounds"] for line in one.mine)
    is_exact = r.flips is None
    return [
        f"{r.tokens_per_second.estimate:.1f}", "" if is_exact else interval(r.speedup_exact), interval(r.speedup_plain),
        f"{r.mean_accepted:.2f}", "" if is_exact else interval(one.steps), f"{100 * drafted:.0f}",
    ]  # fmt: skip


LOOSENESS = ("loose an answer", "loose, % of tokens", "margin of loose", "of taken back", "from 0.2 to 0.3, %")


def looseness_cells(one: Compared) -> list[str]:
    """Loose tokens and those that a window took back; margins are means, in nats."""
    loose, back = one.margins("loose"), one.margins("taken back")
    between = [margin for margin in loose if 0.2 <= margin <= 0.3]
    return [
        f"{len(loose) / len(one.mine):.2f}", f"{100 * one.result.loose_rate:.2f}",
        f"{fmean(loose):.3f}" if loose else "", f"{fmean(back):.3f} of {len(back)}" if back else "",
        f"{100 * len(between) / len(loose):.0f}" if loose else "",
    ]  # fmt: skip


N_DRAWS = 1000
DEV_SETS = ("of them", "recovery, points off", "95 % of draws", "x exact's tokens per step, off by", "95 % of draws")


def dev_set_cells(one: Compared, sizes: Sequence[int], seed: int = 0) -> list[list[str]]:
    """For each number of items below that of all: the distance of their figures from those of all items, as the mean of
    its absolute value and the range of 95 % of N_DRAWS draws without replacement. An item counts with all its seeds;
    draws without a right answer of exact decoding have no recovery."""
    groups = {name: i for i, name in enumerate(dict.fromkeys(line["group"] for line in one.mine))}
    table = np.zeros((len(groups), 6))
    for mine, exact in one.pairs:
        counts = [line["stats"][key] for line in (mine, exact) for key in ("committed", "rounds")]
        table[groups[mine["group"]]] += [mine["correct"], exact["correct"], *counts]
    orders = np.random.default_rng(seed).random((N_DRAWS, len(groups))).argsort(axis=1)
    out = []
    for n in [n for n in sizes if n < len(groups)]:
        cells = [str(n)]
        for columns, statistic, scale, digits in ((table[:, :2], ratio, 100, 1), (table[:, 2:], ratio_of_ratios, 1, 3)):
            with np.errstate(divide="ignore", invalid="ignore"):
                off = scale * (statistic(columns[orders[:, :n]].sum(axis=1)) - statistic(columns.sum(axis=0)))
            off = off[np.isfinite(off)]
            low, high = np.quantile(off, [0.025, 0.975]) if len(off) else (0.0, 0.0)
            cells += (
                [f"{np.abs(off).mean():.{digits}f}", f"{low:+.{digits}f} to {high:+.{digits}f}"]
                if len(off)
                else ["", ""]
            )
        out.append(cells)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record", help="answer what is missing")
    one.add_argument("--model", required=True, help="GGUF of the target")
    one.add_argument("--draft", help="GGUF of the draft, or of a head that --drafter names")
    one.add_argument("--drafter", default="auto", help="the drafter's word, as on the command line (default auto)")
    one.add_argument("--data", type=Path, required=True, help="folder of the data files")
    one.add_argument("--out", type=Path, required=True, help="folder of the answers")
    one.add_argument(
        "--rules", nargs="+", default=RULES, help=f"also: {', '.join(RULE_LISTS)} (default: {' '.join(RULES)})"
    )
    one.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="only these parts")
    one.add_argument("--limit", nargs="+", default=[], metavar="PART=N", help="other numbers of items, M:N: from M on")
    one.add_argument("--k", type=int, default=8, help="tokens drafted in a step (default 8)")
    one.add_argument("--governed", action="store_true", help="the governor says how many, as shipped")
    one.add_argument("--parallel", type=int, default=1, help="requests at a time (default 1)")
    one.add_argument("--race", type=int, metavar="N", help="drop what surely loses after N items of code and maths")
    one.add_argument("--minutes", type=float, help="begin no chunk when so many minutes have passed")
    one.add_argument("--temperature", type=float, default=0.0)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--max-tokens", type=int, help="shorten answers (to try things)")
    one.add_argument("--ctx", type=int, default=1536, help="tokens of one request, at most (default 1536)")
    one.add_argument("--threads", type=int, help="threads (default: as shipped)")
    one.add_argument("--gpu-layers", type=int, default=0, help="layers on the GPU, -1 for all (default 0)")
    one.add_argument("--allow-code-execution", action="store_true", help="humaneval and mbpp run what the model writes")
    one.add_argument("--containment", choices=("bubblewrap", "none"), default="bubblewrap", help="of these programs")
    one.set_defaults(run=record)
    two = commands.add_parser("report", help="print the tables")
    two.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="as of --out; several differ in --seed")
    two.add_argument("--half", choices=("choose", "judge"), help="only this half of the items")
    two.add_argument(
        "--dev-sets", type=sizes, metavar="N,N,...", help="the error that so few items give, e.g. 4,8,16,32"
    )
    two.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="only these parts")
    two.add_argument("--without-loops", action="store_true", help="leave out items of which an answer loops")
    two.set_defaults(run=report)
    args = parser.parse_args()
    try:
        args.run(args)
    except (PyflyError, ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit("Interrupted. Run the same command to resume.") from None


if __name__ == "__main__":
    main()
