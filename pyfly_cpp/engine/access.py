"""Who may use a FlyLlama: one thread at a time, the newest generation, no fork of a process with threads, and nobody
when it is closed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from pyfly_cpp.errors import BusyError
from pyfly_cpp.machine.processes import Process

CLOSED = "this FlyLlama is closed; load the model again."


class Use:
    """A use of an object, as a context manager that may be entered again: every token passes through one, so it is no
    generator."""

    __slots__ = ("__exit__", "_access", "_acquire", "_generation")

    __exit__: Callable[..., None]

    def __init__(self, access: Access, generation: int | None) -> None:
        self._access = access
        self._acquire = access.lock.acquire
        self.__exit__ = access.lock.__exit__  # no function of Python, at whose entry Ctrl-C could leave the lock held
        self._generation = generation

    def __enter__(self) -> None:
        access, generation = self._access, self._generation
        if access.process is not None:
            access.process.require_current()
        is_ours = access.lock._is_owned()
        try:
            if is_ours or not self._acquire(False):
                raise BusyError(
                    "this FlyLlama is in use, by another thread or by the very generation that called this; use one "
                    "FlyLlama per thread, a lock, or a FlyBatch."
                )
            access.require_current(access.generation if generation is None else generation)
        except BaseException:  # also Ctrl-C, right behind the acquisition
            if not is_ours and access.lock._is_owned():
                access.lock.release()
            raise


class Access:
    """The lock of an object, and which of its generations is the current one."""

    def __init__(self) -> None:
        self.lock: Any = threading.RLock()  # not to be taken twice, but because it tells who holds it
        """Held during a use."""
        self.is_closed = False
        self.generation = 0
        """Counts generations; an older generator finds out that it was superseded."""
        self.process: Process | None = None
        """The only one that can use the object; None: so can a fork."""
        self._readers: dict[object, int] = {}
        """The threads that use the vocabulary, by an object for each use. Without a lock, which Ctrl-C could leave
        held: each operation on it is whole."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether only another process can use the object."""
        return self.process is not None and not self.process.is_current

    def exclusive(self) -> Use:
        """Around a use of the object: this thread alone.

        Entering raises:
            BusyError: it is in use.
            ValueError: it is closed.
            PyflyError: it belongs to another process.
        """
        return Use(self, None)

    def step(self, generation: int) -> Use:
        """Around native work of a generation: this thread alone, and nobody has started another one since; entering
        also raises BusyError if somebody has. May be entered again."""
        return Use(self, generation)

    def last_step(self, generation: int, clean_up: Callable[[], None]) -> None:
        """Has a generation clean up at its end, if that is for it to do. It is not if another one was started, or if
        the object is in use just now: whoever uses it next ends the generation."""
        if self.is_elsewhere:
            return
        is_mine = False
        try:
            with self.step(generation):
                is_mine = True
                clean_up()
        except (BusyError, ValueError):
            if is_mine:
                raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Around a use of the model's vocabulary, in any thread: the object is not closed meanwhile. Raises ValueError
        if it is closed."""
        use = object()
        try:
            self._readers[use] = threading.get_ident()
            if self.is_closed:  # asked behind the entry, as `close` says it before it looks for entries
                raise ValueError(CLOSED)
            yield
        finally:
            self._readers.pop(use, None)

    @property
    def is_reading(self) -> bool:
        """Whether this thread uses the vocabulary just now."""
        return threading.get_ident() in list(self._readers.values())

    def close(self, waits: bool) -> None:
        """Nobody may use the object any more. If its vocabulary is in use, waits for that, or raises BusyError."""
        if self._readers and not waits:
            raise BusyError("another thread tokenizes with this FlyLlama; close it when that is done.")
        self.is_closed = True
        while self._readers:
            time.sleep(0.002)

    def require_current(self, generation: int) -> None:
        """Raises BusyError if another generation was started, ValueError if the object was closed."""
        if self.is_closed:
            raise ValueError(CLOSED)
        if self.generation != generation:
            raise BusyError(
                "another generation was started on this FlyLlama before this one ended; use one FlyLlama for each, or "
                "exhaust or close the first."
            )
