"""JSON that is written in portions: the event loop has others to serve, and a big answer takes much more memory as
objects than as text."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Iterable
from typing import Any

_N_AT_ONCE = 64
"""Entries that are written while other threads wait for the interpreter."""
_PORTION = 2**16
"""Bytes of a portion, about."""
_MARKER = uuid.uuid4().hex
"""Stands for entries in the JSON around them; no client knows it."""


class Entries:
    """The entries of a list of a response, kept as JSON."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self.portions: list[bytearray] = []
        """The JSON between the brackets."""
        self.extend(values)

    def extend(self, values: Iterable[Any] | Entries) -> None:
        """Appends entries, in which there may be `Entries`. May be called for many of them, and in any thread if no
        other one uses the list."""
        if isinstance(values, Entries):
            self._append(*values.portions)
            return
        left = iter(values)
        while some := list(itertools.islice(left, _N_AT_ONCE)):
            parts = portions(some)
            parts[0] = parts[0][1:]
            parts[-1] = parts[-1][:-1]
            self._append(*parts)

    def _append(self, *more: bytes | bytearray) -> None:
        for i, part in enumerate(more):
            if not self.portions or len(self.portions[-1]) > _PORTION:
                self.portions.append(bytearray())
            if i == 0 and self.portions[0]:
                self.portions[-1] += b","
            self.portions[-1] += part


def portions(value: Any) -> list[bytes | bytearray]:
    """The JSON of a value, in which there may be `Entries`."""
    found: list[Entries] = []

    def marked(entries: Any) -> str:
        if not isinstance(entries, Entries):
            raise TypeError(f"{type(entries).__name__} has no JSON")
        found.append(entries)
        return _MARKER

    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=marked)
    first, *others = text.encode("utf-8", "replace").split(f'"{_MARKER}"'.encode())
    out: list[bytes | bytearray] = [first]
    for entries, part in zip(found, others):
        out += [b"[", *entries.portions, b"]", part]
    return out
