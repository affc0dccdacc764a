"""What the study decodes: items of which tasks, with which rules, in which order, and which half of them judges."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pyfly_cpp.decoding import PLAIN, Decoding
from pyfly_cpp.decoding.gates import why_strict
from pyfly_cpp.evaluation.commonsenseqa import CommonsenseQa
from pyfly_cpp.evaluation.files import DataError
from pyfly_cpp.evaluation.gsm8k import Gsm8k
from pyfly_cpp.evaluation.humaneval import HumanEval
from pyfly_cpp.evaluation.mbpp import Mbpp
from pyfly_cpp.evaluation.mgsm import Mgsm
from pyfly_cpp.evaluation.mmlu import Mmlu
from pyfly_cpp.evaluation.task import Item, Task
from pyfly_cpp.evaluation.writing import Writing
from study.instructions import Instructions

# ---- Items -----------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A part of the study: items of one task."""

    task: Task
    files: tuple[str, ...]
    """Data files in the folder that is given; none: the items are generated."""
    n: int | None
    """Items, or where the files hold several forms of a problem, problems; None: all."""


PARTS = {
    "gsm8k": Part(Gsm8k(), ("gsm8k_test.jsonl",), 500),
    "humaneval": Part(HumanEval(), ("humaneval.jsonl",), None),
    "mbpp": Part(Mbpp(), ("mbpp_sanitized.jsonl",), None),
    "writing": Part(Writing(), ("creative_writing_prompts.jsonl",), 100),
    "instructions": Part(Instructions(), (), 100),
    "mgsm": Part(Mgsm(), ("mgsm_de.jsonl", "mgsm_fr.jsonl", "mgsm_th.jsonl"), 100),
    "commonsenseqa": Part(CommonsenseQa(), ("csqa_dev.jsonl",), 200),
    "mmlu": Part(Mmlu(), ("mmlu_test_sample.jsonl",), 200),
}
POOLED = ("gsm8k", "humaneval", "mbpp")
"""The parts whose accuracies are pooled."""
PROSE = "writing"
"""The part that is prose alone."""
REST = tuple(name for name in PARTS if name not in POOLED)
OTHER = tuple(name for name in REST if name != PROSE)
"""Parts with right and wrong answers that are not pooled: does what holds for the pooled ones hold there, too?"""


def read_part(name: str, folder: Path, n: int | None = None) -> list[Item]:
    """The items of a part in the order in which they are decoded, which has nothing to do with what they are (by a
    hash of the problem; the forms of one problem stand together). `n`: as of `Part`, in its place."""
    part = PARTS[name]
    n = part.n if n is None else n
    if isinstance(part.task, Instructions):
        return part.task.generate(n or 100)
    items: dict[str, Item] = {}
    for file in part.files:
        for item in part.task.read(folder / file):
            if item.id in items:
                raise DataError(f"{folder / file}: the id {item.id!r} is in an earlier file, too; make the ids unique.")
            items[item.id] = item
    # Prompts with an own group each, or none, are problems of their own; those of writing are few, and vary a lot.
    unit = (lambda item: item.unit) if name == "mgsm" else (lambda item: item.id)
    units = sorted({unit(item) for item in items.values()}, key=digest)[:n]
    rank = {key: i for i, key in enumerate(units)}
    return sorted((item for item in items.values() if unit(item) in rank), key=lambda item: (rank[unit(item)], item.id))


def interleaved(parts: Mapping[str, Sequence[Item]]) -> list[tuple[str, Item]]:
    """(part, item) of all parts, each part spread evenly over the whole."""
    placed = [
        ((i + 0.5) / len(items), name, item) for name, items in parts.items() for i, item in enumerate(items)
    ]  # fmt: skip
    return [(name, item) for _, name, item in sorted(placed, key=lambda entry: entry[:2])]


def half(unit: str) -> str:
    """Which half an item belongs to, by its unit (`Item.unit`): `"choose"`, on which rules are chosen, or `"judge"`,
    on which the choice is judged."""
    return ("choose", "judge")[digest(f"half {unit}")[0] % 2]


def digest(text: str) -> bytes:
    """What orders items and tells their halves: the same everywhere, and nothing to do with what they are."""
    return hashlib.sha256(text.encode("utf-8")).digest()


# ---- Ways to decode --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A setting, and which run of it: runs of one setting differ by nothing but the noise of kernels, since each text
    has other neighbours in its batches."""

    setting: Decoding
    run: int = 1

    def __str__(self) -> str:
        return str(self.setting) + (f" #{self.run}" if self.run > 1 else "")

    @property
    def title(self) -> str:
        """Rule and run, for a table."""
        return f"`{self.rule}`" + (f" #{self.run}" if self.run > 1 else "")

    @property
    def rule(self) -> str:
        """Gate and window."""
        return "plain" if self.setting.is_plain else str(replace(self.setting, draft_max=None))

    @property
    def k(self) -> int:
        """Tokens drafted in a round; 0 for plain decoding."""
        return 0 if self.setting.is_plain else self.setting.draft_max or 0


def parse_way(text: str) -> Way:
    """Reads what `str` of a Way gives; raises ValueError."""
    setting, hash_sign, run = text.partition("#")
    if hash_sign and not (run.isdigit() and int(run) >= 1):
        raise ValueError(f"cannot read {text!r}: behind # stands the number of the run, from 1 on.")
    return Way(Decoding.parse(setting), int(run or 1))


RULES = (
    "exact",
    "margin:0.2",
    "margin:0.3",
    "margin:0.4",
    "margin:1",
    "entropy:0.3",
    "entropy-normalized:0.035",
    "fuzzy-js:0.1",
    "fuzzy-js:0.2",
    "typical:0.09:0.3",
    "relaxed:10:0.6",
)
"""The speed of the others is compared with the first, exact."""

ALL_RULES = (
    *RULES,
    "ratio:0.74",
    "fuzzy-kl:0.5",
    "fuzzy-kl-target:0.5",
    "fuzzy-js-code:0.2",
    "fuzzy-tv:0.3",
    "all(margin:0.3,exact-first:8)",
    "all(margin:0.3,budget:2)",
    "regions(prose=margin:0.3)",
    "regions(prose=all(margin:0.3,exact-first:8,budget:2))",
    "regions(prose=all(margin:0.15,exact-first:8,budget:1))",
    "regions(prose=all(margin:0.3,exact-first:8,budget:2,no-repeat:8))",
    "regions(prose=all(margin:0.15,exact-first:8,budget:1,no-repeat:8))",
)
"""Every rule that greedy decoding tells apart, for rules.py."""

SUPERSEDED = (
    "regions(prose=all(margin:0.3,exact-first:8,budget:2))",
    "regions(prose=all(margin:0.15,exact-first:8,budget:1))",
)
"""Replaced by the same rules with `no-repeat:8`, and left out of the report; their loops stand in rules.md."""

K = (8, 3)


def guarded(rule: str) -> tuple[str, ...]:
    """A rule with a guard each, and with all of them. Regions: what is no prose (numbers, code, thoughts) is exact."""
    return (
        f"all({rule},exact-first:8)",
        f"all({rule},budget:2)",
        f"all({rule},no-repeat:8)",
        f"regions(prose={rule})",
        f"regions(prose=all({rule},exact-first:8,budget:2,no-repeat:8))",
    )


def ways(rules: Sequence[str], k: int, run: int = 1) -> list[Way]:
    """These rules with k tokens drafted. Those that can accept nothing loosely with so few are left out: they are
    exact."""
    settings = [replace(Decoding.parse(rule), draft_max=k) for rule in rules]
    return [Way(one, run) for one in settings if why_strict(one.gate, one.window or one.gate.window, k) is None]


class Stage(NamedTuple):
    """Items and ways that belong together: every item is decoded in all ways before the next."""

    parts: tuple[str, ...]
    ways: tuple[Way, ...]


def stages(best: Sequence[str] = (), rules: Sequence[str] = RULES) -> dict[str, Stage]:
    """All stages by name, in the order of their use.

    Plain decoding is exact decoding, and by far the cheapest where it was recorded (two Zen 4 cores: 9 answers a
    minute, with 3 drafts 3.5, with 8 drafts 2), so its runs are what accuracies are compared with. It has stages of
    its own: beside texts with drafts, a text without any waits for their long rounds. One run compares (`paths.py`);
    the second tells how much of the flips is noise.

    Args:
        best: Rules that are worth guards and second runs; the stages for them are empty without.
        rules: In place of RULES.
    """
    out = {"plain": Stage(tuple(PARTS), (Way(PLAIN),)), "plain2": Stage(tuple(PARTS), (Way(PLAIN, 2),))}
    for name, parts in (("pooled", POOLED), ("rest", REST)):
        for k in K:
            out[f"{name}{k}"] = Stage(parts, tuple(ways(rules, k)))
    for k in K:
        guards = [rule for one in best for rule in guarded(one)]
        out[f"guards{k}"] = Stage((*POOLED, PROSE), tuple(ways(guards, k)))
    for k in K:
        out[f"again{k}"] = Stage(POOLED, (*ways(("exact",), k, 2), *ways(best, k, 2), *ways(best, k, 3)))
    return out


def work(stage: Stage, items: Mapping[str, Sequence[Item]]) -> Iterator[tuple[str, Item, tuple[Way, ...]]]:
    """(part, item, ways) of a stage, in order. `items`: of each part."""
    for name, item in interleaved({name: items[name] for name in stage.parts if name in items}):
        yield name, item, stage.ways
