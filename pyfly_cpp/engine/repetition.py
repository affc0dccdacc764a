"""Has an output fallen into a loop? By its tokens; loose acceptance must not bring that about."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

MAX_PERIOD = 64
"""Longest repeated unit that counts as a loop, tokens."""

MIN_REPEATS = 4
"""Occurrences of the unit in a row that make a loop ..."""

MIN_SPAN = 32
"""... if they take at least so many tokens together: `ha ha ha ha` in a story is no loop."""

_LOOK_EVERY, _LOOK_BACK, _LONG = 32, 512, 128
"""Tokens between two looks at an answer that is being written, tokens that a look covers, and tokens of a loop that is
not worth waiting for."""


@dataclass(frozen=True)
class Loop:
    """A run of one unit again and again."""

    start: int
    """First token of the run."""
    period: int
    """Length of the unit, tokens."""
    length: int
    """Length of the run, tokens."""
    at_end: bool
    """Whether the run reaches the end of the output: it never got out of it."""


def find_loop(tokens: Sequence[int]) -> Loop | None:
    """The longest true loop: tokens[i] == tokens[i - period] along a run that holds the unit at least `MIN_REPEATS`
    times and takes at least `MIN_SPAN` tokens. None if there is none. Of runs of one length, that of the shortest
    period.
    """
    best: Loop | None = None
    n = len(tokens)
    for period in range(1, min(MAX_PERIOD, n // MIN_REPEATS) + 1):
        needed = max(MIN_REPEATS * period, MIN_SPAN)
        matched = 0
        for i in range(period, n + 1):
            if i < n and tokens[i] == tokens[i - period]:
                matched += 1
                continue
            length = matched + period
            if matched and length >= needed and (best is None or length > best.length):
                best = Loop(i - length, period, length, i == n)
            matched = 0
    return best


class LoopWatch:
    """Watches an answer while it is written, by its last tokens, for somebody who would stop it in a loop."""

    def __init__(self) -> None:
        self._tokens: deque[int] = deque(maxlen=_LOOK_BACK)
        self._n = 0

    def add(self, token: int) -> bool:
        """Takes the next token of the answer. Returns whether the answer is to be stopped: it ends in a loop of at
        least 128 tokens. Looked for at every 32nd token."""
        self._tokens.append(token)
        self._n += 1
        if self._n % _LOOK_EVERY:
            return False
        loop = self.loop
        return loop is not None and loop.length >= _LONG

    @property
    def loop(self) -> Loop | None:
        """The loop that the answer ends in now, of any length; None if there is none."""
        found = find_loop(list(self._tokens))
        return found if found is not None and found.at_end else None
