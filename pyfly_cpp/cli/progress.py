"""How far a long command is: a bar, or where stderr is no terminal a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Protocol

from rich.progress import MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn

from pyfly_cpp.cli.terminal import Bar, note

EVERY = 30.0
"""Seconds between lines."""


class Advance(Protocol):
    """Moves a progress bar."""

    def __call__(self, done: int, description: str, new_total: int | None = None, /) -> None:
        """`done` of the total; a new total begins a new bar."""


@contextlib.contextmanager
def progress_bar(n_total: int, what: str, lines: bool = True) -> Iterator[Advance]:
    """A bar with the time left, on stderr.

    Args:
        what: Of which something is done.
        lines: Where stderr is no terminal, how far it is stands in a line every half minute.
    """
    with Bar(MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()) as bar:
        bar.update(what, 0, n_total)
        total, begun = 0, 0
        said = time.monotonic()

        def advance(done: int, description: str, new_total: int | None = None) -> None:
            nonlocal total, begun, said
            if total != (wanted := new_total or total or n_total):
                bar.stop()  # what an earlier, interrupted run has done must not look like speed
                total, begun = wanted, done - 1
            bar.update(description, done - begun, total - begun)
            if lines and not sys.stderr.isatty() and time.monotonic() - said >= EVERY:
                said = time.monotonic()
                note(f"{what}: {done} of {total}")

        yield advance
