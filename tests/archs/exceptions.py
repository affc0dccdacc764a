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


_WRONG_ROWS = Expected(".*", "is of architecture", "llama.cpp's graph gives wrong rows for batches of several tokens")

EXCEPTIONS: dict[str, Expected] = {
    "chameleon-dense": _WRONG_ROWS,
    "cogvlm-dense": _WRONG_ROWS,
    "glm4moe-moe-mtp": Expected("mtp.*", "rotates in sections", "llama.cpp's graph of the block does not rotate so"),
    "glm5-next-moe-mtp": Expected("mtp.*", "cannot run the 1 NextN layer", "llama.cpp has no graph of the block"),
}
"""By the name of the model."""
