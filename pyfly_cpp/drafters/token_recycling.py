"""Token recycling: the target's own runners-up as the drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyfly_cpp import _native
from pyfly_cpp.drafters.drafter import Host, OwnDrafter
from pyfly_cpp.ranges import require_integer


@dataclass(frozen=True)
class TokenRecycling(OwnDrafter):
    """What the target thought might follow a token is proposed behind it the next time. Costs nothing but
    `4 * n_candidates` bytes for each token of the vocabulary (4.9 MB for 8 of 152,000) and a look at each row that is
    evaluated; needs no file and no repetition in the prompt. It remembers all texts of its FlyLlama or FlyBatch, so
    what it drafts depends on what was decoded before.

    Source: Luo et al. 2024, "Token Recycling" (arXiv 2408.08696). Here a chain is drafted in place of its tree of some
    80 tokens, so it is right far less often: expect a few per cent, beside other drafters.
    """

    word = "recycling"
    noun = "token recycling"

    n_candidates: int = 8
    """Most probable tokens that are kept of each row, 1..32."""

    num_pred_tokens: int = 4
    """Most tokens in a round (K), >= 1."""

    def __post_init__(self) -> None:
        require_integer("n_candidates", self.n_candidates, 1, _native.MAX_TOP)
        require_integer("num_pred_tokens", self.num_pred_tokens, 1)

    @property
    def draft_most(self) -> int:  # type: ignore[override]
        return self.num_pred_tokens

    @classmethod
    def make(cls, file: Any = None, **fields: Any) -> TokenRecycling:
        fields.pop("draft_max", None)  # limits what is verified, not what is looked for
        return cls(**fields)

    def open(self, host: Host) -> _native.Drafter:
        sizes = self.n_candidates, self.num_pred_tokens
        return _native.Drafter("token recycling", "recycling", host.target().pointer, *sizes)

    def __str__(self) -> str:
        return "token recycling"
