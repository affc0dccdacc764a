"""Answers of a rule that are there already, as those of a wider one.

A rule that accepts a part of what another does answers alike where all that the other accepted is of that part: each
token would have been decided as it was. (What a window took back is the target's choice with either.) So only the other
answers have to be decoded. Rules are compared here that are a margin and guards; what those ask of an accept, the
records tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pyfly_cpp import AllOf, Budget, ExactFirst, Gate, Margin, NoRepeat, Regions
from pyfly_cpp.evaluation.files import Row
from study.plan import Way, parse_way
from study.records import Records, loose_of


class Asked(NamedTuple):
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

    def is_within(self, other: Asked) -> bool:
        """Whether it accepts nothing that the other does not."""
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
                margin >= self.margin
                or place < self.n_first
                or given >= self.nats / 100 * (place + 1)
                or repeated(row["answer"], place) >= self.n_gram
            ):
                return False
        return True


def asked(gate: Gate) -> Asked | None:
    """Of a margin, `all(...)` of one and guards, or `regions(prose=...)` of such; None: it is another rule."""
    if isinstance(gate, Regions):
        inside = asked(gate.prose) if gate == Regions(prose=gate.prose) else None
        return inside and inside._replace(is_prose=True)
    parts = gate.gates if isinstance(gate, AllOf) else (gate,)
    found: dict[str, float] = {}
    for part in parts:
        name = {Margin: "margin", ExactFirst: "n_first", Budget: "nats", NoRepeat: "n_gram"}.get(type(part))
        if name is None or name in found:
            return None
        found[name] = getattr(part, {"margin": "tau", "nats": "nats"}.get(name, "n"))
    return Asked(False, **found) if "margin" in found else None  # type: ignore[arg-type]


def is_part(gate: Gate, of: Gate) -> bool:
    """Whether a rule is another one, or surely accepts a part of what that does."""
    mine, theirs = asked(gate), asked(of)
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
        gate: A rule, see `asked`. Raises ValueError for others.

    Returns:
        How many answers were added, and to how many items, or runs of them, wider rules have only others.
    """
    wanted = asked(gate)
    if wanted is None:
        raise ValueError(f"{gate} is no margin with guards, such as all(margin:0.3,no-repeat:8); name such a rule.")
    n_added = 0
    others: set[tuple[str, str, str]] = set()
    for row in list(records.rows):
        way = parse_way(row["way"])
        new = str(Way(replace(way.setting, gate=gate), way.run))
        if not is_part(gate, way.setting.gate) or records.has(row["part"], row["item"], new):
            continue
        if wanted.accepts(row):
            records.add({**row, "way": new, "derived": row["way"]}, {})
            n_added += 1
        else:
            others.add((row["part"], row["item"], new))
    return n_added, sum(not records.has(*key) for key in others)
