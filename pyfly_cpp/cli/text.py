"""Text that comes in: whatever was typed, pasted, piped or given as an argument is made valid Unicode."""

from __future__ import annotations

import contextlib
import io
import os
import select
import shlex
import stat
import sys
from pathlib import Path
from typing import Any, TextIO

import click

from pyfly_cpp.cli.terminal import note


def repaired(text: str, where: str) -> str:
    """Text as UTF-8 can hold it: U+FFFD instead of what it cannot (bytes that were no UTF-8, halves of surrogate
    pairs), and a note on stderr.

    Args:
        where: What the text is, for the note: "the message".
    """
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        pass
    with contextlib.suppress(UnicodeError):
        return text.encode("utf-8", "surrogateescape").decode("utf-8")  # right, but read as ASCII (LC_ALL=C)
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")  # joins the halves of a pair
    n_replaced = whole.count("\ufffd") - text.count("\ufffd")
    if n_replaced:
        what = "one character was" if n_replaced == 1 else f"{n_replaced} characters were"
        note(f"({where} is not valid UTF-8: {what} replaced by \ufffd)")
    return whole


def file_named(command: str, rest: str) -> Path:
    """The file behind a command of the chat; raises ValueError unless there is one name."""
    try:
        parts = shlex.split(rest) if os.name == "posix" else [rest.strip('"')]
    except ValueError:
        parts = [rest]
    if len(parts) != 1 or not parts[0]:
        raise ValueError(f"write {command} FILE, with quotes around a name that has spaces.")
    return Path(parts[0]).expanduser()


class TextType(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """An argument that a model will read."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return repaired(value, max(param.opts, key=len) if param is not None else "the text")


class _SomeTextType(TextType):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(value, param, ctx) or self.fail("it is empty; give a text.", param, ctx)


TEXT = TextType()
SOME_TEXT = _SomeTextType()
"""One that is not empty."""


_SECONDS_OF_SOCKET = 0.1
"""A program that gives text through a socket has written by the time that ours has started."""


def piped_text() -> str | None:
    """Text that was piped in, came through a socket (programs of Node.js give it so) or was redirected from a file,
    less one newline at its end; None if nothing was. A socket on which nothing comes is nobody's text: programs give
    one to their children without a thought."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
        is_piped = stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
        if stat.S_ISSOCK(mode):
            is_piped = bool(select.select([sys.stdin], [], [], _SECONDS_OF_SOCKET)[0])
    except (OSError, ValueError):  # no file at all: somebody's own object
        is_piped = not sys.stdin.isatty()
    text = repaired(open_stdin().read(), "the prompt") if is_piped else ""
    return text.removesuffix("\n") or None


def open_stdin() -> TextIO:
    """stdin; bytes that are no text do not fail there but come through for `repaired` to see."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin
