"""Cells of the page's tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from pyfly_cpp.evaluation.statistics import Flips, Interval, wilson
from study.comparing import Comparison, Found, base_of
from study.flips import Parting
from study.means import Means, Paths
from study.plan import PARTS, Way

CELLS = ("of them first", "harmful", "helpful", "neither", "harmful, %", "margin", "entropy", "second, %")
"""Of partings of one kind."""
PART_CELLS = ("part", "by a loose accept: harmful", "helpful", "neither", "by noise: harmful", "helpful", "neither")
"""Of partings of one part."""
PLACES = (0, 8, 32, 96)
"""Where in an answer, tokens, ranges begin for which partings are counted."""
MARGINS = (0.0, 0.05, 0.15, 0.3)
"""Where ranges of margins begin, nats."""


def place_rows(found: Sequence[Parting]) -> list[list[str]]:
    """Of loose partings, by how far into an answer they are."""
    return [
        [f"{begin} to {end - 1:.0f}" if end < math.inf else f"{begin} and later", *cells]
        for begin, end, cells in _in_ranges(PLACES, [(parting.place, parting) for parting in found])
    ]


def margin_rows(found: Sequence[Parting]) -> list[list[str]]:
    """Of loose partings behind the first PLACES[1] tokens, by how much less likely the token was than the choice."""
    late = [(parting.margin, parting) for parting in found if parting.place >= PLACES[1]]
    return [
        [f"{begin:g} to {end:g}" if end < math.inf else f"{begin:g} and more", *cells]
        for begin, end, cells in _in_ranges(MARGINS, late)
    ]


def _in_ranges(
    begins: Sequence[float], found: Sequence[tuple[float, Parting]]
) -> Iterator[tuple[float, float, list[str]]]:
    """(begin, end, cells) of each range, which ends where the next begins; `found`: (what is in a range, parting)."""
    for begin, end in zip(begins, (*begins[1:], math.inf)):
        yield begin, end, class_cells([parting for value, parting in found if begin <= value < end])


def part_rows(found: Sequence[Parting]) -> list[list[str]]:
    """Of every part, by whether a loose accept is where the answers part, or noise (or an end)."""
    counts = Counter((parting.part, parting.is_loose, parting.kind) for parting in found)
    kinds = [(is_loose, kind) for is_loose in (True, False) for kind in ("harmful", "helpful", "neither")]
    parts = [part for part in PARTS if any(parting.part == part for parting in found)]
    return [[part, *(str(counts[part, is_loose, kind]) for is_loose, kind in kinds)] for part in parts]


def class_cells(found: Sequence[Parting]) -> list[str]:
    """Of partings of one class."""
    kinds = Counter(parting.kind for parting in found)
    n = len(found)
    harmful = [parting for parting in found if parting.kind == "harmful"]
    others = [parting for parting in found if parting.kind != "harmful"]
    cells = [str(n), *(str(kinds[kind]) for kind in ("harmful", "helpful", "neither"))]
    cells.append(within(wilson(kinds["harmful"], n), 100, 0) if n else "")
    for name in ("margin", "entropy"):
        medians = [number(median([getattr(p, name) for p in some])) or "-" for some in (harmful, others)]
        cells.append(" / ".join(medians))
    known = [parting for parting in found if parting.most_rank]
    cells.append(f"{100 * sum(p.most_rank == 2 for p in known) / len(known):.0f}" if known else "")
    return cells


def flips_cell(flips: Flips) -> str:
    """What became wrong, and what right."""
    return f"-{flips.harmful} +{flips.helpful}"


def flip_cells(found: Found) -> list[str]:
    """Flips and p."""
    flips = found.against.flips
    return [flips_cell(flips), f"{flips.p:.2g}"]


def loops_cell(comparison: Comparison) -> str:
    """Loops that only the way has, and that only its baseline has."""
    return f"+{comparison.new_loops} -{comparison.lost_loops}"


def mean_cells(means: Means | None) -> list[str]:
    """Difference of all runs, and how many there are."""
    if means is None:
        return ["", ""]
    runs = f"{means.n_runs:.1f}, {means.n_exact:.1f}".replace(".0", "")
    return [within(means.difference, 100, 1, sign=True), runs]


def path_cell(paths: Paths | None) -> str:
    """Difference on the same paths."""
    return "" if paths is None else within(paths.means.difference, 100, 1, sign=True)


def rule_cells(means: Means, paths: Paths) -> list[str]:
    """Of a rule: kinds of answers, both differences, recovery, and the check."""
    return [
        f"{paths.n_without}, {paths.n_same}, {paths.n_other}",
        path_cell(paths),
        within(paths.means.recovery, 100, 1),
        *mean_cells(means),
        "" if paths.without is None else within(paths.without.difference, 100, 1, sign=True),
    ]


def gain_cells(found: Found) -> list[str]:
    """Tokens a round over exact's, and of how many items."""
    return [within(found.gain, 1, 2), str(found.pace.n)] if found.pace.n else ["", ""]


def half_cells(found: Found) -> list[str]:
    """Of one half: items, recovery and gain."""
    return [
        str(found.against.n),
        within(found.recovery, 100, 1),
        f"{found.gain.estimate:.2f}" if found.pace.n else "",
    ]


def part_cell(way: Way, found: Found | None, is_reference: bool) -> str:
    """Of one part."""
    if found is None:
        return ""
    c = found.against
    if is_reference:
        return f"{100 * c.right / c.n:.1f} % of {c.n}"
    difference = "" if found.costs is None else points(found.costs.difference.estimate)
    pace = ""
    if way == base_of(way):
        pace = f"{c.per_round:.2f}"
    elif found.pace.n and not way.setting.is_plain:
        pace = f"{found.gain.estimate:.2f} x"
    return f"{difference} ({flips_cell(c.flips)}) {pace}".strip()


def median(values: Sequence[float]) -> float:
    known = sorted(value for value in values if not math.isnan(value))
    return known[len(known) // 2] if known else math.nan


def number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def points(share: float) -> str:
    return f"{100 * share:+.1f}"


def within(interval: Interval, factor: float, digits: int, sign: bool = False) -> str:
    """An estimate and its interval."""
    form = f"{'+' if sign else ''}.{digits}f"
    if math.isnan(interval.estimate):
        return ""
    estimate = f"{factor * interval.estimate:{form}}"
    if math.isnan(interval.low):
        return estimate
    return f"{estimate} ({factor * interval.low:{form}}..{factor * interval.high:{form}})"


def quoted(text: str) -> str:
    """A piece of text as a cell of a table."""
    shown = text.replace("\n", "\\n").replace("|", "\\|").replace("`", "'")
    return f"`{shown}`" if shown else ""
