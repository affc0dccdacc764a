"""`Feed`: what comes of a request, as a queue that one thread feeds and several may read, each from its beginning."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from pyfly_cpp.machine.processes import Process


class Feed:
    """A queue that keeps what it has given out. Any thread may call any method."""

    def __init__(self) -> None:
        self.future: Future[list[Any]] = Future()
        """Done with all items, or the failure."""
        self.future.set_running_or_notify_cancel()  # an event loop that cancels it must not end it behind our back
        self._process = Process("FlyBatch")
        self._changed = threading.Condition()
        self._items: list[Any] = []
        self._listeners: list[Callable[[], None]] = []

    def put(self, items: Sequence[Any], is_last: bool = False) -> None:
        """Appends items, unless it has ended; with is_last it ends behind them."""
        with self._changed:
            if not self.future.done():
                self._items += items
                if is_last:
                    self.future.set_result(self._items)
                self._tell()

    def fail(self, failure: BaseException) -> bool:
        """Ends with a failure, which readers get behind what there is; False: it has ended already."""
        with self._changed:
            if self.future.done():
                return False
            self.future.set_exception(failure)
            self._tell()
            return True

    def _tell(self) -> None:
        self._changed.notify_all()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a fork of the process whose thread feeds it."""
        return not self._process.is_current

    def to_wait_for(self) -> Future[list[Any]]:
        """The future; raises PyflyError in a fork, where it would never be done."""
        self._process.require_current()
        return self.future

    def get(self, i: int) -> list[Any]:
        """Waits for item i: all from there on that have come, or [] behind the last one. Raises the failure behind the
        last one that came, and PyflyError in a fork."""
        self._process.require_current()
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) > i or self.future.done())
            return self._found(i)

    async def get_async(self, i: int) -> list[Any]:
        """The same in an event loop."""
        self._process.require_current()
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                if len(self._items) > i or self.future.done():
                    return self._found(i)
                changed: asyncio.Future[None] = loop.create_future()
                self._listeners.append(lambda changed=changed: _wake(loop, changed))  # type: ignore[misc]
            await changed

    def _found(self, i: int) -> list[Any]:
        if len(self._items) > i:
            return self._items[i:]
        self.future.result()
        return []


def _wake(loop: asyncio.AbstractEventLoop, changed: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(lambda: None if changed.done() else changed.set_result(None))
