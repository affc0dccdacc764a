"""`FlyBatch`: many requests at once, on one model.

One thread steps the batch (stepper.py); each request that runs has a thread of its own, where the completions of
`FlyLlama` read its text (views.py). handles.py has what the caller holds of a request, shared_llama.py what all share.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import as_completed
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Union

from pyfly_cpp.batch.handles import Handle, Job
from pyfly_cpp.batch.shared_llama import SharedLlama
from pyfly_cpp.batch.stepped_text import Text
from pyfly_cpp.batch.stepper import CLOSED, Stepper
from pyfly_cpp.batch.views import View
from pyfly_cpp.decoding import OF_REQUEST, Decoding
from pyfly_cpp.engine.arguments import require_fitting
from pyfly_cpp.engine.stats import Stats
from pyfly_cpp.llama.fly_llama import FlyLlama
from pyfly_cpp.ranges import require_integer

Prompt = Union[str, Sequence[int], Sequence[dict[str, Any]]]
"""Text, token ids, or the messages of a chat."""


class FlyBatch:
    """Many requests at once: one model, one evaluation per step for all, each request as a `FlyLlama` would serve it.

    Up to `n_parallel` requests run, the others wait for their turn in the order in which they came. Every text is what
    it would be alone, up to the noise of the backend's kernels. Texts that begin alike share what is evaluated of it,
    and a text that has ended serves later ones that begin like it. Any thread may call any method, but not in a fork.

        with FlyBatch("target.gguf", n_parallel=8, n_ctx=4096) as batch:
            answers = batch.complete(prompts, max_tokens=200)
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        n_parallel: int = 8,
        *,
        n_ctx: int = 512,
        n_cells: int | None = None,
        n_chunk: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Loads a model.

        Args:
            model_path: Path of the GGUF file, or a name of `pyfly-cpp models list`.
            n_parallel: Requests that run at once. Each takes memory for n_ctx tokens.
            n_ctx: Most tokens of one text, prompt and answer; rounded up to a multiple of 256. 0: what the model was
                trained on.
            n_cells: Tokens of all texts together, >= n_ctx; None: n_ctx * n_parallel. Fewer save memory: where they do
                not suffice, the youngest text waits until another one has ended and is evaluated again then.
            n_chunk: Most tokens of new prompts in one step, >= 1, so that they do not hold up the texts that run; None:
                n_batch.
            **kwargs: Arguments of `FlyLlama`. Gate, window, draft_max, trace and on_prefill are the defaults of
                requests. Embeddings are refused; logits_all is not needed and without effect.
                flash_attn is on where the backend has it, unless it is False.

        Raises:
            ValueError: an argument is unknown or out of range, the file is missing or no usable GGUF, or so many texts
                do not fit in memory.
            IncompatibleDraftError: the draft has another vocabulary.
        """
        if n_chunk is not None:
            require_integer("n_chunk", n_chunk, 1)
        host = SharedLlama(model_path, n_parallel, n_ctx, n_cells, **kwargs)
        self._crew = _Crew(host, n_chunk)
        self._finalizer = weakref.finalize(self, self._crew.close)

    # ---- Requests ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        *,
        trace: bool | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        **request: Any,
    ) -> Handle:
        """Hands in a request; returns at once.

        Args:
            prompt: Text, token ids, or the messages of a chat.
            trace, on_prefill: As of `FlyLlama`, for this request; None: as the batch's. on_prefill is called in the
                request's own thread.
            **request: gate, window and draft_max, as of `FlyLlama`; None: as the batch's. Whether drafting is governed
                is decided for the batch; if it is, draft_max is an upper limit.
                And arguments of `create_completion` or, for messages, of `create_chat_completion`; without a seed it is
                the next of a chain, as in a `FlyLlama`. Logits processors are called in the thread that steps all
                requests, possibly also for a few tokens after a stop string.

        Raises:
            ValueError: an argument is out of range, or the batch is closed; PyflyError: this is a fork.
            TypeError: the completion has no such argument.
        """
        said = {name: request.pop(name) for name in OF_REQUEST if name in request}
        is_chat, prompt = _understood(prompt)
        method = "create_chat_completion" if is_chat else "create_completion"
        inspect.signature(getattr(FlyLlama, method)).bind(None, prompt, **request)

        def complete(view: View) -> Any:
            return getattr(view, method)(prompt, **request)

        return self.call(
            complete, stream=bool(request.get("stream")), seed=request.get("seed"), decoding=self.decoding.but(**said),
            trace=trace, on_prefill=on_prefill,
        )  # fmt: skip

    def call(
        self,
        function: Callable[[View], Any],
        *,
        stream: bool = False,
        seed: int | None = None,
        decoding: Decoding | None = None,
        trace: bool | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Handle:
        """Hands in a function that generates as it likes; returns at once.

        Args:
            function: Is given a `FlyLlama` of its own, in the request's thread. Returns the result, or with `stream` an
                iterator of chunks.
            seed: Of the request's sampling; None: the next of the chain.
            decoding: Of this request, but for drafter and adaptive, which are the batch's; None: the batch's.
            trace, on_prefill: As of `submit`. Raises as it does.
        """
        decoding = decoding or self.decoding
        require_fitting(decoding.draft_max, self._crew.open_host().n_batch)
        crew, chained = self._crew, self._crew.next_seed(seed)  # the request must not keep the FlyBatch

        def start(on_text: Callable[[Text], None]) -> View:
            return crew.view(on_text, chained if seed is None else seed).configure(decoding, trace, on_prefill)

        job = Job(start, function, stream)
        crew.add(job)
        return Handle(job, self)

    def complete(
        self,
        prompts: Iterable[Prompt],
        *,
        on_progress: Callable[[int, int], None] | None = None,
        return_exceptions: bool = False,
        **request: Any,
    ) -> list[Any]:
        """Serves a list of requests; returns their results in the order of the prompts.

        Args:
            prompts: As of `submit`.
            on_progress: Called in this thread with (finished, all) requests whenever one has finished.
            return_exceptions: Put what a request raised in the place of its result. False: the first failure is raised,
                and the other requests are cancelled, as they are by Ctrl-C and by what on_progress raises.
            **request: As of `submit`, for all of them.
        """
        if isinstance(prompts, (str, bytes, bytearray)):
            raise ValueError("prompts is a list of prompts; put the one prompt into a list, or use submit().")
        handles: list[Handle] = []
        try:
            handles.extend(self.submit(prompt, **request) for prompt in prompts)
            futures = [handle._job.future for handle in handles]
            for n, future in enumerate(as_completed(futures), 1):
                if not return_exceptions:
                    future.result()
                if on_progress is not None:
                    on_progress(n, len(futures))
            return [future.exception() or future.result() for future in futures]
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise

    # ---- Results and text --------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Counters of all requests since the object was made or `reset_stats()` was called."""
        return self._crew.stats()

    def reset_stats(self) -> None:
        """Sets them to 0."""
        self._crew.stepper.call(self._crew.stepper.reset_counters)

    @property
    def decoding(self) -> Decoding:
        """How requests decode that say nothing of it."""
        return self._crew.open_host().decoding

    @property
    def n_parallel(self) -> int:
        """Requests that run at once."""
        return self._crew.host.n_parallel

    @property
    def n_ctx(self) -> int:
        """Most tokens of one text."""
        return self._crew.host.n_ctx_of_text

    @property
    def drafter_reason(self) -> str | None:
        """As of `FlyLlama`."""
        return self._crew.host.drafter_reason

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """As of `llama_cpp.Llama`."""
        tokens: list[int] = self._crew.open_host().tokenize(text, add_bos, special)
        return tokens

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """As of `llama_cpp.Llama`."""
        text: bytes = self._crew.open_host().detokenize(tokens, prev_tokens, special)
        return text

    # ---- The end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancels what runs or waits and frees everything; a second call does nothing, nor does a call in a fork of the
        process. Waits for the step that runs, unless it is called by a callback of a request."""
        self._crew.close()  # again where an earlier call could not wait
        self._finalizer.detach()

    def __enter__(self) -> FlyBatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _understood(prompt: Prompt) -> tuple[bool, Any]:
    """Whether these are the messages of a chat, and the prompt as a completion takes it. Raises ValueError."""
    if isinstance(prompt, str):
        return False, prompt
    try:
        if isinstance(prompt, (bytes, bytearray)):
            raise TypeError
        parts = list(prompt)
        if parts and all(isinstance(part, dict) for part in parts):
            return True, parts
        return False, [operator.index(part) for part in parts]  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(
            f"a prompt is a text, a list of token ids or the list of messages of a chat, not {prompt!r}."
        ) from None


class _Crew:
    """The threads of a FlyBatch and what they share. They do not keep the FlyBatch, so that it can be dropped."""

    def __init__(self, host: SharedLlama, n_chunk: int | None) -> None:
        self.host = host
        lengths = [k for _, k in host._drafting()]
        host._decoder.batch.configure(
            list(zip(host._decoder.drafters, lengths)), adaptive=host.adaptive, n_chunk=n_chunk or 0
        )
        self.stepper = Stepper(host._decoder.batch, host.n_vocab(), self._end)
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.RLock()
        self._jobs: set[Job] = set()  # that have not ended
        self._seed: int = host._seed
        self._last_stats = Stats()
        self._is_closed = False
        self._workers = [
            threading.Thread(target=self._work, name=f"pyfly-request-{i}", daemon=True) for i in range(host.n_parallel)
        ]
        for worker in self._workers:
            worker.start()

    def next_seed(self, given: int | None) -> int:
        """The seed that a FlyLlama would have when this request, the next of it, begins."""
        with self._lock:
            seed = self._seed
            self._seed = random.Random(seed).randint(0, 2**32) if given is None else given
            return seed

    def view(self, on_text: Callable[[Text], None], seed: int) -> View:
        """A FlyLlama for one request."""
        return View(self.host, self.stepper, on_text, seed)

    def add(self, job: Job) -> None:
        """Queues a request. Raises ValueError where the crew is closed or has failed, PyflyError in a fork."""
        with self._lock:
            self.open_host()
            self._jobs.add(job)
            self._queue.put(job)
        job.future.add_done_callback(lambda _: self._jobs.discard(job))

    def open_host(self) -> SharedLlama:
        """The model; raises ValueError where it is closed, or the stepping has failed, and PyflyError in a fork."""
        self.stepper.require_open()
        if self._is_closed:
            raise ValueError(CLOSED)
        return self.host

    def stats(self) -> Stats:
        """Of all requests, the last ones if it is closed."""
        try:
            return self.stepper.call(self._stats)
        except ValueError:  # closed
            self._join()
            return self._last_stats

    def _stats(self) -> Stats:
        decoder = self.host._decoder
        return decoder.with_state(decoder.describe(*self.stepper.counters()), self.host.adaptive)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job.run()
            del job  # and with it what the request held

    def close(self) -> None:
        """Ends everything; waits for it unless one of its own threads calls. Nothing runs in a fork."""
        if self.stepper.process.is_current:
            with self._lock:
                self._is_closed = True
            for job in list(self._jobs):  # no other is added now
                job.stop("the FlyBatch was closed.")
            self.stepper.close()
            self._join()

    def _join(self) -> None:
        if not self.stepper.is_current_thread and threading.current_thread() not in self._workers:
            self.stepper.join()

    def _end(self) -> None:
        """The last that the stepping thread does."""
        with self._lock:
            self._is_closed = True
        with contextlib.suppress(Exception):
            self._last_stats = self._stats()
        for _ in self._workers:
            self._queue.put(None)
        for worker in self._workers:
            worker.join()
        self.host.close()
