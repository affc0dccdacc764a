"""Sending an answer: as JSON in portions, to a client who may read slowly, or leave.

Portions, since the event loop has others to serve, and a big answer takes much more memory as objects than as text.
`connections` ends those who read too slowly.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

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


Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
T = TypeVar("T")

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


_MOST_OF_HEADER = 2048
_MOST_AT_ONCE = 2**17
"""Bytes that are handed on together."""


def header_of(entries: Sequence[str]) -> str:
    """A list as the value of a header, cut if it is long; characters that a header cannot have are escaped."""
    return ", ".join(entries).encode("unicode_escape").decode()[:_MOST_OF_HEADER].strip()


class ClientLeft(Exception):
    """Nobody is there to be answered."""


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Does the work of a request that was read whole, and gives it up when the client leaves. Raises ClientLeft."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Sender:
    """Sends a stream of events."""

    def __init__(self, send: Send, is_named: bool, is_marked: bool) -> None:
        """
        Args:
            send: Of ASGI.
            is_named: Whether events have names.
            is_marked: Whether [DONE] stands behind them.
        """
        self._send = send
        self._is_named = is_named
        self._is_marked = is_marked
        self.has_begun = False
        """Whether the head was sent."""
        self._last = 0.0

    async def begin(self, headers: Mapping[str, str]) -> None:
        """The head of the response, with these headers besides its own."""
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *_encoded(headers)]})
        self._last = time.monotonic()

    async def event(self, event: dict[str, Any]) -> None:
        """One event."""
        name = f"event: {event['type']}\n".encode() if self._is_named else b""
        await self._write([name, b"data: ", *portions(event), b"\n\n"])

    async def keep_alive(self, seconds: float) -> None:
        """A comment, if nothing was sent for so long: a proxy would take the stream for dead."""
        if time.monotonic() - self._last >= seconds:
            await self._write([b": waiting\n\n"])

    async def end(self) -> None:
        """There is no more."""
        if self._is_marked:
            await self._write([b"data: [DONE]\n\n"])
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, parts: Sequence[bytes | bytearray]) -> None:
        for body in _joined(parts):
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
        self._last = time.monotonic()


class Whole:
    """A response of JSON that may be big, as an ASGI application."""

    def __init__(self, parts: Sequence[bytes | bytearray], headers: Mapping[str, str] | None = None) -> None:
        """`parts`: as `portions` gives them."""
        self._parts = parts
        self._headers = headers or {}

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        own = ((b"content-type", b"application/json"), (b"content-length", b"%d" % sum(map(len, self._parts))))
        await send({"type": "http.response.start", "status": 200, "headers": [*own, *_encoded(self._headers)]})
        for body in _joined(self._parts):
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def _joined(parts: Iterable[bytes | bytearray]) -> Iterator[bytes]:
    """The parts, small ones together."""
    held: list[bytes | bytearray] = []
    n = 0
    for part in parts:
        if n + len(part) > _MOST_AT_ONCE and held:
            yield b"".join(held)
            held, n = [], 0
        held.append(part)
        n += len(part)
    yield b"".join(held)


@contextlib.asynccontextmanager
async def closing(pieces: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Around an iteration that may end early: what it holds is freed immediately."""
    try:
        yield pieces
    finally:
        await pieces.aclose()  # type: ignore[attr-defined]
