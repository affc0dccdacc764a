"""Thoughts at the beginning of an answer: told apart from the answer while it is written, and ended by a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pyfly_cpp.engine.markers import THOUGHTS


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
                n = _n_begun(before, self._closing)
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


def _n_begun(text: str, marker: str) -> int:
    """Characters at the end of a text that are blanks, or that a marker may begin with, or both."""
    n = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
    return n + len(text[: len(text) - n]) - len(text[: len(text) - n].rstrip())


def opened_by(prompt: str) -> str | None:
    """The marker that ends the thoughts in which a prompt ends; None: it ends in none."""
    return next((closing for opening, closing in THOUGHTS if prompt.rstrip().endswith(opening)), None)


def budget_processor(
    n_prompt: int, budget: int, openings: list[list[int]], closings: list[list[int]]
) -> Callable[[Any, Any], Any]:
    """A logits processor that ends thoughts.

    Args:
        n_prompt: Tokens of the prompt.
        budget: Tokens of thoughts.
        openings: Of each kind of thoughts the tokens that open it; empty if the prompt has.
        closings: Of each kind the tokens that end it.
    """

    def force(history: Any, scores: Any) -> Any:
        written = np.asarray(history)[n_prompt:].tolist()
        n_behind = len(written) - budget
        if n_behind < 0:
            return scores
        for opening, closing in zip(openings, closings):
            is_open = _place(written[: len(opening) + 1], opening) >= 0 and _place(written[:budget], closing) < 0
            if is_open and n_behind < len(closing) and written[budget:] == closing[:n_behind]:
                forced = np.full_like(scores, -np.inf)
                forced[closing[n_behind]] = 0.0
                return forced
        return scores

    return force


def _place(tokens: list[int], wanted: list[int]) -> int:
    return next((i for i in range(len(tokens) - len(wanted) + 1) if tokens[i : i + len(wanted)] == wanted), -1)
