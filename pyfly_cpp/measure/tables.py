"""A measurement as texts and as a picture. Pure functions but `plot`, which writes a file."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pyfly_cpp.decoding import Decoding, short_names
from pyfly_cpp.decoding.gates import FORMS
from pyfly_cpp.errors import counted
from pyfly_cpp.measure.load import Load
from pyfly_cpp.measure.quality import NONE, interval, markdown_row, percent
from pyfly_cpp.measure.speed import Measured, Memory, Summary, summarise
from pyfly_cpp.measure.statistics import Interval
from pyfly_cpp.measure.sweep import Point

Cells = tuple[list[str], list[list[str]]]


def speed_cells(summaries: Sequence[Summary], chat: str = "") -> Cells:
    """Head and body of the table of speeds. `chat`: the setting of chats."""
    head = ["setting", "tokens/s [95% CI]", "x plain [95% CI]", "x exact [95% CI]", "tokens per step", "accepted",
            "loose", "same text"]  # fmt: skip
    names = short_names(s.setting for s in summaries)
    names = {name: f"{short} (as in chat)" if name == chat else short for name, short in names.items()}
    body = [
        [
            names[s.setting], interval(s.tokens_per_second, "{:.1f}"), interval(s.speedup_plain),
            interval(s.speedup_exact), _number(s.mean_accepted, 2), percent(s.acceptance, 0), percent(s.loose_rate),
            percent(s.same_output, 0) if s.same_output is not None else "–",
        ]
        for s in summaries
    ]  # fmt: skip
    return head, body


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
        said += f". The lossless setting {best.setting} is {_in_words(best.speedup_plain)} times as fast"
    return said + "."


def _number(value: float, digits: int) -> str:
    """A dash if there is no value."""
    return f"{value:.{digits}f}" if math.isfinite(value) else NONE


def _in_words(gain: Interval) -> str:
    """`1.33 (95% CI 1.15 to 1.58)`; without the parenthesis if the data do not determine one."""
    text = f"{gain.estimate:.2f}"
    return text if math.isnan(gain.low) else f"{text} (95% CI {gain.low:.2f} to {gain.high:.2f})"


def time_cells(summaries: Sequence[Summary], memory: Mapping[str, Memory]) -> Cells:
    """Head and body of the table of where the time went, and of memory."""
    head = ["setting", "draft", "verify", "gate", "python", "rest", "MiB (more than the target alone)"]
    body = []
    names = short_names(s.setting for s in summaries)
    for s in summaries:
        parts = [percent(s.split.get(name, float("nan"))) for name in head[1:6]]
        size = memory.get(s.setting)
        used = f"{size.resident:.0f} ({size.growth:+.0f})" if size is not None else "–"
        body.append([names[s.setting], *parts, used])
    return head, body


def depth_cells(summaries: Sequence[Summary]) -> Cells:
    """Head and body of the table of acceptance by depth, of the settings that drafted."""
    names = short_names(s.setting for s in summaries)
    body = []
    for s in summaries:
        depths = " ".join(f"{100 * share:.0f}" for share in s.acceptance_at_depth[:16])
        if depths:
            body.append([names[s.setting], depths + (" ..." if len(s.acceptance_at_depth) > 16 else "")])
    return ["setting", "% accepted of the 1st, 2nd, ... draft of a step"], body


def throughput_cells(loads: Sequence[Load]) -> Cells:
    """Head and body of the table of the speed of several requests at a time."""
    fewest = min(load.n_parallel for load in loads)
    head = [
        "setting", "requests", "tokens/s of all [95% CI]", f"x {counted(fewest, 'request')}", "x plain [95% CI]",
        "x exact [95% CI]", "tokens per step", "same text", "prompt tokens/s",
    ]  # fmt: skip
    names = short_names(load.summary.setting for load in loads)
    body = [
        [
            names[s.setting], f"{load.n_parallel}", interval(s.tokens_per_second, "{:.1f}"),
            interval(load.times_fewest), interval(s.speedup_plain), interval(s.speedup_exact),
            _number(s.mean_accepted, 2), percent(s.same_output, 0) if s.same_output is not None else "–",
            _number(load.prompt_tokens_per_second, 0),
        ]
        for load in loads
        for s in [load.summary]
    ]  # fmt: skip
    return head, body


def latency_cells(loads: Sequence[Load]) -> Cells:
    """Head and body of the table of how long a text waits, milliseconds."""
    head = ["setting", "requests", "first token, ms: p50", "p95", "between tokens, ms: p50", "p95"]
    names = short_names(load.summary.setting for load in loads)
    body = [
        [names[load.summary.setting], f"{load.n_parallel}"]
        + [_number(1000 * seconds, 1) for seconds in (*load.first_token, *load.between_tokens)]
        for load in loads
    ]
    return head, body


def categories(measured: Sequence[Measured]) -> list[str]:
    """The named categories, in the order of the prompts; empty if there are fewer than two."""
    names = list(dict.fromkeys(m.prompt.category for m in measured if m.prompt.category))
    return names if len(names) > 1 else []


def category_cells(measured: Sequence[Measured]) -> Cells:
    """Head and body of the table of speedups by category (over plain, or over exact if plain is missing)."""
    base = "plain" if any(m.setting == "plain" for m in measured) else "exact"
    names = categories(measured)
    by_name = {name: {s.setting: s for s in summarise(measured, name)} for name in names}
    settings = [s.setting for s in summarise(measured) if s.setting != base]
    head = [f"x {base}", *names]
    body = []
    short = short_names(settings)
    for setting in settings:
        found = [by_name[name][setting] for name in names]
        body.append(
            [short[setting], *[interval(s.speedup_plain if base == "plain" else s.speedup_exact) for s in found]]
        )
    return head, body


def tables(measured: Sequence[Measured], memory: Mapping[str, Memory], chat: str = "") -> list[Cells]:
    """All tables of texts that ran alone."""
    summaries = summarise(measured)
    out = [speed_cells(summaries, chat), time_cells(summaries, memory)]
    depths = depth_cells(summaries)
    if depths[1]:
        out.append(depths)
    if categories(measured):
        out.append(category_cells(measured))
    return out


def sweep_cells(points: Sequence[Point]) -> Cells:
    """Head and body of the table of a gate's thresholds."""
    head = ["threshold", "x exact [95% CI]", "tokens per step", "loose", "agreement with exact [95% CI]"]
    body = [
        [
            one.setting, interval(one.summary.speedup_exact), _number(one.summary.mean_accepted, 2),
            percent(one.summary.loose_rate), interval(one.agreement),
        ]
        for one in points
    ]  # fmt: skip
    return head, body


def page(title: str, facts: Sequence[str], tables: Sequence[Cells], note: str) -> str:
    """Facts, tables and a note as a Markdown page."""
    lines = [f"# {title}", "", *[f"- {fact}" for fact in facts], ""]
    for head, body in tables:
        lines += [markdown_row(head), markdown_row(["---"] * len(head)), *map(markdown_row, body), ""]
    return "\n".join([*lines, note, ""])


NOTE = (
    "Speed is that of decoding: total tokens over total seconds, without the prompt and the first step. Settings took "
    "turns on every prompt. 95% confidence intervals: percentile bootstrap over prompts. They do not hold for other "
    "machines, models or prompts."
)


SWEEP_NOTE = (
    "Agreement is the share of tokens that an output has in common with the exact one, in order; other words lower it, "
    "also if they mean the same."
)


PARALLEL_NOTE = (
    "Tokens/s of all is decoding without the prompts, total tokens over the time that the batch took; so many texts "
    "ran all the time. First token: after the beginning of the request, its prompt included. Between tokens: until a "
    "reader gets more; the tokens of one step come together. Numbers and settings took turns on blocks of prompts. "
    "95% confidence intervals: percentile bootstrap over prompts."
)


def require_matplotlib() -> None:
    """Raises ValueError if matplotlib is not installed; to be called before hours are spent."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plots need matplotlib; install it with `pip install 'pyfly-cpp[plot]'`.")


def plot(measured: Sequence[Measured], title: str, swept: Sequence[Point] = ()) -> bytes:
    """A PNG: speedup by category, speed against the threshold of gates that occur with several, and of a sweep
    speed against agreement.

    Raises:
        ValueError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    base = "plain" if any(m.setting == "plain" for m in measured) else "exact"
    overall = {s.setting: s for s in summarise(measured)}
    curves = _by_threshold(list(overall))
    n_panels = 1 + bool(curves) + bool(swept)
    figure, axes = pyplot.subplots(1, n_panels, figsize=(4 + 5 * n_panels, 5), squeeze=False)
    names = ["all", *categories(measured)]
    shown = [setting for setting in overall if setting != base]
    short = short_names(shown)
    width = 0.8 / max(1, len(shown))
    axis = axes[0][0]
    has_intervals = False
    for j, setting in enumerate(shown):
        for i, name in enumerate(names):
            group = overall if name == "all" else {s.setting: s for s in summarise(measured, name)}
            value = group[setting].speedup_plain if base == "plain" else group[setting].speedup_exact
            if value is None:
                continue
            place = i + (j - (len(shown) - 1) / 2) * width
            axis.bar(place, value.estimate, width, color=f"C{j % 10}", label=short[setting] if i == 0 else None)
            if math.isfinite(value.low):
                has_intervals = True
                axis.vlines(place, value.low, value.high, color="black", linewidth=1)
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set_xticks(range(len(names)), names)
    axis.set_ylabel(f"speedup over {base}{', 95% interval' if has_intervals else ''}")
    axis.legend(fontsize="small", ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    if curves:
        axis = axes[0][1]
        for j, (name, points) in enumerate(curves.items()):
            ordered = sorted(points)
            speeds = [overall[setting].tokens_per_second for _, setting in ordered]
            x, y = [threshold for threshold, _ in ordered], [speed.estimate for speed in speeds]
            axis.plot(x, y, "o-", color=f"C{j % 10}", label=name)
            axis.fill_between(x, [s.low for s in speeds], [s.high for s in speeds], color=f"C{j % 10}", alpha=0.15)
        if "exact" in overall:
            axis.axhline(overall["exact"].tokens_per_second.estimate, color="grey", linestyle="--", label="exact")
        axis.set_xlabel("threshold of the gate (nats; entropy-normalized: share of ln V)")
        axis.set_ylabel(f"tokens/s{', 95% interval' if has_intervals else ''}")
        axis.legend(fontsize="small")
    if swept:
        _draw_agreement(axes[0][-1], swept)
    figure.suptitle(title, y=0.99)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    pyplot.close(figure)
    return buffer.getvalue()


def _draw_agreement(axis: Any, points: Sequence[Point]) -> None:
    axis.plot([one.agreement.estimate for one in points], [one.speedup for one in points], "o-", alpha=0.7)
    for one in points:
        place = one.agreement.estimate, one.speedup
        axis.annotate(one.setting, place, fontsize=8, xytext=(4, 4), textcoords="offset points")
        over = one.summary.speedup_exact
        if over is not None and math.isfinite(over.low):
            axis.vlines(place[0], over.low, over.high, color="grey", linewidth=1)
    axis.set_xlabel("agreement with the exact outputs")
    axis.set_ylabel("speedup over exact")


def _pyplot() -> Any:
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _by_threshold(settings: Sequence[str]) -> dict[str, list[tuple[float, str]]]:
    """Settings that differ in their gate's threshold alone, by what they have in common."""
    curves: dict[str, list[tuple[float, str]]] = {}
    places = {form.word: list(form.numbers).index(form.threshold) for form in FORMS if form.numbers and form.threshold}
    for setting in settings:
        gate, space, others = setting.partition(" ")
        word, *numbers = gate.split(":")
        place = places.get(word, len(numbers))
        if place < len(numbers):
            threshold = float(numbers.pop(place))
            curves.setdefault(":".join([word, *numbers]) + space + others, []).append((threshold, setting))
    return {name: points for name, points in curves.items() if len(points) > 1}
