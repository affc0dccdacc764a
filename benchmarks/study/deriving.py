"""Answers of a rule with a `no-repeat` guard that are there already.

An answer of the rule without the guard in which it would have refused nothing is one of the rule with it: each of its
tokens would have been decided alike. So only the others have to be decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pyfly_cpp import AllOf, Gate, NoRepeat, Regions, parse_gate
from pyfly_cpp.evaluation.files import Row
from study.plan import Way, parse_way
from study.records import Records, loose_of


def derive(records: Records, gate: Gate) -> tuple[int, int]:
    """Adds what can be taken over to the records, which must be open for writing.

    Args:
        gate: `all(..., no-repeat:n)`, or `regions(prose=...)` of such a one. Raises ValueError for others.

    Returns:
        How many answers were added, and how many of the rule without the guard it would have changed.
    """
    without, n = split(gate)
    n_added = n_changed = 0
    for row in list(records.rows):
        way = parse_way(row["way"])
        if way.setting.gate != without:
            continue
        new = str(Way(replace(way.setting, gate=gate), way.run))
        if repeats(row, n):
            n_changed += 1
        elif not records.has(row["part"], row["item"], new):
            records.add({**row, "way": new, "derived": row["way"]}, {})
            n_added += 1
    return n_added, n_changed


def split(gate: Gate) -> tuple[Gate, int]:
    """A gate without its `no-repeat` guard, and the guard's n; raises ValueError where it has none that holds for all
    its loose accepts."""
    if isinstance(gate, Regions) and gate == Regions(prose=gate.prose):
        prose, n = split(gate.prose)
        return Regions(prose=prose), n
    guards = [one for one in gate.gates if isinstance(one, NoRepeat)] if isinstance(gate, AllOf) else []
    if not isinstance(gate, AllOf) or len(guards) != 1:
        raise ValueError(f"{gate} is not all(...,no-repeat:8) or regions(prose=...) of it; name such a rule.")
    rest = [one for one in gate.gates if one is not guards[0]]
    return parse_gate(str(rest[0] if len(rest) == 1 else AllOf(*rest))), guards[0].n


def repeats(row: Row, n: int) -> bool:
    """Whether the guard would have refused one of the loose accepts of an answer."""
    return any(repeated(row["answer"], entry["place"]) >= n for entry in loose_of(row))


def repeated(answer: Sequence[int], place: int) -> int:
    """How many tokens that end at `place` stand in the answer before, too."""
    most = 0
    for end in range(place):
        n = 0
        while n <= end and answer[end - n] == answer[place - n]:
            n += 1
        most = max(most, n)
    return most
