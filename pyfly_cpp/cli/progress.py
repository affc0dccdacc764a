"""How far a long command is: a bar, or where stderr is no terminal a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Protocol

from pyfly_cpp.cli.terminal import note, shown

EVERY = 30.0
"""Seconds between lines."""


class Advance(Protocol):
    """Moves a progress bar."""

    def __call__(self, done: int, description: str, n_total: int | None = None) -> None:
        """`done` of the total; a new total begins a new bar."""


@contextlib.contextmanager
def progress_bar(n_total: int, what: str, lines: bool = True) -> Iterator[Advance]:
    """A bar with the time left, on stderr.

    Args:
        what: Of which something is done.
        lines: Where stderr is no terminal, how far it is stands in a line every half minute.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        handle = bar.add_task(what, total=n_total)
        total = n_total
        begun = -1  # what an earlier, interrupted run has done must not look like speed
        said = time.monotonic()

        def advance(done: int, description: str, n_total: int | None = None) -> None:
            nonlocal begun, total, said
            if begun < 0 or (n_total is not None and n_total != total):
                total = total if n_total is None else n_total
                begun = done - 1
                bar.reset(handle, total=total - begun)
            bar.update(handle, completed=done - begun, description=shown(description, sys.stderr))
            if lines and not console.is_terminal and time.monotonic() - said >= EVERY:
                said = time.monotonic()
                note(f"{what}: {done} of {total}")

        yield advance
