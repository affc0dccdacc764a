"""From the lines of a run to its table, as data. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyfly_cpp.machine.rows import Row
from pyfly_cpp.measure.pace import Decoded, Pace, pace
from pyfly_cpp.measure.statistics import (
    Flips,
    Interval,
    design_effect,
    flips,
    for_json,
    paired_difference,
    recovery,
    wilson,
)
from pyfly_cpp.measure.tasks.task import UNJUDGED

BASELINE = "exact"
"""The setting that flips and recovery are counted against."""


@dataclass(frozen=True)
class SettingResult(Pace):
    """One row of the table."""

    n: int
    """Items that every setting has answered; only these count."""
    n_correct: int
    accuracy: Interval
    """Wilson; items that are not independent count for less."""
    recovery: Interval | None
    """Accuracy over the baseline's."""
    difference: Interval | None
    """Accuracy less the baseline's, paired."""
    flips: Flips | None
    """Against the baseline."""
    same_output: float | None
    """Share of the items with the very output of the baseline."""
    n_loops: int
    n_cut: int
    """Answers that reached the limit of tokens; they may be wrong only for that."""
    mean_tokens: float
    n_empty: int = 0
    """Answers without a word."""
    n_unjudged: int = 0
    """Answers that the task could not judge; they count as wrong."""
    also: dict[str, float] = field(default_factory=dict)
    """Means of the task's other criteria."""


@dataclass(frozen=True)
class Table:
    """The result of a run."""

    title: str
    criterion: str
    n_items: int
    """Items of the plan."""
    n_complete: int
    """Items that every setting has answered."""
    n_groups: int
    rows: tuple[SettingResult, ...]

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        return {**for_json(vars(self)), "baseline": BASELINE}


def answered_by_all(lines: Iterable[Row], settings: Iterable[str]) -> list[dict[str, Row]]:
    """The items that have a line for every setting: their lines by setting, the first one of each."""
    by_item: dict[str, dict[str, Row]] = {}
    for line in lines:
        by_item.setdefault(line["item"], {}).setdefault(line["setting"], line)
    wanted = set(settings)
    return [answers for answers in by_item.values() if answers.keys() >= wanted]


def summarise(
    lines: Sequence[Row], settings: Sequence[str], n_items: int, title: str = "", criterion: str = "correct"
) -> Table:
    """The table of the items that have a line for every setting."""
    complete = answered_by_all(lines, settings)
    groups = [next(iter(answers.values()))["group"] for answers in complete]
    columns = {setting: [answers[setting] for answers in complete] for setting in settings}
    rows = tuple(_result(setting, columns, groups) for setting in settings)
    return Table(title, criterion, n_items, len(complete), len(set(groups)), rows)


def _decoded(line: Row) -> Decoded:
    counts = (line["stats"][name] for name in ("committed", "rounds", "loose_accepted"))
    return Decoded(line["decode_tokens"], line["decode_seconds"], *counts)


def _result(setting: str, columns: dict[str, list[Row]], groups: list[str]) -> SettingResult:
    lines = columns[setting]
    n = len(lines)
    correct = [bool(line["correct"]) for line in lines]
    accuracy = wilson(sum(correct), n, design_effect(np.asarray(correct) - sum(correct) / n, groups) if n else 1.0)
    baseline = columns.get(BASELINE) if setting != BASELINE else None
    base_correct = [bool(line["correct"]) for line in baseline] if baseline is not None else None
    details = [line["detail"] for line in lines]
    names = dict.fromkeys(name for detail in details for name, of in detail.items() if isinstance(of, (bool, float)))
    return SettingResult(
        **vars(pace(setting, {name: list(map(_decoded, column)) for name, column in columns.items()}, groups)),
        n=n,
        n_correct=sum(correct),
        accuracy=accuracy,
        recovery=recovery(base_correct, correct, groups) if base_correct is not None else None,
        difference=paired_difference(flips(base_correct, correct)) if base_correct is not None else None,
        flips=flips(base_correct, correct) if base_correct is not None else None,
        same_output=_share([a["output"] == b["output"] for a, b in zip(lines, baseline)])
        if baseline is not None
        else None,
        n_loops=sum(1 for line in lines if line["loop"]),
        n_cut=sum(1 for line in lines if line["finish"] in ("length", "context")),
        mean_tokens=sum(len(line["tokens"]) for line in lines) / n if n else math.nan,
        n_empty=sum(1 for line in lines if not line["output"].strip()),
        n_unjudged=sum(1 for detail in details if UNJUDGED in detail),
        also={name: _share([float(detail.get(name) or 0) for detail in details]) for name in names},
    )


def _share(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
