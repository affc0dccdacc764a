"""The frontier: recovery against tokens a round, as a PNG."""

from __future__ import annotations

import math
from pathlib import Path

from pyfly_cpp.evaluation.files import DataError
from study.comparing import Found
from study.plan import Way
from study.report import Report

_GOALS = (99, 97)


def draw(report: Report, path: Path) -> None:
    """One panel for each K of which speed and accuracy are known, the pooled parts. Needs matplotlib (`pip install
    pyfly-cpp[plot]`)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = {k: _points(report, k) for k in report.lengths}
    lengths = [k for k in report.lengths if points[k]]
    if not lengths:
        raise DataError("nothing can be drawn: no rule has a speed and an accuracy with intervals; record more.")
    names = list(dict.fromkeys(_name(way) for k in lengths for way, _ in points[k]))
    colours = pyplot.get_cmap("tab20").colors
    figure, panels = pyplot.subplots(
        1,
        len(lengths),
        figsize=(6.4 * len(lengths), 5 + 0.2 * len(names)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    shown = {}
    for panel, k in zip(panels[0], lengths):
        for goal in _GOALS:
            panel.axhline(goal, color="0.8", linewidth=1, linestyle="--", zorder=0)
        panel.axhline(100, color="0.5", linewidth=1, zorder=0)
        for way, found in points[k]:
            x, y = found.gain, found.recovery
            name = _name(way)
            colour = "0.5" if way.setting.is_exact else colours[names.index(name) % len(colours)]
            shown[name] = panel.errorbar(
                x.estimate, 100 * y.estimate,
                xerr=[[x.estimate - x.low], [x.high - x.estimate]],
                yerr=[[100 * (y.estimate - y.low)], [100 * (y.high - y.estimate)]],
                fmt="o", color=colour, elinewidth=0.8, markersize=5,
            )  # fmt: skip
            panel.annotate(
                str(names.index(name) + 1), (x.estimate, 100 * y.estimate), xytext=(4, 4), textcoords="offset points"
            )
        panel.set_xlabel("tokens a round, over exact's")
        panel.set_title(f"{k} drafts a round: {', '.join(report.parts)}")
    panels[0][0].set_ylabel("accuracy, % of exact's")
    handles = [shown[name] for name in names]
    titles = [f"{i}  {name}" for i, name in enumerate(names, 1)]
    figure.legend(handles, titles, loc="outside lower center", fontsize=9, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _name(way: Way) -> str:
    return way.title.replace("`", "")


def _points(report: Report, k: int) -> list[tuple[Way, Found]]:
    return [
        (way, found)
        for way, found in report.compared(k, report.parts)
        if not way.setting.is_plain and not math.isnan(found.recovery.low + found.gain.low)
    ]
