"""What people see: answers on stdout, notes and progress bars on stderr. No text of others can steer a terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn

_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_VISIBLE = {code: f"\\u{code:04x}" for code in _CONTROLS if chr(code) not in "\n\t"}
"""Control characters (C0, DEL, C1) and those that reverse the direction of text, as JSON writes them."""


def shown(text: str, stream: TextIO) -> str:
    """Text of a model or a file as it may go to this stream: untouched, but for a terminal with its control characters
    made visible, since they could write to the clipboard, hide lines or answer in the user's name."""
    return text.translate(_VISIBLE) if stream.isatty() else text


def write(text: str) -> None:
    """Writes text of a model or a file, or a piece of it, to stdout."""
    write_marked(shown(text, sys.stdout))


def write_marked(text: str) -> None:
    """Writes text that may hold colours of our own to stdout; characters that its encoding lacks become `?`."""
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:
        sys.stdout.write(text.encode(sys.stdout.encoding, "replace").decode(sys.stdout.encoding))
    sys.stdout.flush()


def note(text: str) -> None:
    """A quiet line on stderr."""
    click.secho(shown(text, sys.stderr), dim=True, err=True)


def warn(text: str) -> None:
    """A line on stderr that should be read."""
    click.secho(shown(text, sys.stderr), fg="yellow", err=True)


class Bar:
    """A progress bar on stderr; nothing at all where stderr is no terminal."""

    def __init__(self, *columns: ProgressColumn) -> None:
        """`columns`: what stands behind text and bar; nothing: the `count` of `update`."""
        self._columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            *(columns or [TextColumn("{task.fields[count]}")]),
        )
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def update(self, text: str, done: float, total: float | None, count: str = "") -> None:
        """Shows how far we are, beginning at the first call; with the total None, that something goes on."""
        if not sys.stderr.isatty():
            return
        text = shown(text, sys.stderr)
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
