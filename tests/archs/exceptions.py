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

_WITHOUT = Expected("bits", "without flash attention", "llama.cpp's graph has no flash attention")
_COMPUTED = Expected("bits", "matrices that it has computed", "recurrences or blocks by products of their own")
_SHAPES = Expected("bits", "llama.cpp multiplies by blk", "not a multiple of 32 inputs, or large in F32")

INEXACT: dict[str, Expected] = {
    "bitnet-dense": Expected("bits", "token_embd", "its output is a product of the embeddings, which stay in the file"),
    "gemma3n-dense": _SHAPES,
    "glm5-next-moe": _SHAPES,
    "grok-moe": _WITHOUT,
    "jamba-dense": _SHAPES,
    "lfm2-dense": Expected("bits", "saved states", "a window and a recurrent state, which are rolled back together"),
    "mamba-dense": _SHAPES,
    "minimax-01-moe": _COMPUTED,
    "minimax-m3-moe": _COMPUTED,
    "plm-dense": _WITHOUT,
    "qwen4exp-moe": Expected("bits", "cannot be computed with", "llama.cpp quantises what must not be"),
}
"""Models whose bits a batch may change, as pyfly-cpp says of them. Those of all others stay the same."""


def expected_of(name: str) -> list[Expected]:
    """What a model of this name does not do."""
    return [table[name] for table in (EXCEPTIONS, INEXACT) if name in table]
