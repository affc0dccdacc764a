"""Sending an answer to a client who may read slowly, or leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
T = TypeVar("T")

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


_MOST_OF_HEADER = 2048


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

    def __init__(self, send: Send, max_seconds: float, is_named: bool, is_marked: bool) -> None:
        """
        Args:
            send: Of ASGI.
            max_seconds: That a client may take for an event.
            is_named: Whether events have names.
            is_marked: Whether [DONE] stands behind them.
        """
        self._send = send
        self._max_seconds = max_seconds
        self._is_named = is_named
        self._is_marked = is_marked

    async def begin(self, headers: Mapping[str, str]) -> None:
        """The head of the response, with these headers besides its own."""
        more = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *more]})

    async def event(self, event: dict[str, Any]) -> None:
        """One event. Raises ClientLeft: it was not taken."""
        text = f"data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n"
        await self._write(f"event: {event['type']}\n{text}" if self._is_named else text)

    async def end(self) -> None:
        """There is no more."""
        if self._is_marked:
            await self._write("data: [DONE]\n\n")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, text: str) -> None:
        message = {"type": "http.response.body", "body": text.encode("utf-8", "replace"), "more_body": True}
        task, is_late = asyncio.current_task(), False

        def give_up() -> None:
            nonlocal is_late
            is_late = True
            assert task is not None
            task.cancel()

        # Not wait_for: before Python 3.12 it loses a cancellation that comes just as it ends, and the client who has
        # left would be written for.
        timer = asyncio.get_running_loop().call_later(self._max_seconds, give_up)
        try:
            await self._send(message)
        except OSError:
            raise ClientLeft from None
        except asyncio.CancelledError:
            if is_late:
                raise ClientLeft from None
            raise
        finally:
            timer.cancel()


@contextlib.asynccontextmanager
async def closing(pieces: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Around an iteration that may end early: what it holds is freed immediately."""
    try:
        yield pieces
    finally:
        await pieces.aclose()  # type: ignore[attr-defined]
