"""How far a long command is: a bar, or if stderr is no terminal a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.progress import MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn

from pyfly_cpp.cli.terminal import Bar, note

EVERY = 30.0
"""Seconds between lines."""


class Advance:
    """Moves a progress bar."""

    def __init__(self, bar: Bar, n_total: int, what: str, lines: bool) -> None:
        self._bar, self._n_total, self._what, self._lines = bar, n_total, what, lines
        self._begun: int | None = None
        self._told = time.monotonic()
        bar.update(what, 0, n_total)

    def __call__(self, done: int, description: str, /) -> None:
        """`done` of the total."""
        if self._begun is None:
            self._bar.stop()  # what an earlier, interrupted run has done must not look like speed
            self._begun = done - 1
        self._bar.update(description, done - self._begun, self._n_total - self._begun)
        if self._lines and not sys.stderr.isatty() and time.monotonic() - self._told >= EVERY:
            self._told = time.monotonic()
            note(f"{self._what}: {done} of {self._n_total}")


@contextlib.contextmanager
def progress_bar(n_total: int, what: str, lines: bool = True) -> Iterator[Advance]:
    """A bar with the time left, on stderr.

    Args:
        what: Of which something is done.
        lines: If stderr is no terminal, how far it is stands in a line every half minute.
    """
    with Bar(MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()) as bar:
        yield Advance(bar, n_total, what, lines)
