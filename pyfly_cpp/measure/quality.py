"""From the lines of a run to its table: as data, as Markdown, and for a terminal. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyfly_cpp.decoding import short_names
from pyfly_cpp.errors import counted
from pyfly_cpp.machine.rows import Row
from pyfly_cpp.measure.statistics import (
    Flips,
    Interval,
    Timed,
    bootstrap,
    flips,
    for_json,
    paired_difference,
    ratio,
    recovery,
    speed,
    speedup,
    wilson,
)
from pyfly_cpp.measure.tasks.task import UNJUDGED

BASELINE = "exact"
"""The setting that flips and recovery are counted against."""


@dataclass(frozen=True)
class SettingResult:
    """One row of the table."""

    setting: str
    n: int
    """Items that every setting has answered; only these count."""
    n_correct: int
    accuracy: Interval
    """Wilson, or by bootstrap over groups if items are not independent."""
    recovery: Interval | None
    """Accuracy over the baseline's."""
    difference: Interval | None
    """Accuracy less the baseline's, paired."""
    flips: Flips | None
    """Against the baseline."""
    same_output: float | None
    """Share of the items with the very output of the baseline."""
    tokens_per_second: Interval
    speedup_plain: Interval | None
    speedup_exact: Interval | None
    mean_accepted: float
    loose_rate: float
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


def summarise(
    lines: Sequence[Row], settings: Sequence[str], n_items: int, title: str = "", criterion: str = "correct"
) -> Table:
    """The table of the items that have a line for every setting."""
    by_item: dict[str, dict[str, Row]] = {}
    for line in lines:
        by_item.setdefault(line["item"], {}).setdefault(line["setting"], line)
    complete = [answers for answers in by_item.values() if all(setting in answers for setting in settings)]
    groups = [next(iter(answers.values()))["group"] for answers in complete]
    columns = {setting: [answers[setting] for answers in complete] for setting in settings}
    rows = tuple(_result(setting, columns, groups) for setting in settings)
    return Table(title, criterion, n_items, len(complete), len(set(groups)), rows)


def _timed(lines: Sequence[Row]) -> Timed:
    return [(line["decode_tokens"], line["decode_seconds"]) for line in lines]


def _result(setting: str, columns: dict[str, list[Row]], groups: list[str]) -> SettingResult:
    lines = columns[setting]
    n = len(lines)
    correct = [bool(line["correct"]) for line in lines]
    grouped = len(set(groups)) < n
    accuracy = bootstrap(np.column_stack([correct, np.ones(n)]), ratio, groups) if grouped else wilson(sum(correct), n)
    baseline = columns.get(BASELINE) if setting != BASELINE else None
    base_correct = [bool(line["correct"]) for line in baseline] if baseline is not None else None

    def over(other: str) -> Interval | None:
        if other not in columns or other == setting:
            return None
        return speedup(_timed(lines), _timed(columns[other]), groups)

    total = {name: sum(line["stats"][name] for line in lines) for name in ("committed", "rounds", "loose_accepted")}
    details = [line["detail"] for line in lines]
    names = dict.fromkeys(name for detail in details for name, of in detail.items() if isinstance(of, (bool, float)))
    return SettingResult(
        setting=setting,
        n=n,
        n_correct=sum(correct),
        accuracy=accuracy,
        recovery=recovery(base_correct, correct, groups) if base_correct is not None else None,
        difference=paired_difference(flips(base_correct, correct)) if base_correct is not None else None,
        flips=flips(base_correct, correct) if base_correct is not None else None,
        same_output=_share([a["output"] == b["output"] for a, b in zip(lines, baseline)])
        if baseline is not None
        else None,
        tokens_per_second=speed(_timed(lines), groups),
        speedup_plain=over("plain"),
        speedup_exact=over("exact") if setting != "plain" else None,
        mean_accepted=total["committed"] / total["rounds"] if total["rounds"] else math.nan,
        loose_rate=total["loose_accepted"] / total["committed"] if total["committed"] else math.nan,
        n_loops=sum(1 for line in lines if line["loop"]),
        n_cut=sum(1 for line in lines if line["finish"] in ("length", "context")),
        mean_tokens=sum(len(line["tokens"]) for line in lines) / n if n else math.nan,
        n_empty=sum(1 for line in lines if not line["output"].strip()),
        n_unjudged=sum(1 for detail in details if UNJUDGED in detail),
        also={name: _share([float(detail.get(name) or 0) for detail in details]) for name in names},
    )


def _share(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


# ---- For people ------------------------------------------------------------------------------------------------------

NONE = "–"


def percent(value: float, digits: int = 1) -> str:
    """`87.5%`; a dash if there is no value."""
    return f"{100 * value:.{digits}f}%" if math.isfinite(value) else NONE


def interval(value: Interval | None, form: str = "{:.2f}", scale: float = 1.0, unit: str = "") -> str:
    """`0.97 [0.91, 1.02]`; without the bracket if the data do not determine one."""
    if value is None or not math.isfinite(value.estimate):
        return NONE
    text = form.format(scale * value.estimate)
    if math.isfinite(value.low) and math.isfinite(value.high):
        text += f" [{form.format(scale * value.low)}, {form.format(scale * value.high)}]"
    return text + unit


_FACTORS = {"x plain [95% CI]": "plain", "x exact [95% CI]": BASELINE}
"""Columns, and the setting that they compare with."""
_SPEED = ("tokens/s [95% CI]", *_FACTORS, "tokens per step", "loose", "tokens")
"""Columns that are not about quality."""


def cells(table: Table) -> tuple[list[str], list[list[str]]]:
    """Head and body of the table, as texts; without the factors over a setting that did not run."""
    head = [
        "setting", f"{table.criterion}", f"{table.criterion}, % [95% CI]", "recovery [95% CI]", "harmful / helpful",
        "p", "same text", "tokens/s [95% CI]", "x plain [95% CI]", "x exact [95% CI]", "tokens per step", "loose",
        "loops", "tokens",
    ]  # fmt: skip
    body = []
    short = short_names(row.setting for row in table.rows)
    for row in table.rows:
        flipped = f"{row.flips.harmful} / {row.flips.helpful}" if row.flips else NONE
        body.append(
            [
                short[row.setting], f"{row.n_correct}/{row.n}", interval(row.accuracy, "{:.1f}", 100),
                interval(row.recovery), flipped, f"{row.flips.p:.2g}" if row.flips else NONE,
                percent(row.same_output, 0) if row.same_output is not None else NONE,
                interval(row.tokens_per_second, "{:.1f}"), interval(row.speedup_plain), interval(row.speedup_exact),
                f"{row.mean_accepted:.2f}" if math.isfinite(row.mean_accepted) else NONE, percent(row.loose_rate),
                f"{row.n_loops}", f"{row.mean_tokens:.0f}" if math.isfinite(row.mean_tokens) else NONE,
            ]
        )  # fmt: skip
    names = [row.setting for row in table.rows]
    shown = [i for i, name in enumerate(head) if name not in _FACTORS or _FACTORS[name] in names]
    return [head[i] for i in shown], [[row[i] for i in shown] for row in body]


def halves(head: list[str], body: list[list[str]]) -> list[tuple[list[str], list[list[str]]]]:
    """The table in two, quality and speed, for a narrow terminal."""
    speed = [i for i, name in enumerate(head) if i == 0 or name in _SPEED]
    quality = [i for i, name in enumerate(head) if name not in _SPEED]
    return [([head[i] for i in part], [[row[i] for i in part] for row in body]) for part in (quality, speed)]


_ALSO = {
    "strict": "Right in the form that was asked for (strict)",
    "value": "Right as a number, 18.00 being 18 (value)",
    "loop": "Answers with a loop",
    "recall": "Words that were found (recall)",
    "answered": "Answers that name a choice",
}
"""The meaning of other scores of a task."""


def notes(table: Table) -> list[str]:
    """Conclusions and their limits, a sentence each."""
    out = []
    if table.n_complete < table.n_items:
        out.append(
            f"{table.n_complete} of {table.n_items} items are complete; the others count nowhere. Resume the run "
            "with the same command."
        )
    if table.n_groups < table.n_complete:
        out.append(
            f"The {table.n_complete} items are forms of {table.n_groups} prompts; intervals resample prompts. The "
            "paired difference and McNemar's p treat items as independent and are too sure of themselves here."
        )
    short = short_names(row.setting for row in table.rows)
    for row in table.rows:
        if row.difference is not None and row.flips is not None and row.setting != "plain":
            low, high = 100 * row.difference.low, 100 * row.difference.high
            out.append(
                f"{short[row.setting]}: against {BASELINE}, {counted(row.flips.harmful, 'item')} became wrong and "
                f"{row.flips.helpful} right (McNemar p = {row.flips.p:.2g}); with n = {row.n} a change between "
                f"{low:+.1f} and {high:+.1f} points of accuracy is consistent with that."
            )
    same = next((row.same_output for row in table.rows if row.setting == "plain" and row.n), None)
    n_other = 0 if same is None else round((1 - same) * table.n_complete)
    if n_other:
        out.append(
            f"plain and {BASELINE} differ in {n_other} of {table.n_complete} answers. Two tokens were nearly tied, and "
            "llama.cpp's kernels round a batch differently from a single token (docs/answers.md)."
        )
    if any(row.n_cut for row in table.rows):
        cut = ", ".join(f"{short[row.setting]} {row.n_cut}" for row in table.rows)
        out.append(f"Answers cut at the limit of tokens, of {table.n_complete}: {cut}.")
    empty = [short[row.setting] for row in table.rows if row.n and row.n_empty == row.n]
    if empty:
        out.append(
            f"Every answer of {', '.join(empty)} is empty, so nothing is known of the model's abilities: it ends its "
            "answers immediately. It may be a base model, or the chat template is not its own (--chat-format)."
        )
    n_unjudged = sum(row.n_unjudged for row in table.rows)
    if n_unjudged:
        what = counted(n_unjudged, "output")
        out.append(f"{what} could not be judged, which counts as wrong (`{UNJUDGED}` in the lines has the reason).")
    names = sorted({name for row in table.rows for name in row.also})
    for name in names:
        parts = ", ".join(f"{short[row.setting]} {percent(row.also[name])}" for row in table.rows if name in row.also)
        out.append(f"{_ALSO.get(name, name)}: {parts}.")
    out.append(
        "Speed is that of decoding: total tokens over total seconds, without the prompt and the first step. 95% "
        "confidence intervals: Wilson for shares, percentile bootstrap over items otherwise."
    )
    return out


def markdown(table: Table, facts: Sequence[str] = ()) -> str:
    """The table as a Markdown page."""
    head, body = cells(table)
    lines = [f"# {table.title}", "", *[f"- {fact}" for fact in facts], *([""] if facts else [])]
    lines += [markdown_row(head), markdown_row(["---"] * len(head)), *map(markdown_row, body), ""]
    lines += [f"- {note}" for note in notes(table)]
    return "\n".join(lines) + "\n"


def markdown_row(texts: Sequence[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"
