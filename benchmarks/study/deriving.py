"""Answers of a rule that a wider rule has given already.

A rule that asks more of an accept than another one answers alike where all that the other accepted meets this, too. So
only the other answers have to be decoded. Rules are compared here that are a margin and guards; what those ask, the
records tell.

Three things they do not tell. What a window took back, which may have taken an accept of the narrower rule along; with
`reconverge`, the window of margins, hardly any window breaks (benchmarks/README.md). What was accepted behind the end
of an answer, which may have decided a window inside it. And how many rounds the narrower rule would have taken: those
of the wider one stand there, at worst a few too many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pyfly_cpp import Margin
from pyfly_cpp.decoding.gates import AllOf, Budget, ExactFirst, Gate, NoRepeat, Regions
from pyfly_cpp.evaluation.files import Row
from study.plan import Way, parse_way
from study.records import Records, loose_of

ROUNDED = 1e-3
"""Of a recorded margin, which has four digits, as a share: what is so near to a limit counts as beyond it."""


class Demands(NamedTuple):
    """What a rule asks of a loose accept."""

    is_prose: bool
    """Whether it has to be in prose."""
    margin: float
    """Nats, under which it has to be."""
    n_first: int = 0
    """Tokens of the answer that have to be there."""
    nats: float = math.inf
    """The budget for 100 tokens."""
    n_gram: float = math.inf
    """Tokens that must not come again."""

    def is_within(self, other: Demands) -> bool:
        """Whether it asks at least as much of every accept."""
        return self.is_prose == other.is_prose and (
            self.margin <= other.margin
            and self.n_first >= other.n_first
            and self.nats <= other.nats
            and self.n_gram <= other.n_gram
        )

    def accepts(self, row: Row) -> bool:
        """Whether it would have accepted all that an answer of a wider rule accepted."""
        given = 0.0
        for entry in loose_of(row):
            place, margin = entry["place"], entry["margin"]
            given += margin
            if (
                margin >= self.margin * (1 - ROUNDED)
                or place < self.n_first
                or given >= self.nats / 100 * (place + 1) * (1 - ROUNDED)
                or (self.n_gram < math.inf and repeated(row["answer"], place) >= self.n_gram)
            ):
                return False
        return True


_NUMBERS: dict[type[Gate], tuple[str, str]] = {
    Margin: ("margin", "tau"),
    ExactFirst: ("n_first", "n"),
    Budget: ("nats", "nats"),
    NoRepeat: ("n_gram", "n"),
}
"""Of a rule, which of the demands its number is, and its name there."""


def demands_of(gate: Gate) -> Demands | None:
    """Of a margin, `all(...)` of one and guards, or `regions(prose=...)` of such; None: it is another rule."""
    if isinstance(gate, Regions):
        inside = demands_of(gate.prose) if gate == Regions(prose=gate.prose) else None
        return inside and inside._replace(is_prose=True)
    parts = gate.gates if isinstance(gate, AllOf) else (gate,)
    found: dict[str, float] = {}
    for part in parts:
        if type(part) not in _NUMBERS or _NUMBERS[type(part)][0] in found:
            return None
        name, number = _NUMBERS[type(part)]
        found[name] = getattr(part, number)
    return Demands(False, **found) if "margin" in found else None  # type: ignore[arg-type]


def is_part(gate: Gate, of: Gate) -> bool:
    """Whether a rule is another one, or asks at least as much of every accept."""
    mine, theirs = demands_of(gate), demands_of(of)
    return gate == of or (mine is not None and theirs is not None and mine.is_within(theirs))


def repeated(answer: Sequence[int], place: int) -> int:
    """How many tokens that end at `place` stand in the answer before, too."""
    most = 0
    for end in range(place):
        n = 0
        while n <= end and answer[end - n] == answer[place - n]:
            n += 1
        most = max(most, n)
    return most


def derive(records: Records, gate: Gate) -> tuple[int, int]:
    """Adds what can be taken over to the records, which must be open for writing.

    Args:
        gate: A rule, see `demands_of`. Raises ValueError for others.

    Returns:
        How many answers were added, and in how many more the wider rule accepted what this one would not.
    """
    wanted = demands_of(gate)
    if wanted is None:
        raise ValueError(f"{gate} is no margin with guards, such as all(margin:0.3,no-repeat:8); name such a rule.")
    sources: dict[tuple[str, str, str], tuple[float, Row]] = {}  # of each answer, that of the narrowest wider rule
    for row in records.rows:
        way = parse_way(row["way"])
        wide = demands_of(way.setting.gate)
        if wide is None or not wanted.is_within(wide):
            continue
        key = row["part"], row["item"], str(Way(replace(way.setting, gate=gate), way.run))
        if not records.has(*key) and (key not in sources or wide.margin < sources[key][0]):
            sources[key] = wide.margin, row
    n_added = 0
    for (_, _, new), (_, row) in sources.items():
        if wanted.accepts(row):
            records.add({**row, "way": new, "derived": row.get("derived", row["way"])}, {})
            n_added += 1
    return n_added, len(sources) - n_added


def undecoded(records: Records) -> dict[str, int]:
    """Of each way that took answers over: how many items its wider ways have answers to, but it has none, since the
    wider rule accepted more. As long as there are any, its answers are those with fewer loose accepts."""
    sources: dict[str, set[str]] = {}
    items: dict[str, set[tuple[str, str]]] = {}
    for row in records.rows:
        items.setdefault(row["way"], set()).add((row["part"], row["item"]))
        if "derived" in row:
            sources.setdefault(row["way"], set()).add(row["derived"])
    found = {way: set().union(*(items.get(wide, ()) for wide in wider)) for way, wider in sources.items()}
    return {way: n for way, keys in found.items() if (n := len(keys - items[way]))}


def origin_of(row: Row) -> tuple[str, str, str]:
    """Part, item, and the way that an answer was decoded with."""
    return row["part"], row["item"], row.get("derived", row["way"])
