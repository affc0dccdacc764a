"""Where the user's messages come from: a terminal with history and several lines, or a pipe with one message a line.
In both, three quotes open a message of several lines and close it."""

from __future__ import annotations

import os
import sys
from typing import Any, Protocol

import click

from pyfly_cpp.cli.terminal import has_user, is_dumb, note
from pyfly_cpp.cli.text import open_stdin, repaired
from pyfly_cpp.machine.cache import kept_path

COMMANDS = (
    "/help", "/regenerate", "/continue", "/undo", "/read", "/system", "/set", "/gate", "/preset", "/drafter", "/stats",
    "/reset", "/clear", "/save", "/load", "/exit", "/quit", "/bye",
)  # fmt: skip
LEAVING = ("/exit", "/quit", "/bye")


_QUOTES = '"""'


def quoted(text: str) -> str | None:
    """The message between three quotes, or behind them if nothing closes it; None: the text does not begin with
    them."""
    begun = text.strip()
    return begun[len(_QUOTES) :].removesuffix(_QUOTES).strip() if begun.startswith(_QUOTES) else None


def _is_open(text: str) -> bool:
    """Whether three quotes have opened a message, and none have closed it."""
    begun = text.strip()
    return begun.startswith(_QUOTES) and not begun[len(_QUOTES) :].endswith(_QUOTES)


class MessageReader(Protocol):
    """Reads messages: valid Unicode, whatever was typed, pasted or piped."""

    interactive: bool

    def read(self) -> str:
        """The next message, with its quotes if it has them (`quoted`); raises EOFError when there are no more,
        KeyboardInterrupt at Ctrl-C."""
        ...


def make_reader() -> MessageReader:
    """A terminal's reader if a person sits there, else a pipe's."""
    if not has_user():
        return PipeReader()
    return DumbTerminalReader() if is_dumb() else TerminalReader()


class PipeReader:
    """One message a line; a backslash at the end continues in the next one, and so do three quotes that open a
    message."""

    interactive = False

    def __init__(self) -> None:
        self._stdin = open_stdin()

    def read(self) -> str:
        line = self._stdin.readline()
        if not line:
            raise EOFError
        lines = [line.rstrip("\r\n")]
        if _is_open(lines[0]):
            while line and (len(lines) == 1 or not lines[-1].rstrip().endswith(_QUOTES)):
                line = self._stdin.readline()
                lines.append(line.rstrip("\r\n"))
        while line and lines[-1].endswith("\\"):
            line = self._stdin.readline()
            lines[-1:] = [lines[-1][:-1], line.rstrip("\r\n")]
        return repaired("\n".join(lines), "the message")


class DumbTerminalReader(PipeReader):
    """Lines as from a pipe, of a person at a terminal without escape sequences."""

    interactive = True

    def read(self) -> str:
        click.echo("> ", nl=False, err=True)
        return super().read()


class TerminalReader:
    """prompt_toolkit, drawing on stderr so that stdout carries answers only."""

    interactive = True

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.output import create_output
        from prompt_toolkit.shortcuts import CompleteStyle

        self._session: Any = PromptSession(
            history=_history(),
            completer=WordCompleter(list(COMMANDS), sentence=True),
            key_bindings=_key_bindings(),
            output=create_output(stdout=sys.stderr),
            complete_style=CompleteStyle.READLINE_LIKE,
            complete_while_typing=False,
            reserve_space_for_menu=0,
            multiline=True,
            prompt_continuation="  ",
        )

    def read(self) -> str:
        return repaired(self._session.prompt("> "), "the message")


def _key_bindings() -> Any:
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.complete_state is not None and buffer.complete_state.current_completion is not None:
            buffer.complete_state = None
        elif _is_open(buffer.text):
            buffer.insert_text("\n")
        elif buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _history() -> Any:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class History(FileHistory):
        def store_string(self, string: str) -> None:
            super().store_string(string.encode("utf-8", "replace").decode("utf-8"))

    try:
        path = kept_path("history")
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError as error:
        note(f"({path} is not writable ({error.strerror}): this session's history will not be kept)")
        return InMemoryHistory()
    except RuntimeError:  # no home folder
        return InMemoryHistory()
    return History(str(path))
