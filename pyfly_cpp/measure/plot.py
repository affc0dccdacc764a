"""A measurement as a picture."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Sequence
from typing import Any

from pyfly_cpp.decoding.gates import FORMS
from pyfly_cpp.measure.report import bench_names, categories
from pyfly_cpp.measure.speed import Measured, summarise
from pyfly_cpp.measure.sweep import Point


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
    short = bench_names(shown)
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
