"""Gates and windows compared: how many tokens a round yields, and how many of them are loose.

    python benchmarks/windows.py --target F16 --draft Q2_K --prompts FILE... --out windows.jsonl
    python benchmarks/windows.py --out windows.jsonl --table

Greedy, in the model's chat format, first turns only, W = 6. Every setting starts from the same cache of the same
prompt. No times are taken, and what is counted does not depend on how busy the machine is. "Agree" in the round needs
K > W to accept anything; where it cannot, it is exact decoding and is not run again. See resumable.py for the results
file.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from resumable import (
    Results,
    add_arguments,
    choose_prompts,
    load,
    markdown,
    model_conditions,
)

from pyfly_cpp.bench.prompts import BenchPrompt
from pyfly_cpp.decoding import Decoding
from pyfly_cpp.evaluation.files import Row
from pyfly_cpp.evaluation.generation import Generated, Generator, Prompt
from pyfly_cpp.evaluation.repetition import find_loop
from pyfly_cpp.evaluation.statistics import Interval, bootstrap, ratio, ratio_of_ratios
from pyfly_cpp.rules import why_strict
from pyfly_cpp.windows import Window

WINDOWS = ("agree in-round", "agree across", "reconverge across")
SETTINGS = (
    "exact",
    *(f"margin:{tau} {window}" for tau in (0.2, 0.3, 0.4) for window in WINDOWS),
    *(f"entropy:0.3 {window}" for window in WINDOWS),
)
COUNTERS = ("rounds", "drafted", "committed", "matched", "loose_accepted", "rollbacks", "rolled_back")


def run(args: argparse.Namespace) -> None:
    """Decodes every prompt with every setting, or what is left of it."""
    settings = [replace(Decoding.parse(text), draft_max=k) for text in args.settings for k in args.k]
    settings = [setting for setting in settings if can_defer(setting) or setting.is_exact]
    prompts = choose_prompts(args)
    results = Results(args.out)
    conditions = {**model_conditions(args), "tokens": args.tokens}
    generator = load(args)
    generator.require(settings)
    with results.writing(conditions):
        for prompt, rendered, setting, generated in decoded(generator, prompts, settings, results, args):
            results.add(
                {
                    **about(prompt, rendered, setting),
                    **{name: getattr(generated.stats, name) for name in COUNTERS},
                    "finish": generated.finish,
                    "loop": find_loop(generated.tokens) is not None,
                }
            )


def decoded(
    generator: Generator,
    prompts: Sequence[BenchPrompt],
    settings: Sequence[Decoding],
    results: Results,
    args: argparse.Namespace,
) -> Iterator[tuple[BenchPrompt, Prompt, Decoding, Generated]]:
    """Decodes `args.tokens` tokens behind each prompt with each setting, but for what `results` has: prompt, rendered
    prompt, setting, and what was generated."""
    done = {(row["setting"], row["prompt"]) for row in results.rows}
    prompts = [p for p in prompts if any((str(setting), p.id) not in done for setting in settings)]
    for prompt, rendered in rendered_prompts(generator, prompts, results, args):
        n_shared = generator.share_prefix([rendered])
        for setting in settings:
            if (str(setting), prompt.id) not in done:
                generator.forget(n_shared)
                yield prompt, rendered, setting, generator.generate(rendered, setting, args.tokens)


def rendered_prompts(
    generator: Generator, prompts: Sequence[BenchPrompt], results: Results, args: argparse.Namespace
) -> Iterator[tuple[BenchPrompt, Prompt]]:
    """Every prompt in the model's chat format, its cache prepared so that whatever is generated next starts from the
    same state. Leaves out, and notes, the prompts that are too long; stops when the time is up."""
    longest = args.ctx - args.tokens - 1
    if args.max_prompt_tokens is not None:
        longest = min(longest, args.max_prompt_tokens)
    noted = {row["left_out"] for row in results.left_out}
    started = time.monotonic()
    for i, prompt in enumerate(prompts):
        if args.minutes is not None and time.monotonic() - started > 60 * args.minutes:
            print(f"time is up after {i} of {len(prompts)} prompts; the same command goes on", file=sys.stderr)
            return
        rendered = generator.render([{"role": "user", "content": prompt.turns[0]}])
        if len(rendered.tokens) > longest:
            if prompt.id not in noted:
                results.add({"left_out": prompt.id, "category": prompt.category, "n_prompt": len(rendered.tokens)})
            continue
        yield prompt, rendered
        print(f"{i + 1}/{len(prompts)} {prompt.id}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def about(prompt: BenchPrompt, rendered: Prompt, setting: Any) -> Row:
    """The beginning of every result."""
    return {
        "setting": str(setting),
        "prompt": prompt.id,
        "category": prompt.category,
        "group": prompt.group,
        "n_prompt": len(rendered.tokens),
    }


def can_defer(setting: Decoding) -> bool:
    """Whether a window fits in a round, or may outlive it."""
    return why_strict(setting.gate, window_of(setting), setting.draft_max or 1) is None


def window_of(setting: Decoding) -> Window:
    """The gate's own where it names none."""
    return setting.window or setting.gate.window


def name_of(kind: Decoding) -> str:
    """Gate, rule and reach in full."""
    if kind.is_exact:
        return str(kind.gate)
    window = window_of(kind)
    reach = "across rounds" if window.outlives_round else "in the round"
    return f"{kind.gate} {window.rule} {reach}"


# ---- Tables ----------------------------------------------------------------------------------------------------------


class Measured:
    """The results of some prompts, by setting."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._of: dict[Decoding, dict[str, Row]] = {}
        for row in rows:
            self._of.setdefault(Decoding.parse(row["setting"]), {})[row["prompt"]] = row

    @property
    def lengths(self) -> list[int]:
        """All K, rising."""
        return sorted({setting.draft_max for setting in self._of if setting.draft_max is not None})

    @property
    def kinds(self) -> list[Decoding]:
        """Settings without their K, in the order of the file."""
        return list(dict.fromkeys(replace(setting, draft_max=None) for setting in self._of))

    def has(self, kind: Decoding, k: int) -> bool:
        return replace(kind, draft_max=k) in self._of

    def rate(self, kind: Decoding, k: int, numerator: Callable[[Row], float], denominator: str) -> Interval:
        """A ratio of sums over prompts."""
        rows = list(self._of[replace(kind, draft_max=k)].values())
        columns = [[numerator(row), row[denominator]] for row in rows]
        return bootstrap(columns, ratio, [row["group"] for row in rows])

    def gain(self, kind: Decoding, k: int) -> Interval:
        """Tokens per round relative to exact's with the same K, on the prompts that have both; minus 1."""
        exact = self._of.get(Decoding(draft_max=k), {})
        mine = self._of[replace(kind, draft_max=k)]
        pairs = [(mine[prompt], exact[prompt]) for prompt in mine if prompt in exact]
        if not pairs:
            return Interval(math.nan, math.nan, math.nan)
        columns = [[a["committed"], a["rounds"], b["committed"], b["rounds"]] for a, b in pairs]
        found = bootstrap(columns, ratio_of_ratios, [row["group"] for row, _ in pairs])
        return Interval(found.estimate - 1, found.low - 1, found.high - 1)

    def n(self, kind: Decoding, k: int) -> int:
        """Prompts."""
        return len(self._of[replace(kind, draft_max=k)])

    def n_loops(self, kind: Decoding, k: int) -> int:
        """Outputs with a true loop."""
        return sum(row["loop"] for row in self._of[replace(kind, draft_max=k)].values())


def percent(value: Interval, sign: str = "") -> str:
    """`+12.3 % (10.1..14.2)`."""
    if math.isnan(value.estimate):
        return "-"
    text = f"{100 * value.estimate:{sign}.1f} %"
    return text if math.isnan(value.low) else f"{text} ({100 * value.low:{sign}.1f}..{100 * value.high:{sign}.1f})"


def whole_table(measured: Measured) -> str:
    """Every figure of every setting, prompts taken together."""
    rows = []
    for k in measured.lengths:
        for kind in measured.kinds:
            if not measured.has(kind, k):
                continue
            rollbacks = measured.rate(kind, k, lambda row: 1000 * row["rollbacks"], "committed")
            accepted = measured.rate(kind, k, lambda row: row["matched"] + row["loose_accepted"], "drafted")
            rows.append(
                [
                    f"{name_of(kind)}, K={k}",
                    f"{measured.rate(kind, k, lambda row: row['committed'], 'rounds').estimate:.3f}",
                    "" if kind.is_exact else percent(measured.gain(kind, k), "+"),
                    percent(measured.rate(kind, k, lambda row: row["loose_accepted"], "committed")),
                    f"{rollbacks.estimate:.1f}",
                    f"{100 * accepted.estimate:.1f} %",
                    str(measured.n_loops(kind, k)),
                    str(measured.n(kind, k)),
                ]
            )
    head = [
        "setting",
        "tokens per round",
        "gain over exact",
        "loose",
        "rollbacks / 1000 tokens",
        "accepted",
        "in a loop",
        "prompts",
    ]
    return markdown(head, rows)


def category_table(measured: Measured) -> str:
    """Gain and loose rate alone."""
    rows = []
    for kind in measured.kinds:
        if kind.is_exact:
            cells = [
                f"{measured.rate(kind, k, lambda row: row['committed'], 'rounds').estimate:.2f} tokens per round"
                if measured.has(kind, k)
                else ""
                for k in measured.lengths
            ]
        else:
            cells = [
                f"{percent(measured.gain(kind, k), '+')}; "
                f"{percent(replace_bounds(measured.rate(kind, k, lambda row: row['loose_accepted'], 'committed')))}"
                if measured.has(kind, k)
                else ""
                for k in measured.lengths
            ]
        rows.append([name_of(kind), *cells])
    return markdown(["gain over exact; loose", *(f"K={k}" for k in measured.lengths)], rows)


def replace_bounds(value: Interval) -> Interval:
    """The estimate alone."""
    return Interval(value.estimate, math.nan, math.nan)


def print_table(path: Path) -> None:
    """Markdown of a results file: all prompts, then by category."""
    results = Results.measured(path)
    print(
        f"{results.conditions['target']} with {results.conditions.get('draft', 'prompt lookup')}, greedy, up to "
        f"{results.conditions['tokens']} tokens, W = 6. Gains with 95 % intervals by bootstrap over "
        "prompts (forms of one prompt together)."
    )
    names = list(dict.fromkeys(row["category"] for row in results.rows))
    for name in [None, *names] if len(names) > 1 else [None]:
        measured = Measured([row for row in results.rows if name in (None, row["category"])])
        n = len({row["prompt"] for row in results.rows if name in (None, row["category"])})
        groups = len({row["group"] for row in results.rows if name in (None, row["category"])})
        n_left_out = len([row for row in results.left_out if name in (None, row["category"])])
        forms = f", {groups} of them independent" if groups < n else ""
        left_out = f"; {n_left_out} left out as too long" if n_left_out else ""
        print(f"\n### {name or 'All'} ({n} prompts{forms}{left_out})\n")
        print(whole_table(measured) if name is None else category_table(measured))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--tokens", type=int, default=128, help="tokens for each prompt (default 128)")
    parser.add_argument("--k", type=int, nargs="+", default=[3, 4, 8], help="draft lengths (default 3 4 8)")
    parser.add_argument(
        "--settings", nargs="+", default=list(SETTINGS), help="gates and windows, as in `pyfly-cpp eval` (default: all)"
    )
    args = parser.parse_args()
    if args.table:
        print_table(args.out)
        return
    if not (args.target and args.prompts):
        parser.error("--target and --prompts are needed (or --table)")
    run(args)


if __name__ == "__main__":
    main()
