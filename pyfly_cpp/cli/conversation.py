"""A conversation: messages, how it is saved, and how it is kept within a context."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyfly_cpp.cli.text import repaired
from pyfly_cpp.machine.files import write_atomically

_FORMAT = "pyfly-cpp conversation"
_VERSION = 1
_MAX_BYTES = 64 << 20
"""The largest file. No conversation is longer, but a model's file named by mistake is."""

Message = dict[str, str]


@dataclass
class Conversation:
    """The messages, apart from the settings."""

    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    """`{"role": "user" | "assistant", "content": ...}`, in turns."""

    def say(self, role: str, content: str) -> None:
        """Appends a message."""
        self.messages.append({"role": role, "content": content})

    def without_last_turn(self) -> tuple[Conversation, str]:
        """The conversation before the last message of the user, and that message; raises ValueError if there is
        none."""
        places = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not places:
            raise ValueError("there is no message yet; write one first.")
        return Conversation(self.system, self.messages[: places[-1]]), self.messages[places[-1]]["content"]

    def prompt(self) -> list[Message]:
        """The messages, the system prompt first."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.messages]

    def shorten(self, n_room: int, count: Callable[[str], int]) -> int:
        """Forgets the oldest turns if there are more than n_room tokens, until a quarter of the room is free again (so
        that not every turn has to); the last message stays. Returns how many turns were forgotten."""
        sizes = [_size(message, count) for message in self.messages]
        fixed = _size({"content": self.system}, count) if self.system else 0
        if fixed + sum(sizes) <= n_room:
            return 0
        n_turns = 0
        while len(self.messages) > 1 and fixed + sum(sizes) > n_room * 3 // 4:
            n = 1
            while n < len(self.messages) - 1 and self.messages[n]["role"] != "user":
                n += 1
            del self.messages[:n], sizes[:n]
            n_turns += 1
        return n_turns


_MARKUP = 8
"""Tokens that a chat template puts around a message, about."""


def _size(message: dict[str, Any], count: Callable[[str], int]) -> int:
    return count(message["content"]) + _MARKUP


def save(path: Path, conversation: Conversation, settings: dict[str, Any]) -> None:
    """Writes a conversation and its settings as JSON; never over a file that is something else."""
    if path.exists():
        try:
            _read(path)
        except ValueError:
            raise ValueError(f"{str(path)!r} exists and is not a saved conversation; choose another name.") from None
    data = {
        "format": _FORMAT,
        "version": _VERSION,
        "system": conversation.system,
        "messages": conversation.messages,
        "settings": settings,
    }
    write_atomically(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def load(path: Path) -> tuple[Conversation, dict[str, Any]]:
    """Reads what `save` wrote: the conversation and the settings.

    Raises:
        ValueError: the file cannot be read or is none of ours.
    """
    data = _read(path)
    messages, system, settings = data.get("messages"), data.get("system"), data.get("settings", {})
    fits = isinstance(messages, list) and all(
        isinstance(m, dict) and m.get("role") in ("user", "assistant") and isinstance(m.get("content"), str)
        for m in messages
    )
    if not fits or not (system is None or isinstance(system, str)) or not isinstance(settings, dict):
        raise ValueError(f"the conversation in {str(path)!r} is damaged; nothing was loaded.")
    assert isinstance(messages, list)
    where = f"a message in {path}"
    spoken = [{"role": m["role"], "content": repaired(m["content"], where)} for m in messages]
    return Conversation(system and repaired(system, f"the system prompt in {path}"), spoken), settings


def _read(path: Path) -> dict[str, Any]:
    try:
        size = path.stat().st_size
        data = json.loads(path.read_text(encoding="utf-8")) if path.is_file() and size <= _MAX_BYTES else None
    except OSError as error:
        raise ValueError(f"cannot read {str(path)!r} ({error.strerror}); check the path.") from None
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError(f"{str(path)!r} is not a conversation saved by /save; nothing was loaded.")
    if data.get("version") != _VERSION:
        raise ValueError(f"{str(path)!r} was saved by another version of pyfly-cpp; nothing was loaded.")
    return data
