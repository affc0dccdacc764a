"""Retrieval: texts of the user's own as the drafter."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyfly_cpp import _native
from pyfly_cpp.drafters.drafter import Host, OwnDrafter
from pyfly_cpp.drafters.prompt_lookup import NUM_PRED
from pyfly_cpp.errors import IncompatibleDraftError
from pyfly_cpp.files import first_bytes
from pyfly_cpp.ranges import require_integer


@dataclass(frozen=True)
class Retrieval(OwnDrafter):
    """What most often followed the last n tokens in a datastore: texts of your own that `pyfly-cpp datastore build` has
    indexed. Costs next to nothing, and no time to load; pays where answers are like those texts (code of one project,
    forms, quotations). Source: He et al. 2023, "REST: Retrieval-Based Speculative Decoding" (arXiv 2311.08252); here a
    chain is drafted in place of its tree.
    """

    word = "retrieval"
    noun = "a datastore"
    needs_file = takes_file = True
    file_field = "path"
    options = (NUM_PRED,)

    path: str | os.PathLike[str]
    """Path of the datastore. It is mapped into memory: replace it by building it anew, do not write into it."""

    max_ngram_size: int = 16
    """Longest n-gram that is looked up, 1..64. The longest one that occurs wins."""

    min_ngram_size: int = 2
    """Shortest n-gram that is looked up, 1..max_ngram_size."""

    num_pred_tokens: int = 10
    """Most tokens in a round (K), >= 1."""

    max_matches: int = 64
    """Most occurrences that are looked at, 1..4096, spread evenly over all of them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.fspath(self.path))
        require_integer("max_ngram_size", self.max_ngram_size, 1, 64)
        require_integer("min_ngram_size", self.min_ngram_size, 1, self.max_ngram_size)
        require_integer("num_pred_tokens", self.num_pred_tokens, 1)
        require_integer("max_matches", self.max_matches, 1, 4096)

    @property
    def draft_most(self) -> int:  # type: ignore[override]
        return self.num_pred_tokens

    @classmethod
    def make(cls, file: str | os.PathLike[str] | None = None, **fields: Any) -> Any:
        fields.pop("draft_max", None)  # limits what is verified, not what is looked for
        return super().make(file, **fields)

    def open(self, host: Host | None = None) -> _native.Drafter:
        first_bytes(str(self.path), "datastore", "datastore", 1)
        sizes = self.max_ngram_size, self.min_ngram_size, self.num_pred_tokens, self.max_matches
        try:
            return _native.RetrievalDrafter(None if host is None else host.target(), self.path, *sizes)
        except (ValueError, IncompatibleDraftError) as error:
            raise type(error)(f"{os.fspath(self.path)}: {error}") from None

    def propose(self, history: Sequence[int]) -> list[int]:
        """The proposal for a token history, without a model: 0..num_pred_tokens token ids."""
        with self.open() as drafter:
            return drafter.propose(history, self.num_pred_tokens)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return f"retrieval from {os.path.basename(self.path)}"
