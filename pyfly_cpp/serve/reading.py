"""The threads in which requests are read and answers written: long ones in few of their own, so that the others need
not wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pyfly_cpp.serve.api_errors import stopping

_SHORT = 2**16  # bytes that are read in some hundredths of a second
_N_LONG = 2  # long requests that are read at a time

T = TypeVar("T")


class Reading:
    """May be used by one event loop."""

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(_N_LONG, thread_name_prefix="pyfly-reading")
        self._lock = threading.Lock()
        self._n_running = 0
        self._waiting: set[asyncio.Future[None]] = set()

    async def run(self, n_bytes: int, function: Callable[[], T]) -> T:
        """What a function returns that reads or writes so many bytes. One that is given up has not begun, or ends in
        vain. Raises what it raises, and ApiError: the server ends."""
        if n_bytes <= _SHORT:
            return await asyncio.to_thread(function)
        loop = asyncio.get_running_loop()
        reading, ended = loop.run_in_executor(self._long, self._counted, function), loop.create_future()
        self._waiting.add(ended)
        try:
            await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise stopping()
            return reading.result()
        finally:
            self._waiting.discard(ended)
            reading.cancel()

    def _counted(self, function: Callable[[], T]) -> T:
        with self._lock:
            self._n_running += 1
        try:
            return function()
        finally:
            with self._lock:
                self._n_running -= 1

    def give_up(self) -> None:
        """Nobody waits any more for a long request to be read. In the event loop."""
        for ended in self._waiting:
            if not ended.done():
                ended.set_result(None)

    def close(self) -> None:
        """Begins nothing more; waits for nothing."""
        self._long.shutdown(wait=False, cancel_futures=True)

    @property
    def is_busy(self) -> bool:
        """Whether a long request is being read, also one that was given up. The model must not be freed then."""
        with self._lock:
            return self._n_running > 0
