"""Whose turn it is: so many answers run, so many wait, and requests that wait take turns, however many they want."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator

from pyfly_cpp.serve.api_errors import ApiError, bad_request, stopping

_LONGEST_RETRY = 120  # seconds


class Turns:
    """The queue of requests for slots. Only one event loop may use it."""

    def __init__(self, n_slots: int, max_waiting: int) -> None:
        self._n_slots = n_slots
        self._max_waiting = max_waiting
        self._queues: OrderedDict[Ticket, deque[asyncio.Future[None]]] = OrderedDict()
        self._mean_seconds = 1.0
        self.is_closed = False
        """Whether nobody is admitted any more."""
        self.running = 0
        """Answers that have their turn."""
        self.waiting = 0
        """Answers that were admitted and have not."""

    @contextlib.contextmanager
    def admitted(self, n: int) -> Iterator[Ticket]:
        """A place for the n answers to a request. Raises ApiError: there is none."""
        room = self._n_slots + self._max_waiting
        if self.is_closed:
            raise stopping()
        if n > room:
            raise bad_request(f"the request needs {n} answers; this server takes {room} at most.")
        if self.running + self.waiting + n > room:
            raise ApiError(
                429,
                f"{self.waiting} answers are already waiting for their turn; try again later.",
                code="queue_full",
                headers={"Retry-After": str(self.retry_after())},
            )
        ticket = Ticket(self, n)
        self.waiting += n
        try:
            yield ticket
        finally:
            self.waiting -= ticket.n_left

    def retry_after(self) -> int:
        """Seconds until there may be room again."""
        return max(1, min(_LONGEST_RETRY, math.ceil(self._mean_seconds * (self.waiting + 1) / self._n_slots)))

    def close(self) -> None:
        """Nobody is admitted any more, and who waits is turned away."""
        self.is_closed = True
        for queue in self._queues.values():
            for future in queue:
                if not future.done():
                    future.set_exception(stopping())
        self._queues.clear()

    def _enqueue(self, ticket: Ticket, future: asyncio.Future[None]) -> None:
        if self.is_closed:
            raise stopping()
        self._queues.setdefault(ticket, deque()).append(future)
        self._hand_out()

    def _withdraw(self, ticket: Ticket, future: asyncio.Future[None]) -> None:
        future.cancel()
        queue = self._queues.get(ticket)
        if queue is not None:
            with contextlib.suppress(ValueError):
                queue.remove(future)
            if not queue:
                del self._queues[ticket]

    def _hand_out(self) -> None:
        while self.running < self._n_slots and self._queues:
            ticket, queue = self._queues.popitem(last=False)
            future = queue.popleft()
            if queue:
                self._queues[ticket] = queue  # behind the others
            if not future.done():
                self.running += 1
                self.waiting -= 1
                ticket.n_left -= 1
                future.set_result(None)

    def _release(self, seconds: float) -> None:
        self._mean_seconds += (seconds - self._mean_seconds) / 8
        self.running -= 1
        self._hand_out()


class Ticket:
    """The place of one request."""

    def __init__(self, turns: Turns, n: int) -> None:
        self._turns = turns
        self.n_left = n
        """Answers that have not had their turn."""

    @contextlib.asynccontextmanager
    async def turn(self, max_seconds: float) -> AsyncIterator[None]:
        """Around one of its answers: waits for its turn. Raises ApiError: it has waited so long."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns._enqueue(self, future)
        try:
            done, _ = await asyncio.wait({future}, timeout=max_seconds)
            if not done:
                raise ApiError(
                    429, "the turn of this request did not come in time; try again later.", code="queue_timeout",
                    headers={"Retry-After": str(self._turns.retry_after())},
                )  # fmt: skip
            future.result()
        except BaseException:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._turns._release(0.0)
            else:
                self._turns._withdraw(self, future)
            raise
        begun = time.monotonic()
        try:
            yield
        finally:
            self._turns._release(time.monotonic() - begun)
