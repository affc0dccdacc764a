"""Thoughts at the beginning of an answer: told apart from the answer while it is written, and ended by a budget.

Markers are looked for in the text: a model may write them with any tokens, split or joined with what follows.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pyfly_cpp.engine.markers import THOUGHTS, n_begun


class ThoughtReader:
    """Splits an answer into its thoughts and what follows them, while it comes."""

    def __init__(self, closing: str | None, is_behind: bool = False, is_within: bool = False) -> None:
        """
        Args:
            closing: The marker that ends the thoughts that the prompt has begun; None: it has begun none.
            is_behind: Whether the prompt has also ended them.
            is_within: Whether some of them are there already.
        """
        self._closing = closing
        self._is_behind = is_behind
        self._may_begin = closing is None
        self._held = ""
        self._is_at_edge = not is_within  # blanks next to a marker belong to it

    @property
    def is_open(self) -> bool:
        """Whether thoughts have begun and not ended."""
        return self._closing is not None

    @property
    def is_over(self) -> bool:
        """Whether thoughts have ended, or the answer has begun without any."""
        return self._closing is None and not self._may_begin

    @property
    def closing(self) -> str:
        """The marker that ends the open thoughts; empty if none are open."""
        return self._closing or ""

    @property
    def missing(self) -> str:
        """The part of it that the text does not end with."""
        return self.closing[n_begun(self._held, self.closing) :]

    def add(self, text: str) -> tuple[str, str]:
        """The known part of (thoughts, answer) with this text."""
        self._held += text
        if self._may_begin:
            bare = self._held.lstrip()
            for opening, closing in THOUGHTS:
                if bare.startswith(opening):
                    self._held, self._closing = bare[len(opening) :], closing
                    self._may_begin = False
                    break
            else:
                if any(opening.startswith(bare) for opening, _ in THOUGHTS):
                    return "", ""
                self._may_begin, self._is_at_edge = False, self._is_behind
        thoughts = ""
        if self._closing is not None:
            before, mark, behind = self._held.partition(self._closing)
            if not mark:
                n = _n_doubtful(before, self._closing)
                thoughts, self._held = self._without_edge(before[: len(before) - n]), before[len(before) - n :]
                return thoughts, ""
            thoughts = self._without_edge(before).rstrip()
            self._closing, self._held, self._is_at_edge = None, behind, True
        text, self._held = self._without_edge(self._held), ""
        return thoughts, text

    def end(self) -> tuple[str, str]:
        """The rest of both."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._closing is not None else ("", held)

    def _without_edge(self, text: str) -> str:
        text = text.lstrip() if self._is_at_edge else text
        self._is_at_edge = self._is_at_edge and not text
        return text


def _n_doubtful(text: str, marker: str) -> int:
    """Characters at the end of a text that are blanks, or that a marker may begin with, or both."""
    n = n_begun(text, marker)
    return n + len(text[: len(text) - n]) - len(text[: len(text) - n].rstrip())


def opened_by(prompt: str) -> str | None:
    """The marker that ends the thoughts in which a prompt ends; None: it ends in none."""
    return next((closing for opening, closing in THOUGHTS if prompt.rstrip().endswith(opening)), None)


class _Place(NamedTuple):
    """A place between two tokens of an answer."""

    reader: ThoughtReader
    """Has read the text up to there."""
    pending: bytes = b""
    """The bytes of a character that has not ended."""
    n: int = 0
    """Tokens since the thoughts were opened; the one that completes the opening marker is not counted."""
    forced: tuple[int, ...] = ()
    """The tokens that have to follow."""
    is_spent: bool = False
    """Whether the budget has ended the thoughts."""


class Budget:
    """A logits processor that ends the thoughts of one answer: after `n_tokens` of them, the closing marker is the only
    choice. If the model has written a part of the marker by then, only the rest is forced; a character is completed
    first, for which 3 more tokens are allowed. An answer without thoughts stays as it is.

    A history may be any other than the one before it: drafts run ahead, and are taken back.
    """

    def __init__(
        self, n_prompt: int, n_tokens: int, reader: ThoughtReader, piece_of: Callable[[int], bytes],
        closings: Mapping[str, Sequence[int]],
    ) -> None:  # fmt: skip
        """
        Args:
            n_prompt: Tokens of the prompt.
            n_tokens: Most tokens of thoughts, >= 0.
            reader: A fresh one, for the answer.
            piece_of: The bytes of a token of the answer.
            closings: The tokens of each closing marker, and of the ends of markers that tokens can spell alone.
        """
        self._n_prompt = n_prompt
        self._n_tokens = n_tokens
        self._piece_of = piece_of
        self._closings = closings
        self._written: npt.NDArray[np.intc] = np.empty(0, np.intc)
        self._places = [self._with_forced(_Place(reader))]  # before each token that was written, and behind the last

    def __call__(self, history: Any, scores: Any) -> Any:
        written = np.array(history[self._n_prompt :], np.intc)
        n = min(len(written), len(self._written))
        differing = np.flatnonzero(written[:n] != self._written[:n])
        n = int(differing[0]) if len(differing) else n
        self._written = written
        del self._places[n + 1 :]
        for token in written[n:].tolist():
            self._places.append(self._with_forced(self._behind(self._places[-1], token)))
        forced = self._places[-1].forced
        if not forced:
            return scores
        row = np.full_like(scores, -np.inf)
        row[forced[0]] = 0.0
        return row

    def _behind(self, place: _Place, token: int) -> _Place:
        if place.reader.is_over:
            return place
        data = place.pending + self._piece_of(token)
        text, n_read = codecs.utf_8_decode(data, "ignore", False)
        reader = copy.copy(place.reader)
        reader.add(text)
        forced = place.forced[1:] if place.forced[:1] == (token,) else ()
        return place._replace(reader=reader, pending=data[n_read:], n=place.n + place.reader.is_open, forced=forced)

    def _with_forced(self, place: _Place) -> _Place:
        """The place, with the tokens that have to follow if the budget is over there."""
        most = self._n_tokens + (3 if place.pending else 0)
        if place.is_spent or not place.reader.is_open or place.n < most:
            return place
        forced = self._closings.get(place.reader.missing) or self._closings[place.reader.closing]
        return place._replace(forced=tuple(forced), is_spent=True)
