"""Time on machines that are known by their costs alone: what batches of the target cost, and a token of the draft."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pyfly_cpp.evaluation.files import DataError, Row

DEFAULT = Path(__file__).with_name("machines.json")


@dataclass(frozen=True)
class Machine:
    """Costs, in units of one token of the target alone."""

    name: str
    about: str
    rows: tuple[tuple[float, float], ...]
    """(rows of a batch, what it costs), rising; between them costs are straight lines, and level outside."""
    draft: float
    """A token of the draft."""

    def cost(self, row: Row) -> float:
        """Of an answer of the records: its rounds, each with as many drafts as the mean one."""
        rounds, drafted = row["rounds"], row["drafted"]
        sizes, costs = zip(*self.rows)
        return float(rounds * np.interp(1 + drafted / max(1, rounds), sizes, costs) + drafted * self.draft)


def read_machines(path: Path = DEFAULT) -> list[Machine]:
    """Reads a table of machines (JSON); raises DataError."""
    try:
        return [
            Machine(
                str(one["name"]),
                str(one["about"]),
                tuple(sorted((float(n), float(cost)) for n, cost in one["rows"].items())),
                float(one["draft"]),
            )
            for one in json.loads(path.read_text(encoding="utf-8"))
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no table of machines ({error!r}); see {DEFAULT.name} for its form.") from None
