"""What people see besides the answer, on stderr: notes and progress bars."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


def note(text: str) -> None:
    """A quiet line on stderr."""
    click.secho(text, dim=True, err=True)


def warn(text: str) -> None:
    """A line on stderr that should be read."""
    click.secho(text, fg="yellow", err=True)


class Bar:
    """A progress bar on stderr; nothing at all where stderr is no terminal."""

    def __init__(self, download: bool = False) -> None:
        self._columns: list[Any] = [TextColumn("{task.description}"), BarColumn(bar_width=30)]
        self._columns += [DownloadColumn(), TimeRemainingColumn()] if download else [TextColumn("{task.fields[count]}")]
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def update(self, text: str, done: float, total: float, count: str = "") -> None:
        """Shows how far we are, beginning at the first call."""
        if not sys.stderr.isatty():
            return
        if self._progress is None:
            self._progress = Progress(*self._columns, console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task(text, total=total, count=count)
            self._progress.start()
        assert self._task is not None
        self._progress.update(self._task, description=text, completed=done, total=total, count=count)

    def stop(self) -> None:
        """Takes the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextlib.contextmanager
def leave_on_interrupt() -> Iterator[None]:
    """While a model loads, Ctrl-C ends the program: an exception cannot pass through llama.cpp's progress callback."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(*_: object) -> None:
        if sys.stderr.isatty():
            os.write(2, b"\x1b[?25h\r\x1b[K")  # the cursor, which a progress bar hides
        os._exit(130)

    previous = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
