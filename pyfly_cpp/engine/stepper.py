"""The thread that steps a batch, and alone touches it.

The way of a token: `pyfly_batch_step` evaluates a step of each request; `Request` makes pieces of text of what each has
committed, and puts them on its `Feed`, where whoever waits takes them off.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pyfly_cpp._native import Counters, Slot, SlotProgress
from pyfly_cpp.decoding import Decoding
from pyfly_cpp.engine.decoder import Decoder
from pyfly_cpp.engine.feed import Feed
from pyfly_cpp.engine.output import Piece
from pyfly_cpp.engine.request import Request
from pyfly_cpp.engine.stats import Stats
from pyfly_cpp.machine.processes import Process
from pyfly_cpp.machine.threads import DEEP_STACK, stacks_of

CLOSED = "this FlyBatch is closed; load the model again."

_LONGEST_WAIT = 1.0  # seconds; a finalizer that runs in this very thread cannot wake it

T = TypeVar("T")


@dataclass(eq=False)
class Stepped:
    """A request on its way through the stepper."""

    request: Request
    """Has an output."""
    decoding: Decoding
    draft_max: Sequence[int]
    """Most tokens of a step, for each of the batch's drafters."""
    sampler: Any
    on_event: Callable[[str], None] | None = None
    """Called in the stepping thread with what has just happened: `"begun"`, `"prompt"` (some of it was evaluated),
    `"step"`, `"ended"`."""
    feed: Feed = field(default_factory=Feed)
    """Gets the pieces."""
    slot: Slot | None = None
    """Where it runs; None before and afterwards."""
    stats: Stats = field(default_factory=Stats)
    """The counters, when it has ended."""

    def tell(self, event: str) -> None:
        """Calls on_event."""
        if self.on_event is not None:
            self.on_event(event)


class Stepper:
    """Steps the requests of a batch in a thread of its own, which alone touches the batch."""

    def __init__(
        self,
        decoder: Decoder,
        n_ctx: int,
        n_vocab: int,
        adaptive: bool,
        on_end: Callable[[], None],
        is_needed: Callable[[], bool],
    ) -> None:
        """
        Args:
            decoder: Its batch is configured. Nobody else may use it, or what it borrows, before `on_end`.
            n_ctx: Most tokens of a request.
            n_vocab: Columns of a row.
            adaptive: Whether the governor chooses.
            on_end: The last that the thread does, after `close`.
            is_needed: Whether the calling thread keeps `on_end` waiting.
        """
        self._decoder = decoder
        self._batch = decoder.batch
        self._n_ctx = n_ctx
        self._n_vocab = n_vocab
        self._adaptive = adaptive
        self._on_end = on_end
        self._is_needed = is_needed
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._when_idle: deque[Callable[[], None]] = deque()
        self._joining: deque[Stepped] = deque()
        self._running: dict[int, Stepped] = {}
        self._ended = Counters()
        self._last_stats = Stats()
        self._is_closing = False
        self._failure: BaseException | None = None  # that ended the thread
        self.process = Process("FlyBatch")
        """Where the thread is. In a fork nothing here can be used, not even the locks: the thread may hold them."""
        self._thread = threading.Thread(target=self._run, name="pyfly-stepper", daemon=True)
        with stacks_of(DEEP_STACK):
            self._thread.start()

    # ---- From any thread ---------------------------------------------------------------------------------------------

    def add(self, stepped: Stepped) -> None:
        """A request wants a slot; requests get theirs in this order. Raises ValueError if the stepper has ended."""
        self._command(lambda: self._joining.append(stepped))

    def cancel(self, stepped: Stepped, failure: BaseException) -> None:
        """A request ends with a failure, if it has not ended."""
        with contextlib.suppress(ValueError):  # closed: nothing is left of it
            self._command(lambda: self._fail(stepped, failure))

    def finish(self, stepped: Stepped, cause: str) -> None:
        """An answer ends where it stands, if it has not ended; see `Output.end`."""
        with contextlib.suppress(ValueError):
            self._command(lambda: self._end(stepped, cause))

    def call(self, function: Callable[[], T]) -> T:
        """Calls a function in the stepping thread, between two steps. Raises ValueError if the stepper has ended."""
        return self.submit(function).result()

    def submit(self, function: Callable[[], T], when_idle: bool = False) -> Future[T]:
        """The same without waiting; with when_idle, as soon as no request runs or waits. Functions are called in this
        order; one whose future was cancelled by then is not."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as failure:
                future.set_exception(failure)

        if self.is_current_thread:
            command()
        else:
            self._command((lambda: self._when_idle.append(command)) if when_idle else command)
        return future

    def close(self) -> None:
        """No step follows the one that runs; what runs or waits is cancelled. Waits for that, unless a callback of a
        request calls, or a signal handler of a thread that `on_end` waits for. Nothing runs in a fork."""
        if self.process.is_current:
            with self._changed:
                self._is_closing = True
                self._changed.notify()
            if not self.is_current_thread and not self._is_needed():
                self._thread.join()

    @property
    def is_current_thread(self) -> bool:
        """Whether this is the stepping thread."""
        return threading.current_thread() is self._thread

    def stats(self) -> Stats:
        """The counters of all requests, also when it is closed."""
        try:
            return self.call(self._stats)
        except ValueError:  # closed
            if not self.is_current_thread:
                self._thread.join()
            return self._last_stats

    def stats_of(self, stepped: Stepped) -> Stats:
        """The counters of this request, so far; waits for the step that runs."""
        with contextlib.suppress(ValueError):  # closed
            if stepped.slot is not None:
                return self.call(
                    lambda: stepped.stats if stepped.slot is None else self._described(stepped.slot.snapshot())
                )
        return stepped.stats

    def reset_stats(self) -> None:
        """Sets the sum to 0, not what the running requests have counted."""

        def reset() -> None:
            self._ended = self._ended - self._counted()
            self._decoder.python_seconds = 0.0

        self.call(reset)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closing

    @property
    def has_failed(self) -> bool:
        """Whether the thread has ended by a failure."""
        return self._failure is not None

    def require_open(self) -> None:
        """Raises ValueError if the stepper is closed, or has failed, with the reason; PyflyError in a fork."""
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
            self._stop(CancelledError("the FlyBatch was closed."))
        finally:
            self._on_end()

    def _prepare(self) -> bool:
        """Does what was asked for, and waits until a request runs; False at the end."""
        while True:
            with self._changed:
                if self._is_closing:
                    return False
                command = self._commands.popleft() if self._commands else None
            if command is not None:
                command()
                continue
            self._start_requests()
            if self._running:
                return True
            if self._when_idle:
                self._when_idle.popleft()()
                continue
            with self._changed:
                if not self._commands and not self._is_closing:
                    self._changed.wait(_LONGEST_WAIT)

    def _start_requests(self) -> None:
        while self._joining:
            stepped = self._joining[0]
            request = stepped.request
            if self._decoder.has_new_adapters:
                if self._running:
                    return  # what they hold serves nobody, and is not all computed in one way
                self._decoder.take_adapters()
            try:
                request.require_fitting(self._n_ctx)
                slot = self._batch.find_slot(request.history, request.owner)
                if slot is None:
                    return
                slot.reset_counters()
                request.begin(slot, stepped.decoding, stepped.sampler, draft_max=stepped.draft_max)
            except Exception as failure:
                self._fail(stepped, failure)
            else:
                self._joining.popleft()
                stepped.slot, self._running[slot.number] = slot, stepped
                try:
                    stepped.tell("begun")
                except BaseException as failure:
                    self._fail(stepped, failure)

    def _step(self) -> None:
        begun = time.perf_counter()
        progress = self._batch.step()
        ended = time.perf_counter()
        for one in progress:
            stepped = self._running[one.slot]
            try:
                self._read(stepped, one, ended - begun)
            except BaseException as failure:  # also what a callback of the request raised
                self._fail(stepped, failure)
        self._decoder.python_seconds += time.perf_counter() - ended

    def _read(self, stepped: Stepped, progress: SlotProgress, seconds: float) -> None:
        """Puts what an iteration did for a request on its feed."""
        request = stepped.request
        if progress.failure is not None:
            self._put(stepped, [request.last_piece(progress.failure)])
        elif not progress.is_step:
            request.read_prompt(self._n_vocab)
            stepped.tell("prompt")
        else:
            pieces = []
            for committed in request.read_step(self._n_vocab, seconds):
                piece = request.add(committed)
                if piece.text or piece.finish:
                    pieces.append(piece)
                if piece.finish:
                    break
            stepped.tell("step")
            if pieces:
                self._put(stepped, pieces)

    def _put(self, stepped: Stepped, pieces: list[Piece]) -> None:
        is_last = pieces[-1].finish is not None
        if is_last:
            self._remove(stepped)
            pieces[-1] = pieces[-1]._replace(stats=stepped.stats)
        stepped.feed.put(pieces, is_last)

    def _end(self, stepped: Stepped, cause: str) -> None:
        if not stepped.feed.future.done():
            try:
                self._put(stepped, [stepped.request.end(cause)])
            except BaseException as failure:  # of its on_event
                self._fail(stepped, failure)

    def _fail(self, stepped: Stepped, failure: BaseException) -> None:
        with contextlib.suppress(BaseException):  # of its on_event: the first failure is told
            self._remove(stepped)
        stepped.feed.fail(failure)

    def _remove(self, stepped: Stepped) -> None:
        """The request has its slot no more; what that holds of the committed tokens serves later ones."""
        slot = stepped.slot
        if slot is None:
            with contextlib.suppress(ValueError):
                self._joining.remove(stepped)
            return
        del self._running[slot.number]
        counters = slot.snapshot()
        self._ended = self._ended + counters
        stepped.slot, stepped.stats = None, self._described(counters)
        with contextlib.suppress(Exception):  # the memory could not be cut: the slot's next request will be told
            slot.end()
        stepped.tell("ended")

    def _described(self, counters: Counters) -> Stats:
        return self._decoder.describe(counters, 0.0)

    def _counted(self) -> Counters:
        total = self._ended
        for stepped in self._running.values():
            total = total + stepped.request.slot.snapshot()
        return total

    def _stats(self) -> Stats:
        stats = self._decoder.describe(self._counted(), self._decoder.python_seconds)
        return self._decoder.with_state(stats, self._adaptive)

    def _stop(self, failure: BaseException) -> None:
        """Everybody hears why there is no more."""
        with self._changed:
            self._is_closing = True
            commands, self._commands = self._commands, deque()
        for queue in (commands, self._when_idle):  # what is in the first may append to the second
            while queue:
                with contextlib.suppress(Exception):
                    queue.popleft()()
        for stepped in (*self._running.values(), *self._joining):
            with contextlib.suppress(Exception):
                self._fail(stepped, failure)
        with contextlib.suppress(Exception):
            self._last_stats = self._stats()
