"""How far a prompt is, and how long a request took: what llama.cpp's clients show of an answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

from pyfly_cpp.engine.output import Piece


@dataclass(frozen=True)
class Progress:
    """So many tokens of a prompt are known. Comes before the first piece of a request."""

    n: int
    n_all: int
    text: ClassVar[str] = ""
    finish: ClassVar[None] = None


class Timings:
    """Times of one request, by the arrival of its events."""

    def __init__(self) -> None:
        self._begun = self._last = self._first = 0.0
        self._progress = Progress(0, 0)
        self._n_cached = 0
        self._n_tokens = 0
        self._n_first = 0  # tokens of the first step
        self._drafts: dict[str, int] = {}

    @property
    def n_cached(self) -> int:
        """Tokens of the prompt that were known before."""
        return self._n_cached

    def add(self, piece: Piece | Progress) -> None:
        """Takes what has come."""
        self._last = time.perf_counter()
        if isinstance(piece, Progress):
            if not self._begun:
                self._begun, self._n_cached = self._last, piece.n
            self._progress = piece
            if piece.n == piece.n_all:  # with the first token; its text may be held back for long
                self._first = self._last
            return
        self._first = self._first or self._last
        self._n_first = self._n_first or piece.n_tokens
        self._n_tokens = piece.n_tokens
        stats = piece.stats
        if stats is not None:
            self._n_first = stats.committed_first
            # The last token of a prompt goes with the first step, and is not counted.
            self._n_cached = max(0, self._progress.n_all - 1 - stats.prefilled)
            if stats.drafted:
                self._drafts = {"draft_n": stats.drafted, "draft_n_accepted": stats.matched + stats.loose_accepted}

    def progress(self) -> dict[str, Any]:
        """How far the prompt is."""
        return {
            "total": self._progress.n_all, "cache": self._n_cached, "processed": self._progress.n,
            "time_ms": round(1e3 * (self._last - self._begun)),
        }  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """The counts and milliseconds. A request's first step comes with its prompt, so the speed is that of the tokens
        behind it, and 0 if there are none, as in llama.cpp's server."""
        n_prompt, n_behind = self._progress.n - self._n_cached, max(0, self._n_tokens - self._n_first)
        prompt_ms = 1e3 * ((self._first or self._last) - self._begun)
        predicted_ms = 1e3 * (self._last - self._first) if n_behind else 0.0
        return {
            "cache_n": self._n_cached,
            **_rates("prompt", n_prompt, n_prompt, prompt_ms),
            **_rates("predicted", self._n_tokens, n_behind, predicted_ms),
            **self._drafts,
        }


def _rates(name: str, n: int, n_timed: int, milliseconds: float) -> dict[str, float]:
    return {
        f"{name}_n": n, f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / n_timed if n_timed else 0.0,
        f"{name}_per_second": 1e3 * n_timed / milliseconds if milliseconds else 0.0,
    }  # fmt: skip
