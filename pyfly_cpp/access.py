"""Who may use a FlyLlama: one thread at a time, the newest generation, and nobody when it is closed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from pyfly_cpp.errors import BusyError

CLOSED = "this FlyLlama is closed; load the model again."


class Access:
    """The lock of an object, and which of its generations is the current one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_closed = False
        self.generation = 0
        """Counts generations; an older generator finds out that it was superseded."""

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Around a use of the object: this thread alone.

        Raises:
            BusyError: it is in use.
            ValueError: it is closed.
        """
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "this FlyLlama is in use, by another thread or by the very generation that called this; use one "
                "FlyLlama per thread, a lock, or a FlyBatch."
            )
        try:
            if self.is_closed:
                raise ValueError(CLOSED)
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def step(self, generation: int) -> Iterator[None]:
        """Around native work of a generation: this thread alone, and nobody has started another one since."""
        with self.exclusive():
            self.require_current(generation)
            yield

    @contextlib.contextmanager
    def last_step(self, generation: int) -> Iterator[bool]:
        """Around the end of a generation: whether it is for this generation to clean up. It is not where another one
        was started, or where the object is in use just now: whoever uses it next ends the generation."""
        if not self._lock.acquire(blocking=False):
            yield False
            return
        try:
            yield self.generation == generation and not self.is_closed
        finally:
            self._lock.release()

    def require_current(self, generation: int) -> None:
        """Raises BusyError where another generation was started, ValueError where the object was closed."""
        if self.is_closed:
            raise ValueError(CLOSED)
        if self.generation != generation:
            raise BusyError(
                "another generation was started on this FlyLlama before this one ended; use one FlyLlama for each, or "
                "exhaust or close the first."
            )
