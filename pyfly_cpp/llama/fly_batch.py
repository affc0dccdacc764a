"""`FlyBatch`: many requests at a time, on one model.

One thread steps them and makes their text (engine/stepper.py). The caller of a request holds a `Handle`
(engine/handle.py), which reads its queue of pieces and makes completions of them on demand. It stands here and not in
`engine/`, since a `llama_cpp.Llama` loads its model, and formats chats, as the base class does.
"""

from __future__ import annotations

import inspect
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, as_completed
from types import TracebackType
from typing import Any, TypeVar, Union

from pyfly_cpp.decoding import OF_REQUEST, Decoding
from pyfly_cpp.engine.feed import Feed
from pyfly_cpp.engine.handle import Handle
from pyfly_cpp.engine.loaded_model import LoadedModel
from pyfly_cpp.engine.request import Request
from pyfly_cpp.engine.request_limits import require_fitting, require_names
from pyfly_cpp.engine.stats import Stats
from pyfly_cpp.engine.stepper import Stepped, Stepper
from pyfly_cpp.llama.batch_llama import BatchLlama
from pyfly_cpp.llama.completions import Chat, Completion
from pyfly_cpp.llama.fly_llama import FlyLlama
from pyfly_cpp.llama.prompting import chat_handler
from pyfly_cpp.llama.strict_grammars import asking_a_format
from pyfly_cpp.ranges import require_integer, require_number

T = TypeVar("T")

Prompt = Union[str, Sequence[int], Sequence[dict[str, Any]]]
"""Text, token ids, or the messages of a chat."""


class FlyBatch:
    """Many requests at a time: one model, one evaluation per step for all, each request as a `FlyLlama` would serve it.

    Up to `n_parallel` requests run, the others wait in order. Every answer is the same as alone, up to the
    noise of the backend's kernels. A prefix shared by several requests, running or ended, is evaluated only once. Any
    thread may call any method, but not in a fork.

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
        longest_pause: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Loads a model.

        Args:
            model_path: Path of the GGUF file, or a name from `pyfly-cpp models list`.
            n_parallel: Requests that run at a time. Each takes memory for n_ctx tokens.
            n_ctx: Most tokens of one request, prompt and answer; rounded up to a multiple of 256. 0: the context the
                model was trained with.
            n_cells: Tokens of all requests together, >= n_ctx; None: n_ctx * n_parallel. Fewer save memory: if they do
                not suffice, the newest request waits until another one has ended, and is evaluated again then.
            n_chunk: Most tokens of new prompts in one step, >= 1, so that they do not hold up running requests; None:
                n_batch.
            longest_pause: Seconds by which new prompts may lengthen a step while other requests are running, or as much
                as it takes without them if that is more. Steps are timed, and prompts read in chunks as short as that
                requires, though not shorter than 8 tokens. None: no limit.
            **kwargs: Arguments of `FlyLlama`. Gate, window, draft_max, trace and on_prefill are the defaults of
                requests. Embeddings are not supported; logits_all is not needed and without
                effect. flash_attn is on if the backend has it, unless it is False.

        Raises:
            ValueError: an argument is unknown or out of range, the file is missing or no usable GGUF, or so many
                requests do not fit in memory.
            IncompatibleDraftError: the draft has another vocabulary.
        """
        if n_chunk is not None:
            require_integer("n_chunk", n_chunk, 1)
        us_chunk = 0
        if longest_pause is not None:
            us_chunk = max(int(require_number("longest_pause", longest_pause, 3600) * 1e6), 1)
        self._llama = llama = BatchLlama(model_path, n_parallel, n_ctx, n_cells, **kwargs)
        self._model = model = llama.loaded
        drafters = list(zip(model.decoder.drafters, model.draft_lengths(model.decoding)))
        model.decoder.batch.configure(drafters, adaptive=model.is_governed, n_chunk=n_chunk or 0, us_chunk=us_chunk)
        self._stepper = Stepper(
            model.decoder, model.n_ctx, llama.n_vocab(), model.is_governed, llama.close, lambda: model.access.is_reading
        )
        self._seeding = threading.Lock()
        self._finalizer = weakref.finalize(self, self._stepper.close)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and type(self) is FlyBatch:
            where = "to submit() or FlyBatch()" if name in (*OF_REQUEST, "trace") else "to FlyBatch()"
            raise ValueError(f"{name!r} cannot be set on a FlyBatch that is loaded; give it {where}.")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        name, gate = os.path.basename(self._model.path), self._model.decoding.gate
        drafters, closed = self._model.resolved.drafters, ", closed" if self._stepper.is_closed else ""
        drafts = ", ".join(map(str, drafters)) or "no drafter"
        return f"<FlyBatch {name}: {self.n_parallel} requests of {self.n_ctx} tokens, {drafts}, gate {gate}{closed}>"

    # ---- Requests ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        *,
        trace: bool | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        **request: Any,
    ) -> Handle:
        """Submits a request; returns immediately.

        Args:
            prompt: Text, token ids, or the messages of a chat.
            trace, on_prefill: As in `FlyLlama`, for this request; None: the batch's.
            **request: gate, window and draft_max, as in `FlyLlama`; None: the batch's. Whether drafting is governed
                is decided for the batch; if it is, draft_max is an upper limit.
                And arguments of `create_completion` or, for messages, of `create_chat_completion`; without a seed it is
                the next of a chain, as in a `FlyLlama`. Callbacks (on_prefill, logits processors, stopping criteria)
                are called in the thread that steps all requests.

        Raises:
            ValueError: an argument is out of range, or the batch is closed; PyflyError: this is a fork. Faults of
                the prompt are raised by its result.
            TypeError: the completion has no such argument.
        """
        is_chat, asked_for = _understood(prompt)
        how = {name: request.pop(name) for name in OF_REQUEST if name in request}
        decoding = self.decoding.but(**how)
        require_fitting(decoding.draft_max, self.model.n_batch)
        method = FlyLlama.create_chat_completion if is_chat else FlyLlama.create_completion
        require_names("submit", inspect.signature(method), request)
        inspect.signature(method).bind(None, asked_for, **request)
        feed = Feed()
        try:
            with self.model.access.reading():
                if not is_chat:
                    completion = Completion(self.llama, asked_for, **request)
                elif Chat.is_served(self.llama):
                    completion = Chat(self.llama, self.llama.chat_arguments(asked_for, **request))
                else:
                    return self._have_handled(asked_for, request, {**how, "trace": trace, "on_prefill": on_prefill})
            asked, seen = completion.request, on_prefill or self.llama.on_prefill

            def tell(event: str) -> None:
                if event == "prompt":
                    asked.tell_prefill(seen)

            stepped = self._begin(asked, completion.next_seed, decoding, trace, tell if seen else None, feed)
        except Exception as failure:  # of this request: `complete` may want it in place of a result
            self._stepper.require_open()
            feed.fail(failure)
            return Handle(feed, [], self._stepper, self)
        response = None if request.get("stream") else completion.response
        return Handle(feed, [stepped], self._stepper, self, completion.new_stream, response)

    def write(
        self,
        request: Request,
        *,
        seed: int | None = None,
        decoding: Decoding | None = None,
        trace: bool | None = None,
        on_event: Callable[[str], None] | None = None,
    ) -> Handle:
        """Submits a request of the engine, which yields pieces of text (`engine.output.Piece`); returns immediately.

        Args:
            request: Made by `llama.new_request`, with an output.
            seed: Seed of its sampling; None: the last one again.
            decoding: How it decodes, except for drafter and adaptive, which are the batch's; None: the batch's.
            trace: As in `submit`, which raises the same; the sampling may also be rejected.
            on_event: Called in the thread that steps, with the event: "begun", "prompt"
                (some of it was evaluated), "step", "ended".
        """
        decoding = decoding or self.decoding
        require_fitting(decoding.draft_max, self.model.n_batch)
        stepped = self._begin(request, lambda last: last if seed is None else seed, decoding, trace, on_event, Feed())
        return Handle(stepped.feed, [stepped], self._stepper, self)

    def _begin(
        self,
        request: Request,
        next_seed: Callable[[int], int],
        decoding: Decoding,
        trace: bool | None,
        on_event: Callable[[str], None] | None,
        feed: Feed,
    ) -> Stepped:
        llama, model = self.llama, self._model
        with self._seeding:
            seed = next_seed(llama._seed)
            llama.set_seed(seed)
        with model.access.reading():
            sampler = llama.new_sampler(request, seed)
        request.trace = llama.trace if trace is None else trace
        stepped = Stepped(request, decoding, model.draft_lengths(decoding), sampler, on_event, feed)
        self._stepper.add(stepped)
        return stepped

    def _have_handled(self, messages: list[Any], request: dict[str, Any], how: dict[str, Any]) -> Handle:
        """A chat whose format makes its own completions, in a thread of its own."""
        feed, steps = Feed(), list[Stepped]()
        llama = _ForHandler(self, feed, steps, how)
        arguments = self.llama.chat_arguments(messages, **request)
        stream = bool(request.get("stream"))

        def work() -> None:
            try:
                with asking_a_format():
                    response = chat_handler(self.llama)(llama=llama, **arguments)
                    for chunk in response if stream else (response,):
                        feed.put([chunk])
                feed.put([], is_last=True)
            except BaseException as failure:
                feed.fail(failure)

        threading.Thread(target=work, name="pyfly-chat", daemon=True).start()
        return Handle(feed, steps, self._stepper, self, None, None if stream else lambda items: items[0])

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
            prompts: As in `submit`.
            on_progress: Called in this thread with (finished, all) requests whenever one has finished.
            return_exceptions: Put a request's exception instead of its result. False: the first failure is raised, and
                the other requests are cancelled, as by Ctrl-C and by an exception of on_progress.
            **request: As in `submit`, for all of them.
        """
        if isinstance(prompts, (str, bytes, bytearray)):
            raise ValueError("prompts is a list of prompts; put the one prompt into a list, or use submit().")
        handles: list[Handle] = []
        try:
            handles.extend(self.submit(prompt, **request) for prompt in prompts)
            futures = [handle.feed.future for handle in handles]
            for n, future in enumerate(as_completed(futures), 1):
                if not return_exceptions:
                    future.result()
                if on_progress is not None:
                    on_progress(n, len(futures))
            return [handle.exception() or handle.result() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise

    # ---- Results and text --------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Counters of all requests since the object was made or `reset_stats()` was called."""
        return self._stepper.stats()

    def reset_stats(self) -> None:
        """Sets them to 0."""
        self._stepper.reset_stats()

    @property
    def llama(self) -> BatchLlama:
        """The `llama_cpp.Llama` that loaded the model: its tokens, chat formats and settings. Nothing can be generated
        with it. Raises as `model` does."""
        self._stepper.require_open()
        return self._llama

    @property
    def model(self) -> LoadedModel:
        """The model by public names. Raises ValueError if the batch is closed or has failed, PyflyError in a fork."""
        self._stepper.require_open()
        return self._model

    @property
    def has_failed(self) -> bool:
        """Whether it has failed and can serve no more requests."""
        return self._stepper.has_failed

    def between_steps(self, function: Callable[[], T], when_idle: bool = False) -> Future[T]:
        """Has a function called by the thread that steps, between two steps; with when_idle, as soon as no request runs
        or waits. Raises as `llama` does."""
        return self._stepper.submit(function, when_idle)

    @property
    def decoding(self) -> Decoding:
        """How requests decode by default."""
        return self.model.decoding

    @property
    def n_parallel(self) -> int:
        """Requests that run at a time."""
        return self._model.n_parallel

    @property
    def n_ctx(self) -> int:
        """Most tokens of one request."""
        return self._model.n_ctx

    @property
    def drafter_reason(self) -> str | None:
        """The reason for the choice of drafter, as in `FlyLlama`."""
        return self._model.resolved.reason

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """The tokens of a text, as `llama_cpp.Llama.tokenize` makes them."""
        tokens: list[int] = self.llama.tokenize(text, add_bos, special)
        return tokens

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """The text of tokens, as `llama_cpp.Llama.detokenize` makes it."""
        text: bytes = self.llama.detokenize(tokens, prev_tokens, special)
        return text

    # ---- The end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancels all requests and frees everything; a second call does nothing, nor does a call in a fork of the
        process. Waits for the running step and for threads that tokenize, unless it is called by a callback of a
        request, or by a signal handler of such a thread."""
        self._stepper.close()  # again where an earlier call could not wait
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
            f"a prompt is a string, a list of token ids or the list of messages of a chat, not {prompt!r}."
        ) from None


class _ForHandler:
    """Stands in for a Llama before a chat handler, in the thread of that."""

    def __init__(self, batch: FlyBatch, feed: Feed, steps: list[Stepped], how: dict[str, Any]) -> None:
        self._batch = batch
        self._feed = feed
        self._steps = steps
        self._how = how

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch.llama, name)

    def create_completion(self, prompt: Any, **arguments: Any) -> Any:
        """A completion as `Llama` makes it, by a request of the batch."""
        if self._feed.future.done():
            raise CancelledError("the request was cancelled.")
        handle = self._batch.submit(prompt, **arguments, **self._how)
        self._steps += handle.steps
        if self._feed.future.done():  # whoever cancelled it since found no step
            handle.cancel()
        return iter(handle) if arguments.get("stream") else handle.result()
