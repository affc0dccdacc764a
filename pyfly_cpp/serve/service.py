"""What runs behind the routes: requests get their turns, are answered, and are given up when nobody wants them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from starlette.requests import Request

from pyfly_cpp.engine.handle import Handle
from pyfly_cpp.engine.output import Piece
from pyfly_cpp.errors import ContextFullError, NotFiniteError
from pyfly_cpp.grammar.readers import Unavailable
from pyfly_cpp.serve.answer_requests import AnswerRequest
from pyfly_cpp.serve.answers import Answer
from pyfly_cpp.serve.api_errors import ApiError, bad_request, internal, stopping
from pyfly_cpp.serve.body import Received, read_json
from pyfly_cpp.serve.embeddings import Embedder
from pyfly_cpp.serve.grammars import Constraint, Grammars
from pyfly_cpp.serve.logs import Log
from pyfly_cpp.serve.metrics import Metrics
from pyfly_cpp.serve.reading import Reading
from pyfly_cpp.serve.requests import RequestBody
from pyfly_cpp.serve.served_model import Model
from pyfly_cpp.serve.settings import Settings
from pyfly_cpp.serve.streams import header_of, while_there
from pyfly_cpp.serve.timings import Progress
from pyfly_cpp.serve.turns import Ticket, Turns

T = TypeVar("T")
B = TypeVar("B", bound=RequestBody)

_Events = asyncio.Queue[tuple[int, Piece | Progress | BaseException | None]]  # of places and what has come

_SOON = 1.0
"""Seconds after which an answer that has not begun has a beat."""


class Service:
    """The state that the routes share. It belongs to one event loop."""

    def __init__(self, model: Model, settings: Settings, log: Log) -> None:
        self.model = model
        self.settings = settings
        self.log = log
        self.turns = Turns(model.batch.n_parallel, settings.limits.max_waiting)
        self.metrics = Metrics(model.stats, self.turns)
        self.grammars = Grammars(model.path, settings.limits.max_grammar, settings.limits.grammar_seconds)
        self.embedder = Embedder(model.batch, settings.pooling) if settings.embeddings else None
        self.embedding = Turns(1, settings.limits.max_waiting + settings.limits.max_inputs)
        """The turns of texts that want a vector: one at a time."""
        self.reading = Reading()
        self._running: set[Handle] = set()
        self.is_over = False
        """Whether what runs was given up."""

    def stop(self) -> None:
        """Nothing new begins; what runs has `grace` seconds to finish. In the event loop."""
        self.turns.close()
        self.embedding.close()
        asyncio.get_running_loop().call_later(self.settings.grace, self.give_up)

    @property
    def is_busy(self) -> bool:
        """Whether a request runs, or waits."""
        return any((turns.running or turns.waiting) for turns in (self.turns, self.embedding))

    def give_up(self) -> None:
        """Ends everything that runs, and tells its clients. In the event loop."""
        self.is_over = True
        self.reading.give_up()
        for handle in tuple(self._running):
            handle.cancel()

    def close(self) -> None:
        """Ends what the service has begun."""
        self.reading.close()
        self.grammars.close()

    def slots(self) -> set[int]:
        """Those that a request runs in."""
        steps = [step for handle in self._running for step in handle.steps[-1:]]
        return {slot.number for slot in (step.slot for step in steps) if slot is not None}

    async def body(self, request: Request, model: type[B]) -> Received[B]:
        """The body of a request. Raises ApiError and ClientLeft."""
        return await read_json(request, self.settings.limits, self.reading, model)

    async def understand(
        self, request: Request, given: Received[Any], function: Callable[..., T], *arguments: Any
    ) -> T:
        """The result of a function of a request; it is called in a thread. Raises what it raises, and ApiError: the
        server ends, ClientLeft."""
        work = self.reading.run(given.n_bytes, functools.partial(function, *arguments))
        return await while_there(request.receive, work)

    async def pieces(self, answer: Answer, whose: str) -> AsyncIterator[tuple[int, Piece | Progress | None]]:
        """The pieces of all requests of an answer, as they come, and before those of each how far its prompt is. Closed
        early, it gives the others up immediately. `whose`: the client, see `client_of`.

        From the time that its requests wait for their turn, there is a beat (None) every few seconds.

        Raises:
            ApiError: there is no room, the request cannot be served, or the server ends.
        """
        arrived = time.monotonic()
        requests = await self._with_grammars(answer, whose)
        with self.turns.admitted(len(requests)) as ticket:
            events: _Events = asyncio.Queue()
            tasks = [
                asyncio.ensure_future(self._write(i, request, ticket, events, arrived))
                for i, request in enumerate(requests)
            ]
            tasks.append(asyncio.ensure_future(self._beat(events)))
            try:
                n_left = len(requests)
                while n_left:
                    i, piece = await events.get()
                    if isinstance(piece, BaseException):
                        raise piece
                    n_left -= piece is not None and piece.finish is not None
                    yield i, piece
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def vectors(self, texts: Sequence[Sequence[int]]) -> AsyncIterator[npt.NDArray[np.single]]:
        """The vectors of texts, one after the other; requests take turns text by text. Raises as `pieces` does."""
        assert self.embedder is not None
        most = self.settings.limits.max_seconds
        with self.embedding.admitted(len(texts)) as ticket:
            for tokens in texts:
                async with ticket.turn(most):
                    vector = await self.embedder.embed(tokens, most)
                self.metrics.embedded_tokens.inc(len(tokens))
                yield vector

    async def _with_grammars(self, answer: Answer, whose: str) -> list[AnswerRequest]:
        """The requests with grammars that were tried; the answer's headers tell what those do not enforce."""
        known: dict[Constraint, Constraint] = {}
        for request in answer.requests:
            if request.grammar is not None and request.grammar not in known:
                try:
                    known[request.grammar] = await self.grammars.compile(request.grammar, whose)
                except Unavailable as failure:
                    self.log.warn(str(failure))
                    raise ApiError(
                        503,
                        "grammars and schemas cannot be read now; try again later, or tell whoever runs the server.",
                        code="no_grammars",
                        headers={"Retry-After": str(math.ceil(failure.seconds))},
                    ) from None
        loose = [f"{good.param}: {what}" for good in known.values() for what in good.loose]
        if loose:
            answer.headers["X-Pyfly-Not-Enforced"] = header_of(loose)
        return [
            request if request.grammar is None else replace(request, grammar=known[request.grammar])
            for request in answer.requests
        ]

    async def _beat(self, events: _Events) -> None:
        most = self.settings.limits.silent_seconds / 2
        await asyncio.sleep(min(_SOON, most))
        while True:
            events.put_nowait((0, None))
            await asyncio.sleep(most)

    async def _write(
        self, i: int, request: AnswerRequest, ticket: Ticket, events: _Events,
        arrived: float,
    ) -> None:  # fmt: skip
        most = self.settings.limits.max_seconds
        n_tokens = 0
        loop = asyncio.get_running_loop()

        def tell(n: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(events.put_nowait, (i, Progress(n, len(request.prompt))))

        try:
            async with ticket.turn(most):
                # A grammar takes its time to be read.
                handle = self.model.write(request, tell) if request.grammar is None else \
                    await asyncio.to_thread(self.model.write, request, tell)  # fmt: skip
                self._running.add(handle)
                timer = loop.call_later(most, handle.finish, "length")
                last = arrived
                self.metrics.prompt_tokens.inc(len(request.prompt))
                try:
                    async for piece in handle:
                        now = time.monotonic()
                        (self.metrics.between_tokens if n_tokens else self.metrics.first_token).observe(now - last)
                        last = now
                        self.metrics.completion_tokens.inc(piece.n_tokens - n_tokens)
                        n_tokens = piece.n_tokens
                        events.put_nowait((i, piece))
                finally:
                    timer.cancel()
                    self._running.discard(handle)
                    handle.cancel()
        except concurrent.futures.CancelledError:  # not asyncio's
            events.put_nowait((i, stopping()))
        except Exception as failure:
            events.put_nowait((i, self._told(failure, request)))

    def _told(self, failure: Exception, request: AnswerRequest) -> ApiError:
        """The message to the client about a failure."""
        if isinstance(failure, ApiError):
            return failure
        if self.model.has_failed:
            self.log.failure(failure)
            return internal()
        if isinstance(failure, ContextFullError):
            return bad_request(str(failure), code="context_length_exceeded")
        if self.turns.is_closed:
            return stopping()
        if isinstance(failure, NotFiniteError) and request.shapes_rows:
            return bad_request(
                "the grammar, logit_bias and penalties of the request together leave no token to choose."
            )
        if isinstance(failure, ValueError):
            return bad_request(str(failure)[:500])
        self.log.failure(failure)
        return internal()
