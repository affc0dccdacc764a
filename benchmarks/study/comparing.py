"""Ways compared on the same items: flips, recovery, tokens a round. Every figure is of the items that both have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pyfly_cpp.decoding import EXACT
from pyfly_cpp.evaluation.files import Row
from pyfly_cpp.evaluation.statistics import (
    Flips,
    Interval,
    bootstrap,
    flips,
    ratio_of_ratios,
)
from study.machines import Machine
from study.means import Means, Paths, Runs, compare_means, compare_paths
from study.plan import PARTS, SUPERSEDED, K, Way, half, parse_way
from study.records import Records

Pair = tuple[Row, Row]
"""The answers of a way and of its baseline to one item."""


class Answers:
    """The answers of records, by way."""

    def __init__(self, records: Records, takes_all: bool = False) -> None:
        """`takes_all`: also of superseded rules."""
        self._of: dict[Way, dict[tuple[str, str], Row]] = {}
        for row in records.rows:
            way = parse_way(row["way"])
            if takes_all or way.rule not in SUPERSEDED:
                self._of.setdefault(way, {})[row["part"], row["item"]] = row
        self.text = records.text

    @property
    def ways(self) -> list[Way]:
        """In the order in which they came first."""
        return list(self._of)

    @property
    def parts(self) -> list[str]:
        """Parts with answers, in the order of the plan."""
        known = {part for rows in self._of.values() for part, _ in rows}
        return [part for part in PARTS if part in known]

    def of(self, way: Way, parts: Sequence[str]) -> list[Row]:
        """All answers of a way to items of these parts."""
        return [row for (part, _), row in self._of.get(way, {}).items() if part in parts]

    def sides(self, runs: Sequence[Way], parts: Sequence[str], which: str | None = None) -> tuple[Runs, Runs]:
        """The answers of these ways, and those of all other exact ones, by part and item. `which`: as of `pairs`."""
        mine: dict[tuple[str, str], list[Row]] = {}
        exact: dict[tuple[str, str], list[Row]] = {}
        for way in self.ways:
            if way in runs or way.setting.is_exact:
                side = mine if way in runs else exact
                for row in self.of(way, parts):
                    if which in (None, half(row["unit"])):
                        side.setdefault((row["part"], row["item"]), []).append(row)
        return mine, exact

    def pairs(self, way: Way, base: Way, parts: Sequence[str], which: str | None = None) -> list[Pair]:
        """The answers of both to the items that both have. `which`: those of one half alone."""
        other = self._of.get(base, {})
        return [
            (row, other[key])
            for key, row in self._of.get(way, {}).items()
            if key[0] in parts and key in other and which in (None, half(row["unit"]))
        ]


def base_of(way: Way) -> Way:
    """What a way's tokens a round are compared with: exact decoding with as many drafts (plain decoding: with most)."""
    return Way(replace(EXACT, draft_max=way.k or K[0]))


def n_tokens(row: Row) -> int:
    """Tokens of an answer, the one that ends it included."""
    return len(row["answer"]) + (row["finish"] == "eog")


class Comparison:
    """A way and its baseline on the same items; NaN where there are none."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs
        self._units = [row["unit"] for row, _ in pairs]
        self._n_tokens, self._n_base_tokens = (sum(n_tokens(pair[i]) for pair in pairs) for i in (0, 1))
        self.n = len(pairs)
        self.right = sum(row["right"] for row, _ in pairs)
        self.flips: Flips = flips([base["right"] for _, base in pairs], [row["right"] for row, _ in pairs])
        self.per_round = _over(self._n_tokens, sum(row["rounds"] for row, _ in pairs))
        """Tokens a round."""
        self.base_per_round = _over(self._n_base_tokens, sum(base["rounds"] for _, base in pairs))
        self.loose = 100 * _over(sum(len(row["loose"]) for row, _ in pairs), self._n_tokens)
        """Loose accepts of 100 tokens."""
        self.length = _over(self._n_tokens, self.n)
        """Tokens of an answer."""
        self.base_length = _over(self._n_base_tokens, self.n)
        self.new_loops = sum(row["loop"] and not base["loop"] for row, base in pairs)
        """Answers in a loop where the baseline's is not."""
        self.lost_loops = sum(base["loop"] and not row["loop"] for row, base in pairs)
        """The other way round."""

    @cached_property
    def gain(self) -> Interval:
        """Tokens a round, over the baseline's."""
        columns = [[n_tokens(row), row["rounds"], n_tokens(base), base["rounds"]] for row, base in self._pairs]
        return bootstrap(columns, ratio_of_ratios, self._units) if self.n else NOTHING

    def speed(self, machine: Machine) -> float:
        """Over plain decoding, as the machine's costs say."""
        return _over(self._n_tokens * machine.rows[0][1], sum(machine.cost(row) for row, _ in self._pairs))


NOTHING = Interval(math.nan, math.nan, math.nan)


def runs_of(answers: Answers, way: Way) -> list[Way]:
    """All runs of a way's setting."""
    return [other for other in answers.ways if other.setting == way.setting]


@dataclass(frozen=True)
class Found:
    """What a way gains and costs."""

    against: Comparison
    """With the exact way that most items have."""
    pace: Comparison
    """With exact decoding with as many drafts."""
    means: Means | None
    """None: of the way that everything is compared with, where it is the only exact one."""
    paths: Paths | None
    """None: of exact ways, and where there is nothing to compare with."""

    @property
    def gain(self) -> Interval:
        """Tokens a round over exact's."""
        return self.pace.gain

    @property
    def costs(self) -> Means | None:
        """With exact runs, of a loose way on the same paths."""
        return self.means if self.paths is None else self.paths.means

    @property
    def recovery(self) -> Interval:
        """Mean accuracy over that of exact runs."""
        return NOTHING if self.costs is None else self.costs.recovery


def find(answers: Answers, way: Way, reference: Way, parts: Sequence[str], which: str | None = None) -> Found:
    """All of it, on the items of these parts (and of one half)."""
    against, pace = (Comparison(answers.pairs(way, base, parts, which)) for base in (reference, base_of(way)))
    sides = answers.sides(runs_of(answers, way), parts, which)
    return Found(against, pace, compare_means(*sides), None if way.setting.is_exact else compare_paths(*sides))


def reference_of(answers: Answers) -> Way | None:
    """The exact way that most items have."""
    exact = [way for way in answers.ways if way.setting.is_exact]
    return max(exact, key=lambda way: len(answers.of(way, answers.parts)), default=None)


def choose(candidates: Sequence[tuple[Way, Found]], least: float) -> Way | None:
    """The way that gains most tokens a round of those that recover at least so much; None where none does."""
    good = [(found.gain.estimate, way) for way, found in _known(candidates) if found.recovery.estimate >= least]
    return max(good, key=lambda entry: entry[0])[1] if good else None


def frontier(candidates: Sequence[tuple[Way, Found]]) -> list[Way]:
    """The ways that no other one beats in both tokens a round and recovery."""

    def beats(a: Found, b: Found) -> bool:
        mine, theirs = ((found.gain.estimate, found.recovery.estimate) for found in (a, b))
        return mine != theirs and mine[0] >= theirs[0] and mine[1] >= theirs[1]

    known = _known(candidates)
    return [way for way, found in known if not any(beats(other, found) for _, other in known)]


def _known(candidates: Sequence[tuple[Way, Found]]) -> list[tuple[Way, Found]]:
    return [(way, found) for way, found in candidates if not math.isnan(found.gain.estimate + found.recovery.estimate)]


def noise(answers: Answers, ways: Sequence[Way], parts: Sequence[str]) -> list[tuple[Way, Way, Flips]]:
    """All pairs of exact ways, and what flips between them."""
    exact = [way for way in ways if way.setting.is_exact]
    found: list[tuple[Way, Way, Flips]] = []
    for i, first in enumerate(exact):
        for second in exact[i + 1 :]:
            pairs = answers.pairs(second, first, parts)
            if pairs:
                found.append((first, second, flips([b["right"] for _, b in pairs], [a["right"] for a, _ in pairs])))
    return found


def _over(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
