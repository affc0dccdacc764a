"""Output for people: answers on stdout, notes and progress bars on stderr. No text of others can steer a terminal."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import TextIO

import click
from rich.cells import get_character_cell_size
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn

EVERY = 60.0
"""Seconds between the lines of a long command, if stderr is no terminal. What takes no longer has none."""

_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_VISIBLE = {code: f"\\u{code:04x}" for code in _CONTROLS if chr(code) not in "\n\t"}
"""Control characters (C0, DEL, C1) and those that reverse the direction of text, as JSON writes them."""


def is_dumb() -> bool:
    """Whether the terminal has no escape sequences."""
    return os.environ.get("TERM") == "dumb"


def shown(text: str, stream: TextIO) -> str:
    """Text of a model or a file as it may go to this stream: untouched, except that a terminal gets its control
    characters made visible, since they could write to the clipboard, hide lines or answer in the user's name."""
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


class AnswerWriter:
    """Writes an answer to stdout piece by piece; at a terminal, lines break between words. Code between lines of ```
    is left as it is."""

    def __init__(self) -> None:
        # The last column stays free: behind it terminals differ in where the cursor is.
        is_folded = sys.stdout.isatty() and not is_dumb()
        self._width = shutil.get_terminal_size().columns - 1 if is_folded else None
        self._column = self._word_width = 0
        self._word = self._begin = ""  # the last word, and what the line begins with
        self._is_code = False

    def write(self, piece: str) -> None:
        """The next piece."""
        write_marked("".join(map(self._placed, shown(piece, sys.stdout))))

    def _placed(self, char: str) -> str:
        if self._width is None:
            return char
        if char == "\n":
            self._is_code ^= self._begin == "```"
            self._column, self._word, self._word_width, self._begin = 0, "", 0, ""
            return char
        self._begin += char if len(self._begin) < 3 and not char.isspace() else ""
        width = 8 - self._column % 8 if char == "\t" else get_character_cell_size(char)
        is_over = self._column + width > self._width and not self._is_code
        if is_over and char.isspace():
            self._column, self._word, self._word_width = 0, "", 0
            return "\n"
        moved = ""
        if is_over and self._word_width < self._column:  # the word begins the next line instead
            moved = f"\x1b[{self._word_width}D\x1b[K\n{self._word}" if self._word else "\n"
            self._column = self._word_width
        # A word that is wider than the terminal runs on: an address is to be copied whole.
        self._column += width
        self._word, self._word_width = ("", 0) if char.isspace() else (self._word + char, self._word_width + width)
        return moved + char


def folded(text: str, stream: TextIO, indent: int | None = None) -> str:
    """A note for this stream: at a terminal, broken between words. Indented lines, which are to be copied, stay.
    `indent`: also these are broken, and what follows of a line begins at this column."""
    if not stream.isatty():
        return text
    width = max(20, shutil.get_terminal_size().columns - 1)
    lines = (
        [line]
        if line.startswith("  ") and indent is None
        else textwrap.wrap(
            line, width, subsequent_indent=" " * (indent or 0), break_long_words=False, break_on_hyphens=False
        )
        for line in text.split("\n")
    )
    return "\n".join("\n".join(parts) for parts in lines)


def write_sentences(text: str, indent: int | None = None) -> None:
    """Lines of a report to stdout; `indent` as in `folded`."""
    write(folded(text, sys.stdout, indent) + "\n")


def note(text: str) -> None:
    """A quiet line on stderr."""
    click.secho(folded(shown(text, sys.stderr), sys.stderr), dim=True, err=True)


def warn(text: str) -> None:
    """A line on stderr that should be read."""
    click.secho(folded(shown(text, sys.stderr), sys.stderr), fg="yellow", err=True)


@contextlib.contextmanager
def unseen_typing() -> Iterator[None]:
    """Inside, a terminal does not show what is typed; it waits for the next prompt."""
    try:
        import termios

        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
    except (ImportError, OSError, ValueError, termios.error):  # Windows, a pipe, somebody's own object
        yield
        return
    silent = [*before]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(keyboard, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSANOW, before)


def has_user() -> bool:
    """Whether somebody at a terminal sees what is asked on stderr, and can answer."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask_for(work: str, is_allowed: bool) -> None:
    """Tells what a long piece of work will take and asks whether to begin, unless `is_allowed` (`--yes`). Ends the
    program on a no; raises click.UsageError if there is nobody to ask."""
    if is_allowed:
        note(f"{work}.")
    elif not sys.stdin.isatty():
        raise click.UsageError(f"{work}: there is nobody to ask; allow it with --yes.")
    elif not click.confirm(f"{work}; continue?", err=True):
        note("Nothing was done.")
        raise click.exceptions.Exit(1)


class Bar:
    """A progress bar on stderr or, if that is no terminal, a line a minute."""

    def __init__(self, *columns: ProgressColumn) -> None:
        """`columns`: what stands behind text and bar; nothing: the `count` of `update`."""
        self._columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            *(columns or [TextColumn("{task.fields[count]}")]),
        )
        # Its own way to the terminal: while llama-cpp-python loads quietly, stderr leads nowhere.
        self._file: TextIO | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._told = time.monotonic()

    def update(self, text: str, done: float, total: float | None, count: str = "") -> None:
        """Shows how far we are, beginning at the first call; with the total None, that something is running. Lines are
        of updates with a count."""
        self._open()
        if self._progress is None and not sys.stderr.isatty():
            if count:
                self.tell(f"{text}: {count}")
            return
        text = text.translate(_VISIBLE)
        if self._progress is None:
            console = Console(file=self._file, stderr=True)
            self._progress = Progress(*self._columns, console=console, transient=True)
            self._task = self._progress.add_task(text, total=total, count=count)
            self._progress.start()
        assert self._task is not None
        self._progress.update(self._task, description=text, completed=done, total=total, count=count)

    def tell(self, line: str, is_now: bool = False) -> None:
        """Writes a line if stderr is no terminal, and the last one was a minute ago or `is_now`."""
        if (is_now or time.monotonic() - self._told >= EVERY) and not sys.stderr.isatty():
            self._told = time.monotonic()
            click.secho(line, dim=True, err=True, file=self._file)

    def _open(self) -> None:
        if self._file is None:
            with contextlib.suppress(OSError, ValueError):  # a stderr without a descriptor
                self._file = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding=sys.stderr.encoding, errors="replace")

    def stop(self) -> None:
        """Takes the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._file is not None:
            self._file.close()
            self._file = None

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
        if sys.stderr.isatty() and not is_dumb():
            os.write(2, b"\x1b[?25h\r\x1b[K")  # the cursor, which a progress bar hides
        os._exit(130)

    previous = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
