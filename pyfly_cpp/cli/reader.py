"""Where the user's messages come from: a terminal with history and several lines, or a pipe with one message a line."""

from __future__ import annotations

import os
import sys
from typing import Any, Protocol

from pyfly_cpp.cli.terminal import has_user, note
from pyfly_cpp.cli.text import open_stdin, repaired
from pyfly_cpp.machine.cache import kept_path

COMMANDS = (
    "/help", "/regenerate", "/continue", "/undo", "/read", "/system", "/set", "/gate", "/preset", "/drafter", "/stats",
    "/reset", "/clear", "/save", "/load", "/exit", "/quit", "/bye",
)  # fmt: skip


class MessageReader(Protocol):
    """Reads messages: valid Unicode, whatever was typed, pasted or piped."""

    interactive: bool

    def read(self) -> str:
        """The next message; raises EOFError when there are no more, KeyboardInterrupt at Ctrl-C."""
        ...


def make_reader() -> MessageReader:
    """A terminal's reader if a person sits there, else a pipe's."""
    return TerminalReader() if has_user() else PipeReader()


class PipeReader:
    """One message a line; a backslash at the end continues in the next one."""

    interactive = False

    def __init__(self) -> None:
        self._stdin = open_stdin()

    def read(self) -> str:
        lines: list[str] = []
        while True:
            line = self._stdin.readline()
            if not line and not lines:
                raise EOFError
            lines.append(line.rstrip("\r\n"))
            if not line or not lines[-1].endswith("\\"):
                return repaired("\n".join(lines), "the message")
            lines[-1] = lines[-1][:-1]


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

    path = kept_path("history")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError as error:
        note(f"({path} is not writable ({error.strerror}): this session's history will not be kept)")
        return InMemoryHistory()
    return History(str(path))
