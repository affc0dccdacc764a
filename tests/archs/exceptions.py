"""What architectures do not do, and why."""

from __future__ import annotations

import re
from typing import NamedTuple


class Expected(NamedTuple):
    """An outcome that is not "ok"."""

    trials: str
    """A regular expression of their whole names."""
    outcome: str
    """A regular expression that is found in the outcome."""
    why: str

    def covers(self, trial: str, outcome: str) -> bool:
        return re.fullmatch(self.trials, trial) is not None and re.search(self.outcome, outcome) is not None


EXCEPTIONS: dict[str, Expected] = {}
"""By the name of the model."""
