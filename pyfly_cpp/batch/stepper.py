"""The thread that steps a batch, and alone touches it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from pyfly_cpp._native import Batch, Counters
from pyfly_cpp.batch.stepped_text import Text
from pyfly_cpp.machine.processes import Process

CLOSED = "this FlyBatch is closed; load the model again."

_PAUSE = 0.002  # seconds between steps in which nothing can move until a reader does
_LONGEST_WAIT = 1.0  # seconds; a finalizer that runs in this very thread cannot wake it

T = TypeVar("T")


class Stepper:
    """Steps the texts of a batch in a thread of its own, which alone touches the batch."""

    def __init__(self, batch: Batch, n_vocab: int, on_end: Callable[[], None]) -> None:
        """
        Args:
            batch: The batch, configured. Nobody else may use it, or what it borrows, before `on_end`.
            n_vocab: Columns of a row.
            on_end: The last that the thread does, after `close`.
        """
        self._batch = batch
        self._n_vocab = n_vocab
        self._on_end = on_end
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._joining: deque[Text] = deque()
        self._running: dict[int, Text] = {}
        self._ended = Counters()
        self._python_seconds = 0.0
        self._is_closing = False
        self._failure: BaseException | None = None  # that ended the thread
        self.process = Process("FlyBatch")
        """Where the thread is. In a fork nothing here can be used, not even the locks: the thread may hold them."""
        self._thread = threading.Thread(target=self._run, name="pyfly-stepper", daemon=True)
        self._thread.start()

    # ---- From any thread ---------------------------------------------------------------------------------------------

    def add(self, text: Text) -> None:
        """A text wants a slot; texts get theirs in this order. Raises ValueError where the stepper has ended."""
        self._command(lambda: self._joining.append(text))

    def remove(self, text: Text) -> None:
        """A text has ended, or wants its slot no more."""
        with contextlib.suppress(ValueError):  # closed: nothing is left of it
            self._command(lambda: self._remove(text))

    def call(self, function: Callable[[], T]) -> T:
        """Calls a function in the stepping thread, between two steps. Raises ValueError where the stepper has ended."""
        return function() if self.is_current_thread else self.submit(function).result()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """The same without waiting. Functions are called in this order; one whose future was cancelled by then is
        not."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as failure:
                future.set_exception(failure)

        self._command(command)
        return future

    def wake(self) -> None:
        """Somebody wants something of a text that may be held."""
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """No step follows the one that runs. Does not wait."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def join(self) -> None:
        """Waits until the thread has ended."""
        self._thread.join()

    @property
    def is_current_thread(self) -> bool:
        """Whether this is the stepping thread."""
        return threading.current_thread() is self._thread

    def counters(self) -> tuple[Counters, float]:
        """What was counted of all texts, and the seconds that Python took between the steps; to be `call`ed."""
        total = self._ended
        for text in self._running.values():
            assert text.slot is not None
            total = total + text.slot.snapshot()
        return total, self._python_seconds

    def reset_counters(self) -> None:
        """Sets the sum to 0, not what the running texts have counted; to be `call`ed."""
        self._ended = self._ended - self.counters()[0]
        self._python_seconds = 0.0

    @property
    def has_failed(self) -> bool:
        """Whether the thread has ended by a failure."""
        return self._failure is not None

    def require_open(self) -> None:
        """Raises ValueError where the stepper is closed, or has failed and says why; PyflyError in a fork."""
        self.process.require_current()
        if self._failure is not None:
            raise ValueError(f"this FlyBatch failed ({self._failure}); load the model again.") from self._failure
        if self._is_closing:
            raise ValueError(CLOSED)

    def _command(self, command: Callable[[], None]) -> None:
        self.process.require_current()
        with self._changed:
            self.require_open()
            self._commands.append(command)
            self._changed.notify()

    # ---- The thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._prepare():
                self._step()
        except BaseException as failure:
            self._failure = failure
            self._stop(failure)
        else:
            self._stop(ValueError(CLOSED))
        finally:
            self._on_end()

    def _prepare(self) -> bool:
        """Does what was asked for, and waits until a text wants a step; False at the end."""
        while True:
            with self._changed:
                if self._is_closing:
                    return False
                commands, self._commands = self._commands, deque()
            while commands:
                command = commands.popleft()
                try:
                    command()
                except BaseException:
                    with self._changed:
                        self._commands.extendleft(reversed(commands))
                    raise
            self._start_texts()
            chosen = [text.choose() for text in self._running.values()]
            if any(chosen):
                return True
            with self._changed:
                if not self._commands and not self._is_closing and not any(t.choose() for t in self._running.values()):
                    self._changed.wait(_LONGEST_WAIT)

    def _start_texts(self) -> None:
        while self._joining:
            text = self._joining[0]
            try:
                slot = self._batch.find_slot(text.history_to_begin)
                if slot is None:
                    return
                text.start(slot, self._n_vocab)
                self._running[slot.number] = text
            except Exception as failure:
                text.fail(failure)
            self._joining.popleft()

    def _step(self) -> None:
        progress = self._batch.step()
        begun = time.perf_counter()
        has_moved = False
        for one in progress:
            text = self._running[one.slot]
            if one.failure is not None:
                text.fail(one.failure)
                self._remove(text)
                has_moved = True
            else:
                has_moved = text.take(one) or has_moved
        self._python_seconds += time.perf_counter() - begun
        if not has_moved:
            with self._changed:
                self._changed.wait(_PAUSE)

    def _remove(self, text: Text) -> None:
        slot = text.slot
        if slot is None:
            with contextlib.suppress(ValueError):
                self._joining.remove(text)
            return
        text.slot = None
        del self._running[slot.number]
        self._ended = self._ended + slot.snapshot()
        with contextlib.suppress(Exception):  # the memory could not be cut: the slot's next text will be told
            slot.end()

    def _stop(self, failure: BaseException) -> None:
        """Everybody hears why there is no more."""
        with self._changed:
            self._is_closing = True
            commands, self._commands = self._commands, deque()
        for command in commands:
            with contextlib.suppress(Exception):
                command()
        for text in (*self._running.values(), *self._joining):
            text.interrupt(failure)
