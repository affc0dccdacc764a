"""What a `FlyBatch` hands out for a request: `Handle`, and the `Job` behind it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

from pyfly_cpp.batch.stepped_text import Text
from pyfly_cpp.batch.views import View
from pyfly_cpp.engine.stats import Record, Stats
from pyfly_cpp.machine.processes import Process

Start = Callable[[Callable[[Text], None]], View]
"""Makes the view of a request; it is given what wants to know the texts that the view begins."""


class Job:
    """One request on its way: what was asked, what came of it so far, and who waits for more."""

    def __init__(self, start: Start, complete: Callable[[View], Any], is_stream: bool) -> None:
        """
        Args:
            start: Makes the view.
            complete: Calls its completion.
            is_stream: Whether that returns an iterator of chunks, or a response.
        """
        self._start = start
        self._complete = complete
        self._is_stream = is_stream
        self.future: Future[Any] = Future()
        """Done with the response, the list of chunks, or the failure."""
        self.future.set_running_or_notify_cancel()  # an event loop that cancels it must not end it behind our back
        self._process = Process("FlyBatch")
        self._changed = threading.Condition()
        self._chunks: list[Any] = []
        self._listeners: list[Callable[[], None]] = []
        self._text: Text | None = None
        self._view: View | None = None
        self._stats, self._records = Stats(), list[Record]()

    # ---- The thread that writes --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serves the request, to its end or until it is cancelled."""
        if self.future.done():
            return
        try:
            self._view = self._start(self._begin)
            try:
                response = self._complete(self._view)
                for chunk in response if self._is_stream else (response,):
                    self._add(chunk)
            finally:
                self._view.close()
            self._finish(self._chunks if self._is_stream else self._chunks[0], None)
        except BaseException as failure:
            self._finish(None, failure)
        finally:
            if self._view is not None:
                self._stats, self._records, self._view = self._view.stats, self._view.records, None
            self._text = None

    def _begin(self, text: Text) -> None:
        self._text = text  # before the look at the future: `stop` looks at them the other way round
        if self.future.done():
            text.interrupt(CancelledError("the request was cancelled."))

    def _add(self, chunk: Any) -> None:
        with self._changed:
            self._chunks.append(chunk)
            self._tell()

    def _finish(self, result: Any, failure: BaseException | None) -> bool:
        """Whether it was not finished before."""
        with self._changed:
            if self.future.done():
                return False
            if failure is None:
                self.future.set_result(result)
            else:
                self.future.set_exception(failure)
            self._tell()
            return True

    def _tell(self) -> None:
        self._changed.notify_all()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()

    # ---- Any thread --------------------------------------------------------------------------------------------------

    def stop(self, why: str) -> bool:
        """Ends the request, if it has not ended; whoever waits for it gets a CancelledError. Not in a fork."""
        if not self._process.is_current:
            return False
        failure = CancelledError(why)
        if not self._finish(None, failure):
            return False
        text = self._text
        if text is not None:
            text.interrupt(failure)
        return True

    def to_wait_for(self) -> Future[Any]:
        """The future; raises PyflyError in a fork, where it would never be done."""
        self._process.require_current()
        return self.future

    def chunk(self, i: int) -> list[Any]:
        """Waits for chunk i: [chunk], or [] behind the last one. Raises the request's failure behind the last one that
        came, and PyflyError in a fork."""
        self._process.require_current()
        with self._changed:
            self._changed.wait_for(lambda: len(self._chunks) > i or self.future.done())
            return self._found(i)

    async def chunk_async(self, i: int) -> list[Any]:
        """The same in an event loop."""
        self._process.require_current()
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                if len(self._chunks) > i or self.future.done():
                    return self._found(i)
                changed: asyncio.Future[None] = loop.create_future()
                self._listeners.append(lambda changed=changed: _wake(loop, changed))  # type: ignore[misc]
            await changed

    def _found(self, i: int) -> list[Any]:
        if len(self._chunks) > i:
            return [self._chunks[i]]
        self.future.result()
        return []

    @property
    def stats(self) -> Stats:
        """What was counted so far."""
        view = self._view
        return self._stats if view is None else view.stats

    @property
    def records(self) -> list[Record]:
        """How the tokens of the (last) text came, where it is traced."""
        view = self._view
        return self._records if view is None else view.records


def _wake(loop: asyncio.AbstractEventLoop, changed: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(lambda: None if changed.done() else changed.set_result(None))


class Handle:
    """A request of a `FlyBatch`: iterate it (`for`, `async for`), wait for its `result`, or `await` it.

    May be used by any thread, and by several. A handle that nobody keeps cancels its request.
    """

    def __init__(self, job: Job, owner: object) -> None:
        """`owner`: lives as long as the handle."""
        self._job = job
        self._owner = owner
        weakref.finalize(self, job.stop, "nobody kept the handle.").atexit = False

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the end: the response, as `create_completion` or `create_chat_completion` return it; with
        stream=True the list of its chunks.

        Raises:
            concurrent.futures.TimeoutError: it takes longer than `timeout` seconds; the request goes on.
            concurrent.futures.CancelledError: it was cancelled.
            PyflyError: this process is a fork of the one that runs it.
            Exception: what the completion raised.
        """
        return self._job.to_wait_for().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the end: what `result` would raise, None if nothing. Raises TimeoutError as it does."""
        return self._job.to_wait_for().exception(timeout)

    def done(self) -> bool:
        """Whether there is a result, or a failure."""
        return self._job.future.done()

    def cancel(self) -> bool:
        """Ends the request, whether it runs or waits; its slot is free for another one. Returns False, and does
        nothing, where it has ended already. From any thread, any number of times."""
        return self._job.stop("the request was cancelled.")

    def __iter__(self) -> Iterator[Any]:
        """With stream=True the chunks as they come, else the response. Begins at the first whenever it is called."""
        i = 0
        while found := self._job.chunk(i):
            yield found[0]
            i += 1

    async def __aiter__(self) -> AsyncIterator[Any]:
        """The same in an event loop."""
        i = 0
        while found := await self._job.chunk_async(i):
            yield found[0]
            i += 1

    def __await__(self) -> Generator[Any, None, Any]:
        """The result, in an event loop. A task that is cancelled while it waits cancels the request."""
        return self._wait().__await__()

    async def _wait(self) -> Any:
        try:
            return await asyncio.wrap_future(self._job.to_wait_for())
        except asyncio.CancelledError:
            self.cancel()
            raise

    @property
    def stats(self) -> Stats:
        """What was counted of this request so far."""
        return self._job.stats

    @property
    def records(self) -> list[Record]:
        """How each token came, with trace=True."""
        return self._job.records
