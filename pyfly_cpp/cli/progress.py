"""How far a command that measures is: a bar, or if stderr is no terminal a line now and then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.progress import MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn

from pyfly_cpp.cli.terminal import EVERY, Bar, note
from pyfly_cpp.errors import counted


class Advance:
    """Moves a progress bar, or writes the lines."""

    def __init__(self, bar: Bar, what: str, n_total: int, n_settings: int) -> None:
        self._bar, self._what, self._n_total, self._n_settings = bar, what, n_total, n_settings
        self._first: tuple[int, float] | None = None  # what the first call told, and when
        self._is_estimated = False
        bar.update(what, 0, n_total)

    def __call__(self, done: int, description: str, /) -> None:
        """So many answers of the total are there; called when one has come."""
        now = time.monotonic()
        if self._first is None:
            self._bar.stop()  # what an earlier, interrupted run has done must not look like speed
            self._first = done, now
        first, began = self._first
        self._bar.update(description, done - first + 1, self._n_total - first + 1)
        left = None
        if self._n_settings <= done - first < self._n_total - first:  # settings differ in speed
            left = (self._n_total - done) * (now - began) / (done - first)
        is_long = left is not None and not self._is_estimated and left >= EVERY
        self._is_estimated |= left is not None
        more = "" if left is None else f", about {_in_words(left)} left"
        self._bar.tell(f"{self._what}: {done} of {self._n_total}{more}", is_long)


def _in_words(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return counted(minutes, "minute") if minutes < 90 else f"{minutes / 60:.1f} hours"


@contextlib.contextmanager
def progress_bar(what: str, n_each: int, n_settings: int) -> Iterator[Advance]:
    """Tells how much there is to do, and then how far it is: by a bar with the time left on stderr or, if that is no
    terminal, by a line after the first answers, if they promise a long time, and one a minute.

    Args:
        what: The work.
        n_each: Answers of each setting.
    """
    n_total = n_each * n_settings
    note(f"{what}: {counted(n_each, 'answer')} with each of {counted(n_settings, 'setting')}, {n_total} in all")
    with Bar(MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()) as bar:
        yield Advance(bar, what, n_total, n_settings)
