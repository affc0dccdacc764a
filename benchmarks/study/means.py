"""Mean accuracies of runs: what looseness costs when chance is taken out, as far as there are runs.

Two exact answers to an item can differ, since batched kernels round by the size of a batch. This noise also parts a
loose answer from an exact one, before any loose accept, or without one.

`compare_means` takes every run as it is. `compare_paths` takes out the noise that the loose accepts have no part in (as
common random numbers do in simulation): an answer is compared with the exact ones of its item that are the same, token
for token, up to its first loose accept. They are samples of what would have come without it. An answer without loose
accepts is an exact one, and so is compared with itself. Where no exact answer took the same path, all of the item's
stand in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pyfly_cpp.evaluation.files import Row
from pyfly_cpp.evaluation.statistics import Interval, bootstrap, ratio
from study.records import loose_of

Runs = Mapping[tuple[str, str], Sequence[Row]]
"""Answers by part and item."""


class Means:
    """Accuracies of items, here and with exact decoding. Every item counts alike, however many answers it has."""

    def __init__(
        self, mine: Sequence[float], exact: Sequence[float], units: Sequence[str], n_runs: float, n_exact: float
    ):
        """`mine`, `exact`: of each item, in [0, 1]; `units`: items of one unit are no independent ones."""
        self.n = len(mine)
        """Items."""
        self.n_runs = n_runs
        """To an item, on average."""
        self.n_exact = n_exact
        """Exact ones, likewise."""
        self._columns = np.column_stack([mine, exact, np.ones(self.n)])
        self._units = units

    @cached_property
    def difference(self) -> Interval:
        """Mean accuracy less that of exact decoding."""
        columns = self._columns
        return bootstrap(np.column_stack([columns[:, 0] - columns[:, 1], columns[:, 2]]), ratio, self._units)

    @cached_property
    def recovery(self) -> Interval:
        """The one over the other."""
        return bootstrap(self._columns, ratio, self._units)


@dataclass(frozen=True)
class Paths:
    """Answers against exact ones that took the same path."""

    means: Means
    n_without: int
    """Answers without loose accepts."""
    n_same: int
    """Answers that exact ones agree with up to the first loose accept."""
    n_other: int
    """Answers that none agrees with so far."""
    without: Means | None
    """The answers without loose accepts against all exact ones of their items: noise alone, which shows whether it is
    right to take them for exact ones. None where there are none."""


def compare_means(mine: Runs, exact: Runs) -> Means | None:
    """On the items that have answers of both kinds; None where there are none."""
    return _means(mine, exact, {key: _share_right(rows) for key, rows in exact.items()})


def compare_paths(mine: Runs, exact: Runs) -> Paths | None:
    """On the same items, answer by answer; None where there are none."""
    keys = [key for key in mine if key in exact]
    counts = dict.fromkeys(("without", "same", "other"), 0)
    instead: dict[tuple[str, str], float] = {}
    for key in keys:
        shares = []
        for row in mine[key]:
            kind, others = _counterparts(row, exact[key])
            counts[kind] += 1
            shares.append(_share_right(others))
        instead[key] = sum(shares) / len(shares)
    means = _means(mine, exact, instead)
    if means is None:
        return None
    without = {key: [row for row in mine[key] if not row["loose"]] for key in keys}
    without = {key: rows for key, rows in without.items() if rows}
    return Paths(means, counts["without"], counts["same"], counts["other"], compare_means(without, exact))


def _counterparts(row: Row, exact: Sequence[Row]) -> tuple[str, Sequence[Row]]:
    """What an answer is compared with, and why."""
    if not row["loose"]:
        return "without", [row]
    place = min(entry["place"] for entry in loose_of(row))
    same = [other for other in exact if other["answer"][:place] == row["answer"][:place]]
    return ("same", same) if same else ("other", exact)


def _means(mine: Runs, exact: Runs, instead: Mapping[tuple[str, str], float]) -> Means | None:
    keys = [key for key in mine if key in exact]
    if not keys:
        return None
    return Means(
        [_share_right(mine[key]) for key in keys],
        [instead[key] for key in keys],
        [mine[key][0]["unit"] for key in keys],
        sum(len(mine[key]) for key in keys) / len(keys),
        sum(len(exact[key]) for key in keys) / len(keys),
    )


def _share_right(rows: Sequence[Row]) -> float:
    return sum(row["right"] for row in rows) / len(rows)
