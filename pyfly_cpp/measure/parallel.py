"""Several generations at a time, on a `FlyBatch`, as one `Generator` decodes them one after the other.

The seconds of what comes out are shares (shares.py), so that tokens over seconds is the throughput of the batch and not
the speed of a request; `arrivals` are seconds that passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Generator as PyGenerator
from dataclasses import replace
from itertools import islice
from queue import SimpleQueue

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.decoding.drafters import PromptLookup
from pyfly_cpp.decoding.resolve import Resolved
from pyfly_cpp.llama.fly_batch import FlyBatch
from pyfly_cpp.measure.generator import Asked, Generated, Generator, Prompt, generated, request_for
from pyfly_cpp.measure.shares import Shares


class ParallelGenerator(Generator):
    """Decodes prompts with changing settings on one loaded target, several at a time."""

    def __init__(self, batch: FlyBatch, drafters: Resolved = Resolved((PromptLookup(),))) -> None:  # noqa: B008 - frozen
        """`batch`: nobody else may use it; as for a `Generator` otherwise."""
        self._batch = batch
        super().__init__(batch.llama, drafters)

    @property
    def n_parallel(self) -> int:
        """Requests that run at a time, at most."""
        return self._batch.n_parallel

    @property
    def n_ctx(self) -> int:
        """The context of each request, in tokens."""
        return self._batch.n_ctx

    def close(self) -> None:
        """Ends what runs and frees the model."""
        self._batch.close()

    def require(self, settings: Sequence[Decoding]) -> None:
        """Checks the settings as `Generator` does. Waits until nothing runs."""
        self._when_idle(lambda: super(ParallelGenerator, self).require(settings))

    def configure(self, setting: Decoding) -> None:
        """Applies a setting to later requests. Waits until nothing runs."""

        def change() -> None:
            super(ParallelGenerator, self).configure(setting)
            self.llm.prepare()

        self._when_idle(change)

    def forget_all(self) -> None:
        """No request to come is served by what is evaluated of earlier ones. Waits until nothing runs."""
        self._when_idle(self.llm.loaded.decoder.forget)

    def _when_idle(self, function: Callable[[], None]) -> None:
        self._batch.between_steps(function, when_idle=True).result()

    def generate(
        self, prompt: Prompt, setting: Decoding, max_tokens: int, temperature: float = 0.0, seed: int | None = None
    ) -> Generated:
        """One generation, as `Generator` makes it."""
        ((_, made),) = self.generate_all([Asked(None, prompt, max_tokens, temperature, seed)], setting)
        return made

    def generate_all(
        self, asked: Iterable[Asked], setting: Decoding, n_at_once: int | None = None
    ) -> PyGenerator[tuple[Asked, Generated], None, None]:
        """Generates for everything asked and yields it as it is finished. Closed early, it cancels what runs.

        Args:
            n_at_once: Requests that are made and not finished, at most; no more than n_parallel of them run. None: all.
        """
        self.configure(setting)
        shares = Shares()
        finished: SimpleQueue[_Running] = SimpleQueue()
        waiting = iter(asked)
        running: set[_Running] = set()

        def begin(n: int | None) -> None:
            for one in islice(waiting, n):
                request = _Running(one, self._batch, shares)
                running.add(request)
                request.handle.feed.future.add_done_callback(lambda _, request=request: finished.put(request))  # type: ignore[misc]

        try:
            begin(n_at_once)
            while running:
                request = finished.get()
                running.remove(request)
                made = request.made()
                if n_at_once is not None:
                    begin(1)
                yield request.asked, made
        finally:
            for request in running:
                request.handle.cancel()


class _Running:
    """A request that was made, and the time that it took."""

    def __init__(self, asked: Asked, batch: FlyBatch, shares: Shares) -> None:
        self.asked = asked
        self._request = request_for(batch.llama, asked.prompt, asked.max_tokens, asked.temperature)
        self._shares = shares
        self._seen = self._n_seconds = 0.0
        self.handle = batch.write(self._request, seed=asked.seed, on_event=self._see)

    def _see(self, event: str) -> None:
        request, shares = self._request, self._shares
        if event == "begun":
            self._seen = shares.enter()
        elif event == "ended":
            shares.leave()
        elif event == "prompt" or len(request.arrivals) == 1:  # the first step has the end of the prompt
            now = request.slot.counters()["seconds_prefill"]
            self._seen, self._n_seconds = shares.prompt(self._seen, now - self._n_seconds), now

    def made(self) -> Generated:
        """The result, with its share of the seconds."""
        made, moments = generated(self._request, self.handle.result(), self.handle.stats), self._request.arrivals
        share = self._shares.share(moments[0], moments[-1])
        return replace(made, seconds_prompt=self._n_seconds, decode_seconds=share)
