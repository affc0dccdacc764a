"""The handle of a request to a `FlyBatch`."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any

from pyfly_cpp.engine.feed import Feed
from pyfly_cpp.engine.stats import Record, Stats
from pyfly_cpp.engine.stepper import Stepped, Stepper

Tell = Callable[[Any], Sequence[Any]]
"""Tells one piece after the other in chunks."""


class Handle:
    """A request of a `FlyBatch`: iterate it (`for`, `async for`), wait for its `result`, or `await` it.

    May be used by any thread, and by several. A handle that nobody keeps cancels its request.
    """

    def __init__(
        self,
        feed: Feed,
        steps: list[Stepped],
        stepper: Stepper,
        owner: object,
        new_stream: Callable[[], Tell] | None = None,
        response: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """
        Args:
            feed: Brings pieces, or what is as it should be.
            steps: What the stepper has of the request, the newest last.
            stepper: Steps them.
            owner: Lives as long as the handle.
            new_stream: Makes what tells the pieces in chunks; None: they are told as they are.
            response: What they are together; None: the list of their chunks.
        """
        self.feed = feed
        self.steps = steps
        self._stepper = stepper
        self._owner = owner
        self._new_stream = new_stream
        self._response = response
        unkept = weakref.finalize(self, _cancel, feed, steps, stepper, "nobody kept the handle.")
        unkept.atexit = False
        # It holds the feed, whose failure has the frames that it was raised in, and these have the handle, which would
        # live as long as the process.
        feed.future.add_done_callback(lambda _: unkept.detach())

    def __repr__(self) -> str:
        return f"<Handle of a request that {'has ended' if self.feed.future.done() else 'waits or runs'}>"

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the end: the response, as `create_completion` or `create_chat_completion` return it; with
        stream=True, and after `write`, the list of its chunks or pieces.

        Raises:
            concurrent.futures.TimeoutError: it takes longer than `timeout` seconds; the request continues.
            concurrent.futures.CancelledError: it was cancelled.
            PyflyError: this process is a fork of the one that runs it.
            Exception: what the completion raised.
        """
        return self._told(self.feed.to_wait_for().result(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the end: the exception that `result` would raise, or None. Raises TimeoutError as it does."""
        return self.feed.to_wait_for().exception(timeout)

    def done(self) -> bool:
        """Whether there is a result, or a failure."""
        return self.feed.future.done()

    def cancel(self) -> bool:
        """Ends the request, whether it runs or waits; its slot is free for another one. Returns False, and does
        nothing, if it has already ended. From any thread, any number of times."""
        return _cancel(self.feed, self.steps, self._stepper, "the request was cancelled.")

    def finish(self, cause: str) -> None:
        """Ends the answer where it stands, as `Output.end` does; nothing if it has ended."""
        for stepped in self.steps[-1:]:
            self._stepper.finish(stepped, cause)

    def __iter__(self) -> Iterator[Any]:
        """Chunks as they arrive; without stream=True, the response. Begins at the first one whenever it is
        called."""
        if self._response is not None:
            yield self.result()
            return
        tell, n = self._tell(), 0
        while pieces := self.feed.get(n):
            n += len(pieces)
            for piece in pieces:
                yield from tell(piece)

    async def __aiter__(self) -> AsyncIterator[Any]:
        """The same in an event loop."""
        if self._response is not None:
            yield await self
            return
        tell, n = self._tell(), 0
        while pieces := await self.feed.get_async(n):
            n += len(pieces)
            for piece in pieces:
                for chunk in tell(piece):
                    yield chunk

    def __await__(self) -> Generator[Any, None, Any]:
        """The result, in an event loop. A task that is cancelled while it waits cancels the request."""
        return self._wait().__await__()

    async def _wait(self) -> Any:
        try:
            return self._told(await asyncio.wrap_future(self.feed.to_wait_for()))
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _tell(self) -> Tell:
        return (lambda piece: (piece,)) if self._new_stream is None else self._new_stream()

    def _told(self, pieces: list[Any]) -> Any:
        if self._response is not None:
            return self._response(pieces)
        tell = self._tell()
        return [chunk for piece in pieces for chunk in tell(piece)]

    @property
    def stats(self) -> Stats:
        """Counters of this request so far; waits for the running step."""
        return self._stepper.stats_of(self.steps[-1]) if self.steps else Stats()

    @property
    def records(self) -> list[Record]:
        """How each token was produced, with trace=True; in a notebook as in `FlyLlama`."""
        return self.steps[-1].request.records if self.steps else []


def _cancel(feed: Feed, steps: list[Stepped], stepper: Stepper, why: str) -> bool:
    failure = CancelledError(why)
    if feed.is_elsewhere or not feed.fail(failure):
        return False
    for stepped in steps[-1:]:
        stepper.cancel(stepped, failure)
    return True
