"""Measurements as texts: tables, pages, and what they say in sentences. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pyfly_cpp.decoding import EXACT, Decoding, short_names
from pyfly_cpp.errors import counted
from pyfly_cpp.measure.load import Load
from pyfly_cpp.measure.quality import BASELINE, Table
from pyfly_cpp.measure.speed import Measured, Memory, Summary, summarise
from pyfly_cpp.measure.statistics import Interval
from pyfly_cpp.measure.sweep import Point
from pyfly_cpp.measure.tasks.task import UNJUDGED

Cells = tuple[list[str], list[list[str]]]
"""Head and body of a table."""

Column = tuple[str, Callable[[Any], str]]
"""Its head, and its cell of a row."""

# ---- Numbers ---------------------------------------------------------------------------------------------------------

NONE = "–"


def percent(value: float | None, digits: int = 1) -> str:
    """`87.5%`; a dash if there is no value."""
    return NONE if value is None else number(100 * value, digits, "%")


def interval(value: Interval | None, form: str = "{:.2f}", scale: float = 1.0, unit: str = "") -> str:
    """`0.97 [0.91, 1.02]`; without the bracket if the data do not determine one."""
    if value is None or not math.isfinite(value.estimate):
        return NONE
    text = form.format(scale * value.estimate)
    if math.isfinite(value.low) and math.isfinite(value.high):
        text += f" [{form.format(scale * value.low)}, {form.format(scale * value.high)}]"
    return text + unit


def number(value: float, digits: int, unit: str = "") -> str:
    """`2.31`; a dash if there is no value."""
    return f"{value:.{digits}f}{unit}" if math.isfinite(value) else NONE


def _in_words(gain: Interval) -> str:
    """`1.33 (95% CI 1.15 to 1.58)`; without the parenthesis if the data do not determine one."""
    text = f"{gain.estimate:.2f}"
    return text if math.isnan(gain.low) else f"{text} (95% CI {gain.low:.2f} to {gain.high:.2f})"


# ---- Tables ----------------------------------------------------------------------------------------------------------

_TOKENS: Column = ("tokens/s [95% CI]", lambda row: interval(row.tokens_per_second, "{:.1f}"))
_PLAIN: Column = ("x plain [95% CI]", lambda row: interval(row.speedup_plain))
_EXACT: Column = ("x exact [95% CI]", lambda row: interval(row.speedup_exact))
_PER_STEP: Column = ("tokens per step", lambda row: number(row.mean_accepted, 2))
_LOOSE: Column = ("loose", lambda row: percent(row.loose_rate))
_SAME: Column = ("same text", lambda row: percent(row.same_output, 0))
"""Of each `Pace`; the last one of those that have `same_output`."""
_ANSWER: Column = ("tokens", lambda row: number(row.mean_tokens, 0))
_FLIPS: Column = ("harmful / helpful", lambda row: f"{row.flips.harmful} / {row.flips.helpful}" if row.flips else NONE)


def _cells(columns: Sequence[Column], rows: Sequence[Any]) -> Cells:
    return [head for head, _ in columns], [[cell(row) for _, cell in columns] for row in rows]


def _setting(rows: Sequence[Any], names_of: Callable[[Iterable[str]], Mapping[str, str]] = short_names) -> Column:
    """The column of the settings' names."""
    names = names_of(row.setting for row in rows)
    return "setting", lambda row: names[row.setting]


def bench_names(settings: Iterable[str], chat: str = "") -> dict[str, str]:
    """Names of settings in a benchmark, where some are governed and the others draft at full length. `chat`: the
    setting of chats."""
    marks = {chat: " (as in chat)", str(EXACT): ", fixed length"}
    return {name: f"{short}{marks.get(name, '')}" for name, short in short_names(settings).items()}


def _of_bench(rows: Sequence[Any], chat: str = "") -> Column:
    """The column of the settings' names in a benchmark."""
    return _setting(rows, lambda settings: bench_names(settings, chat))


def _of_summary(column: Column, head: str | None = None) -> Column:
    """A column of the summaries of loads."""
    return head or column[0], lambda load: column[1](load.summary)


def speed_cells(summaries: Sequence[Summary], chat: str = "") -> Cells:
    """The table of speeds. `chat`: the setting of chats."""
    accepted: Column = "accepted", lambda row: percent(row.acceptance, 0)
    columns = [_of_bench(summaries, chat), _TOKENS, _PLAIN, _EXACT, _PER_STEP, accepted, _LOOSE, _SAME]
    return _cells(columns, summaries)


def time_cells(summaries: Sequence[Summary], memory: Mapping[str, Memory]) -> Cells:
    """The table of where the time went, and of memory."""

    def share(name: str) -> Column:
        return name, lambda row: percent(row.split.get(name))

    def used(row: Summary) -> str:
        size = memory.get(row.setting)
        return f"{size.resident:.0f} ({size.growth:+.0f})" if size is not None else NONE

    shares = map(share, ("draft", "verify", "gate", "python", "rest"))
    return _cells([_of_bench(summaries), *shares, ("MiB (more than the target alone)", used)], summaries)


def depth_cells(summaries: Sequence[Summary]) -> Cells:
    """The table of acceptance by depth, of the settings that drafted."""
    names = bench_names(s.setting for s in summaries)
    body = []
    for s in summaries:
        depths = " ".join(f"{100 * share:.0f}" for share in s.acceptance_at_depth[:16])
        if depths:
            body.append([names[s.setting], depths + (" ..." if len(s.acceptance_at_depth) > 16 else "")])
    return ["setting", "% accepted of the 1st, 2nd, ... draft of a step"], body


def throughput_cells(loads: Sequence[Load]) -> Cells:
    """The table of the speed of several requests at a time."""
    fewest = min(load.n_parallel for load in loads)
    columns: list[Column] = [
        *_load(loads),
        _of_summary(_TOKENS, "tokens/s of all [95% CI]"),
        (f"x {counted(fewest, 'request')}", lambda load: interval(load.times_fewest)),
        *map(_of_summary, (_PLAIN, _EXACT, _PER_STEP, _SAME)),
        ("prompt tokens/s", lambda load: number(load.prompt_tokens_per_second, 0)),
    ]
    return _cells(columns, loads)


def latency_cells(loads: Sequence[Load]) -> Cells:
    """The table of how long a request waits, milliseconds."""

    def milliseconds(head: str, name: str, i: int) -> Column:
        return head, lambda load: number(1000 * getattr(load, name)[i], 1)

    columns = [
        milliseconds("first token, ms: p50", "first_token", 0),
        milliseconds("p95", "first_token", 1),
        milliseconds("between tokens, ms: p50", "between_tokens", 0),
        milliseconds("p95", "between_tokens", 1),
    ]
    return _cells([*_load(loads), *columns], loads)


def _load(loads: Sequence[Load]) -> list[Column]:
    """The columns that name a load."""
    return [_of_summary(_of_bench([load.summary for load in loads])), ("requests", lambda load: f"{load.n_parallel}")]


def categories(measured: Sequence[Measured]) -> list[str]:
    """The named categories, in the order of the prompts; empty if there are fewer than two."""
    names = list(dict.fromkeys(m.prompt.category for m in measured if m.prompt.category))
    return names if len(names) > 1 else []


def category_cells(measured: Sequence[Measured]) -> Cells:
    """The table of speedups by category (over plain, or over exact if plain is missing)."""
    base = "plain" if any(m.setting == "plain" for m in measured) else "exact"
    names = categories(measured)
    by_name = {name: {s.setting: s for s in summarise(measured, name)} for name in names}
    settings = [s.setting for s in summarise(measured) if s.setting != base]
    head = [f"x {base}", *names]
    body = []
    short = bench_names(settings)
    for setting in settings:
        found = [by_name[name][setting] for name in names]
        body.append(
            [short[setting], *[interval(s.speedup_plain if base == "plain" else s.speedup_exact) for s in found]]
        )
    return head, body


def tables(measured: Sequence[Measured], memory: Mapping[str, Memory], chat: str = "") -> list[Cells]:
    """All tables of requests that ran alone, that of the speeds first."""
    summaries = summarise(measured)
    out = [speed_cells(summaries, chat), time_cells(summaries, memory)]
    depths = depth_cells(summaries)
    if depths[1]:
        out.append(depths)
    if categories(measured):
        out.append(category_cells(measured))
    return out


def sweep_cells(points: Sequence[Point]) -> Cells:
    """The table of a gate's thresholds."""
    names = bench_names(point.setting for point in points)
    columns: list[Column] = [
        ("threshold", lambda point: names[point.setting]),
        *map(_of_summary, (_EXACT, _PER_STEP, _LOOSE)),
        ("agreement with exact [95% CI]", lambda point: interval(point.agreement)),
    ]
    return _cells(columns, points)


def task_cells(table: Table) -> Cells:
    """The table of a task; without the factors over a setting that did not run."""
    columns: list[Column] = [
        *_score(table),
        ("recovery [95% CI]", lambda row: interval(row.recovery)),
        _FLIPS,
        ("p", lambda row: f"{row.flips.p:.2g}" if row.flips else NONE),
        _SAME, _TOKENS, _PLAIN, _EXACT, _PER_STEP, _LOOSE,
        ("loops", lambda row: f"{row.n_loops}"),
        _ANSWER,
    ]  # fmt: skip
    names = [row.setting for row in table.rows]
    left_out = [column for name, column in (("plain", _PLAIN), (BASELINE, _EXACT)) if name not in names]
    return _cells([column for column in columns if column not in left_out], table.rows)


def short_task_cells(table: Table) -> Cells:
    """What people look for first in the table of a task; it fits 100 columns."""
    return _cells([*_score(table), _FLIPS, _SAME, _EXACT], table.rows)


def _score(table: Table) -> list[Column]:
    return [
        _setting(table.rows),
        (table.criterion, lambda row: f"{row.n_correct}/{row.n}"),
        (f"{table.criterion}, % [95% CI]", lambda row: interval(row.accuracy, "{:.1f}", 100)),
    ]


# ---- Sentences -------------------------------------------------------------------------------------------------------

_SPEED = "Speed is that of decoding: total tokens over total seconds, without the prompt and the first step."

NOTE = (
    f"{_SPEED} Settings took turns on every prompt. 95% confidence intervals: jackknife over prompts. They do "
    "not hold for other machines, models or prompts."
)

SWEEP_NOTE = (
    "Agreement is the share of tokens that an output has in common with the exact one, in order; other words lower it, "
    "also if they mean the same."
)


PARALLEL_NOTE = (
    "Tokens/s of all is decoding without the prompts, total tokens over the time that the batch took; so many "
    "requests ran all the time. First token: after the beginning of the request, its prompt included. Between tokens: "
    "until a reader gets more; the tokens of one step come together. Numbers and settings took turns on blocks of "
    "prompts. 95% confidence intervals: jackknife over prompts."
)


def verdict(summaries: Sequence[Summary], chat: str) -> str:
    """Whether drafts are worth it here, in a sentence; empty if that was not measured. `chat`: the setting of chats."""
    by_name = {s.setting: s for s in summaries}
    governed = by_name.get(chat)
    if governed is None or (gain := governed.speedup_plain) is None or not math.isfinite(gain.estimate):
        return ""
    times = f"{_in_words(gain)} times as fast as without drafts"
    if math.isnan(gain.low):
        said = f"These prompts are too few for certainty. With drafts as in chat it was {times}"
    elif gain.low > 1:
        said = f"Drafts make this model faster here: with drafts as in chat it is {times}"
    elif gain.high < 1:
        said = f"Drafts make this model slower here: with drafts as in chat it is {times}"
        said += ". --drafter none leaves them out"
    else:
        said = f"Drafts make no certain difference here: with drafts as in chat it is {times}"
    others = [s for s in summaries if s.speedup_plain and s is not governed and Decoding.parse(s.setting).is_exact]
    best = max(others, key=lambda s: s.speedup_plain.estimate if s.speedup_plain else 0.0, default=None)
    if best is not None and best.speedup_plain is not None and best.speedup_plain.low > gain.estimate:
        name = bench_names([best.setting])[best.setting]
        said += f". The lossless setting `{name}` is {_in_words(best.speedup_plain)} times as fast"
    return said + "."


_ALSO = {
    "strict": "Right in the form that was asked for (strict)",
    "value": "Right as a number, 18.00 being 18 (value)",
    "loop": "Answers with a loop",
    "recall": "Words that were found (recall)",
    "answered": "Answers that name a choice",
}
"""The meaning of other scores of a task."""


def task_notes(table: Table) -> list[str]:
    """Conclusions and their limits, a sentence each."""
    out = []
    if table.n_complete < table.n_items:
        out.append(
            f"{table.n_complete} of {table.n_items} items are complete; the others count nowhere. Resume the run "
            "with the same command."
        )
    if table.n_groups < table.n_complete:
        out.append(
            f"The {table.n_complete} items are forms of {table.n_groups} prompts, and intervals allow for that. The "
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
        f"{_SPEED} 95% confidence intervals: Wilson for accuracy, Bonett and Price for recovery, adjusted Wald for a "
        "change of accuracy, jackknife over items for speeds."
    )
    return out


# ---- Pages -----------------------------------------------------------------------------------------------------------


def page(title: str, facts: Sequence[str], tables: Sequence[Cells], note: str) -> str:
    """Facts, tables and a note as a Markdown page."""
    lines = [f"# {title}", "", *[f"- {fact}" for fact in facts], ""]
    for head, body in tables:
        lines += [markdown_row(head), markdown_row(["---"] * len(head)), *map(markdown_row, body), ""]
    return "\n".join([*lines, note, ""])


def task_page(table: Table, facts: Sequence[str] = ()) -> str:
    """The table of a task, with its notes, as a Markdown page."""
    return page(table.title, facts, [task_cells(table)], "\n".join(f"- {note}" for note in task_notes(table)))


def markdown_row(texts: Sequence[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"
