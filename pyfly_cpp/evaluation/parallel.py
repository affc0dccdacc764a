"""Several generations at once, on a `FlyBatch`, as one `Generator` decodes them one after the other.

The seconds of what comes out are shares (shares.py), so that tokens over seconds is the throughput of the batch and not
the speed of a text; `arrivals` are seconds that passed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Generator as PyGenerator
from dataclasses import dataclass, replace
from itertools import islice
from queue import SimpleQueue
from typing import Any, TypeVar

import llama_cpp

from pyfly_cpp.batch.fly_batch import FlyBatch
from pyfly_cpp.batch.handles import Job
from pyfly_cpp.batch.stepped_text import Text
from pyfly_cpp.batch.views import View
from pyfly_cpp.decoding import PLAIN, Decoding
from pyfly_cpp.decoding.drafting import Drafters
from pyfly_cpp.evaluation.generation import Generated, Generator, Prompt, decode
from pyfly_cpp.evaluation.shares import Shares
from pyfly_cpp.llama.fly_llama import FlyLlama
from pyfly_cpp.machine import memory
from pyfly_cpp.machine.files import require_gguf

T = TypeVar("T")

_MOST = 8
"""Texts that are chosen at most where nobody says how many: more gain little on most processors."""

_SHARE = 0.25
"""Of the free memory, that their caches may take then."""


def choose_parallel(model: str, n_ctx: int) -> int:
    """How many texts of n_ctx tokens to run at once: as many as fit in a quarter of the free memory, 1..8.
    Raises ValueError where the model is no usable GGUF file."""
    require_gguf(model)
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    context = llama_cpp.llama_context_default_params()
    context.kv_unified = True
    one, two = (memory.simulated_context(model, params, context, n, n * n_ctx) for n in (1, 2))
    free = memory.available()
    if one is None or two is None or free is None:
        return 1
    return max(1, min(_MOST, int(_SHARE * free) // max(1, two - one)))


@dataclass(frozen=True)
class Order:
    """What is to be generated, for whom."""

    key: Any
    prompt: Prompt
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None


class ParallelGenerator(Generator):
    """Decodes prompts with changing settings on one loaded target, several at once."""

    def __init__(self, batch: FlyBatch, drafters: Drafters = Drafters()) -> None:  # noqa: B008 - frozen
        """`batch`: nobody else may use it; as for a `Generator` otherwise."""
        self._batch = batch
        self._crew = batch._crew
        super().__init__(self._crew.host, drafters)

    @property
    def n_parallel(self) -> int:
        """Texts that run at once, at most."""
        return self._batch.n_parallel

    @property
    def n_ctx(self) -> int:
        """As of `Generator`."""
        return self._batch.n_ctx

    def close(self) -> None:
        """Ends what runs and frees the model."""
        self._batch.close()

    def call(self, function: Callable[[FlyLlama], T]) -> T:
        """As of `Generator`: in a thread of the batch."""
        job = self._begin(function)
        try:
            result: T = job.future.result()
        finally:
            job.stop("nobody waits for it.")
        return result

    def require(self, settings: Sequence[Decoding]) -> None:
        """As of `Generator`. Waits until nothing runs."""
        self._when_idle(lambda: super(ParallelGenerator, self).require(settings))

    def configure(self, setting: Decoding) -> None:
        """As of `Generator`, for what is begun from now on. Waits until nothing runs."""

        def change() -> None:
            super(ParallelGenerator, self).configure(setting)
            self.llm._configure(self.llm._drafting(), self.llm.adaptive)

        self._when_idle(change)

    def forget_all(self) -> None:
        """No text to come is served by what is evaluated of earlier ones. Waits until nothing runs."""

        def forget() -> None:
            for slot in self.llm._decoder.batch.slots:
                slot.begin([0], PLAIN.gate.nodes(), PLAIN.gate.window.config(), n_evaluated=0)
                slot.end(0)

        self._when_idle(forget)

    def generate(
        self, prompt: Prompt, setting: Decoding, max_tokens: int, temperature: float = 0.0, seed: int | None = None
    ) -> Generated:
        """As of `Generator`."""
        ((_, generated),) = self.generate_all([Order(None, prompt, max_tokens, temperature, seed)], setting)
        return generated

    def generate_all(
        self, orders: Iterable[Order], setting: Decoding, n_at_once: int | None = None
    ) -> PyGenerator[tuple[Order, Generated], None, None]:
        """Generates for all orders and yields them as they finish. Closed early, it cancels what runs.

        Args:
            n_at_once: Orders that are taken and not finished, at most; no more than n_parallel of them run. None: all.
        """
        self.configure(setting)
        shares = Shares()
        finished: SimpleQueue[Job] = SimpleQueue()
        waiting = iter(orders)
        taken: dict[Job, Order] = {}

        def begin(n: int | None) -> None:
            for order in islice(waiting, n):
                job = self._begin(lambda view, order=order: work(view, order), order.seed)  # type: ignore[misc]
                taken[job] = order
                job.future.add_done_callback(lambda _, job=job: finished.put(job))  # type: ignore[misc]

        def work(view: FlyLlama, order: Order) -> Generated:
            seen = begun = shares.enter()
            n_seconds = 0.0

            def see_prompt(*_: int) -> None:
                nonlocal seen, n_seconds
                now = view.stats.seconds_prefill
                seen, n_seconds = shares.prompt(seen, now - n_seconds), now

            view.on_prefill = see_prompt
            try:
                made = decode(view, order.prompt, order.max_tokens, order.temperature, see_prompt)
            finally:
                shares.leave()
            first, last = (begun + made.arrivals[i] if made.arrivals else begun for i in (0, -1))
            return replace(made, seconds_prompt=n_seconds, decode_seconds=shares.share(first, last))

        try:
            begin(n_at_once)
            while taken:
                job = finished.get()
                order, generated = taken.pop(job), job.future.result()
                if n_at_once is not None:
                    begin(1)
                yield order, generated
        finally:
            for job in taken:
                job.stop("nobody wants it any more.")

    def _begin(self, function: Callable[[FlyLlama], Any], seed: int | None = None) -> Job:
        def start(on_text: Callable[[Text], None]) -> View:
            return self._crew.view(on_text, self.llm._seed if seed is None else seed)

        job = Job(start, function, False)
        self._crew.add(job)
        return job

    def _when_idle(self, function: Callable[[], None]) -> None:
        """Calls it in the thread that steps, when the threads of all requests are done with what they had."""
        if self._crew.stepper.is_current_thread:
            function()
            return
        meeting = threading.Barrier(self.n_parallel)
        try:
            jobs = [self._begin(lambda _: meeting.wait()) for _ in range(self.n_parallel)]
            for job in jobs:
                job.future.result()
        except BaseException:
            meeting.abort()
            raise
        self._crew.stepper.call(function)
