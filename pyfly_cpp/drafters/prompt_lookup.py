"""Prompt lookup: the text itself as the drafter."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyfly_cpp import _native
from pyfly_cpp.drafters.drafter import Host, Option, OwnDrafter
from pyfly_cpp.ranges import require_integer

NUM_PRED = Option(
    "num_pred_tokens", "num_pred_tokens", 1, "Prompt lookup, retrieval: most tokens in a round.", None, 10
)


@dataclass(frozen=True)
class PromptLookup(OwnDrafter):
    """What followed the last n tokens when they occurred before is proposed again. Costs nothing; pays where the answer
    repeats the prompt (edits, summaries, code). Source: Saxena 2023, "Prompt Lookup Decoding".
    """

    word = "lookup"
    noun = "prompt lookup"
    # One token is no evidence of a repetition; two often are. The governor decides how many are worth verifying.
    options = (
        Option("max_ngram_size", "max_ngram_size", 1, "Prompt lookup: longest n-gram.", 64, 4),
        Option("min_ngram_size", "min_ngram_size", 1, "Prompt lookup: shortest n-gram.", 64, 2),
        NUM_PRED,
    )

    max_ngram_size: int = 4
    """Longest n-gram that is looked up, 1..64. The longest one with an earlier occurrence wins."""

    num_pred_tokens: int = 10
    """Most tokens in a round (K), >= 1."""

    match: str = "latest"
    """Which earlier occurrence: `"latest"`, or `"earliest"` as the FLy reference code and llama-cpp-python do."""

    min_ngram_size: int = 1
    """Shortest n-gram that is looked up, 1..max_ngram_size. Larger proposes more rarely and is right more often."""

    def __post_init__(self) -> None:
        require_integer("max_ngram_size", self.max_ngram_size, 1, 64)
        require_integer("min_ngram_size", self.min_ngram_size, 1, self.max_ngram_size)
        require_integer("num_pred_tokens", self.num_pred_tokens, 1)
        if self.match not in _native.LOOKUP_MATCHES:
            raise ValueError(f"match must be 'latest' or 'earliest', not {self.match!r}.")

    @property
    def draft_most(self) -> int:  # type: ignore[override]
        return self.num_pred_tokens

    @classmethod
    def make(cls, file: str | os.PathLike[str] | None = None, **fields: Any) -> PromptLookup:
        longest = fields.get("max_ngram_size", cls.max_ngram_size)
        shortest = min(fields.get("min_ngram_size", cls.min_ngram_size), longest)
        fields.pop("draft_max", None)  # limits what is verified, not what is looked for
        return cls(**{**fields, "min_ngram_size": shortest})

    @property
    def native(self) -> tuple[int, ...]:
        """What constructors of pyfly.h take of it."""
        return self.max_ngram_size, self.min_ngram_size, self.num_pred_tokens, _native.LOOKUP_MATCHES[self.match]

    def open(self, host: Host | None = None) -> _native.Drafter:
        return _native.Drafter("prompt lookup", "lookup", *self.native)

    def propose(self, history: Sequence[int]) -> list[int]:
        """The proposal for a token history, without a model: 0..num_pred_tokens token ids."""
        with self.open() as drafter:
            return drafter.propose(history, self.num_pred_tokens)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return "prompt lookup"
