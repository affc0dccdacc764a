"""`FlyLlama`: a `llama_cpp.Llama` that generates speculatively.

It is a subclass: chat formats, tools, grammars, stop strings, streaming, caches, embeddings and `from_pretrained` are
the base class's own. What it replaces is `generate` (the native round loop of `csrc/engine.cpp`), what
log-probabilities need, and saving and loading of states.

At every `yield`, `n_tokens`, `input_ids` and the KV cache are what the base class promises: the first `n_tokens` tokens
are evaluated, the yielded token is the next one. What the engine holds beyond that is invisible, and is gone as soon as
somebody else uses the context.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import inspect
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama import LlamaState, LogitsProcessorList, StoppingCriteriaList

from pyfly_cpp import _native, extra_buffers
from pyfly_cpp.auto import choose_drafter
from pyfly_cpp.cache_types import require_cache_types
from pyfly_cpp.drafters import Drafter, Host, OwnDrafter, has_own_head, open_drafter, require_drafters
from pyfly_cpp.errors import BusyError, ContextFullError, NativeError
from pyfly_cpp.files import require_gguf
from pyfly_cpp.logprobs import LogprobCollector, RowStore, completion_logprobs
from pyfly_cpp.rules import Exact, Gate, require_gate, why_strict
from pyfly_cpp.stats import Record, Round, Stats
from pyfly_cpp.threads import AUTO, adaptive_threads, is_automatic, is_integer, physical_cores
from pyfly_cpp.windows import Window, require_window

_UNLIMITED = 2**31 - 1
_THREAD_COUNTS = ("n_threads", "n_threads_batch")
_MOST_SNAPSHOTS = 16

_BASE_PARAMETERS = {
    name
    for base in llama_cpp.Llama.__mro__[:-1]  # somebody's own subclass may take (*args, **kwargs)
    for name, parameter in inspect.signature(base.__init__).parameters.items()
    if parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
} - {"self", "model_path"}


class FlyLlama(llama_cpp.Llama):  # type: ignore[misc]
    """A drop-in `llama_cpp.Llama` with speculative decoding, exact or loose.

    Every argument and method of `llama_cpp.Llama` works as there. One default differs: `n_threads` and
    `n_threads_batch` are "auto": the physical cores, and fewer while other programs use some of them
    (docs/threads.md). A number is that many, always; with a number of `n_threads` alone, batches take all physical
    cores. The base class takes half of the logical cores for generation.

    An object serves one generation at a time; use one object per thread.
    """

    # Attributes of the (untyped) base class that are used here.
    input_ids: npt.NDArray[np.intc]
    n_tokens: int
    _logits_all: bool | int
    _model: Any
    _is_closed = False  # also where __init__ never began

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        drafter: Drafter | Sequence[Drafter] | str | None = None,
        gate: Gate | str = Exact(),  # noqa: B008 - frozen
        window: Window | None = None,
        draft_max: int | None = None,
        adaptive: bool = False,
        protected: Iterable[int] = (),
        trace: bool = False,
        on_load: Callable[[float], None] | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        **kwargs: Any,
    ) -> None:
        """Loads a model.

        Args:
            model_path: Path of the GGUF file.
            drafter: `DraftModel(...)`, `MTP(...)`, `Eagle3(...)`, `PromptLookup(...)`, a llama_cpp `LlamaDraftModel`,
                several of these (the cheapest first), or None for plain decoding. The base class's `draft_model=` does
                the same. "auto": the MTP head that the model carries, else `draft_model`, else prompt lookup;
                `drafter_reason` says why.
            gate: What may happen to a draft token that is not the target's choice; `Exact()` is lossless.
            window: What a deferred mismatch needs to stand; None: the gate's own (`gate.window`).
            draft_max: Most tokens in a round (K), 0..n_batch-1; None: what the drafter says. 0 decodes plainly.
            adaptive: Let the governor choose drafter and draft length for every round, none included, from what they
                cost and earn (docs/governor.md). False: the first drafter that proposes something, at full length;
                exactly reproducible.
            protected: Token ids that are never accepted loosely, besides the vocabulary's control tokens and the
                markers of its chat template.
            trace: Keep a `Record` of every token of the last generation in `self.records`.
            on_load: Called with the loaded fraction, 0..1, while the model is read.
            on_prefill: Called with (evaluated, all) prompt tokens after every batch of a prompt of several batches.
            **kwargs: Arguments of `llama_cpp.Llama`.

        Raises:
            ValueError: an argument is unknown or out of range, or the file is missing or no usable GGUF.
            IncompatibleDraftError: the draft has another vocabulary.
        """
        self._lock = threading.Lock()
        self._target: _native.LlamaTarget | None = None
        self._engine: _native.Engine | None = None
        self._native_drafters: list[_native.Drafter] = []
        self._drafter: Drafter | Sequence[Drafter] | None = None
        self._generation = 0  # counts generations; an older generator finds out that it was superseded
        self._handed_over = threading.local()
        self._rows = RowStore()
        self._python_seconds = 0.0
        self._accepted_earlier: dict[str, int] = {}
        self._warned_plain = False
        self._warned_strict: set[str] = set()
        self._on_load = on_load
        self._load_failure: BaseException | None = None
        self.on_prefill = on_prefill
        self.records: list[Record] = []
        self.log_rounds = False
        """Keep a `Round` of every round of the last generation in `self.rounds`."""
        self.rounds: list[Round] = []

        unknown = [name for name in kwargs if name not in _BASE_PARAMETERS]
        if unknown:
            near = difflib.get_close_matches(unknown[0], [*_BASE_PARAMETERS, *_OWN_PARAMETERS], n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"FlyLlama has no argument {unknown[0]!r}.{hint}")
        for name, least in (("n_ctx", 0), ("n_batch", 1), ("n_ubatch", 0)):
            _require_size(name, kwargs.get(name, least), least)
        require_cache_types(kwargs.get("type_k"), kwargs.get("type_v"), kwargs.get("flash_attn"))
        draft_model = kwargs.pop("draft_model", None)
        if draft_model is not None and drafter not in (None, "auto"):
            raise ValueError("give either drafter= or draft_model=, not both.")
        self._gate = require_gate(gate)
        self._window = require_window(window)
        self._draft_max = _require_draft_max(draft_max)
        self._protected = frozenset(protected)
        self.adaptive = adaptive
        self.trace = trace
        model_path = os.fspath(model_path)
        require_gguf(model_path)
        self.drafter_reason: str | None = None
        """Why this drafter, where something chose it; a sentence without its full stop."""
        if drafter == "auto":
            drafter, self.drafter_reason = choose_drafter(model_path, draft_model)
        elif drafter is None:
            drafter = draft_model
        drafters = require_drafters(drafter)
        # An MTP head is read with the model or never.
        self._load_mtp = has_own_head(drafter)
        _native.inspect_model(model_path, self._load_mtp)  # refuses what would end the process
        cores = physical_cores()
        self._n_snapshots = self._wanted_snapshots(drafters, kwargs)
        self._adapts = adaptive_threads(kwargs.get("n_threads"), kwargs.get("n_threads_batch"))
        for name in _THREAD_COUNTS:
            kwargs[name] = cores if is_automatic(kwargs.get(name)) else kwargs[name]
        try:
            with _native.load_guard():
                super().__init__(model_path, **kwargs)
        except ValueError as error:
            if self._load_failure is not None:
                raise self._load_failure from None
            if "Failed to create llama_context" in str(error):
                raise ValueError(
                    f"llama.cpp could not make a context for {model_path!r}: there is too little memory for it, or the "
                    "file is damaged; lower n_ctx or n_batch, or let verbose=True show why."
                ) from error
            if "Failed to load model" in str(error):
                raise ValueError(
                    f"llama.cpp could not load {model_path!r}: the file is truncated, damaged, or of an architecture "
                    f"that llama-cpp-python {llama_cpp.__version__} does not know; verbose=True shows why."
                ) from error
            raise
        has_texts = llama_cpp.llama_vocab_type(self._model.vocab) != llama_cpp.LLAMA_VOCAB_TYPE_NONE
        if not has_texts and kwargs.get("tokenizer") is None:
            self.tokenizer_ = _Missing("this model has no vocabulary: give generate() token ids, or pass tokenizer=.")
        # llama.cpp rounds the context up: what it holds counts, for the base class's arrays, too.
        self.input_ids = np.zeros(self._n_ctx, dtype=np.intc)
        if self._logits_all:
            self.scores = np.zeros((self._n_ctx, self._n_vocab), dtype=np.single)
        else:
            # The base class refuses logprobs where this `is False`; we serve them without a logits_all buffer.
            self._logits_all = 0
        self._stack.callback(self._close_native)
        self.drafter = drafter
        self._require_fitting(self._draft_max)
        self._warn_if_strict()

    @classmethod
    def from_preset(cls, path: str | os.PathLike[str], **overrides: Any) -> FlyLlama:
        """Loads a model as a preset file says (`pyfly-cpp tune` writes them; see presets.py).

        Args:
            path: The preset.
            **overrides: Arguments of `FlyLlama` that go before the preset's; `model_path` where it names no model.

        Raises:
            ValueError: the preset cannot be read, or neither names a model.
        """
        from pyfly_cpp.presets import load_preset

        arguments = {**load_preset(path).arguments(), **overrides}
        if arguments.get("model_path") is None:
            raise ValueError(f"the preset {os.fspath(path)} names no model; give model_path=.")
        return cls(**arguments)

    # ---- Settings that can change between requests -------------------------------------------------------------------

    @property
    def drafter(self) -> Drafter | Sequence[Drafter] | None:
        """What proposes tokens. Assigning loads a draft model at once; on an error the old drafter stays."""
        return self._drafter

    @drafter.setter
    def drafter(self, drafter: Drafter | Sequence[Drafter] | None) -> None:
        drafters = require_drafters(drafter)
        with self._exclusive():
            new: list[_native.Drafter] = []
            try:
                for one in drafters:
                    new.append(self._make_drafter(one))
            except BaseException:
                for native in new:
                    native.close()
                raise
            self._supersede()
            self._accepted_earlier = self._accepted_before(new)
            old, self._native_drafters = self._native_drafters, new
            self._drafter = drafter
            if self._engine is not None:
                self._engine.configure(self._gate, self.window)  # lets go of the old ones
            for native in old:
                native.close()

    @property
    def draft_model(self) -> Any:
        """The base class's name for a drafter that is a callable; assigning to it is assigning to `drafter`."""
        return None if isinstance(self._drafter, (OwnDrafter, list, tuple)) else self._drafter

    @draft_model.setter
    def draft_model(self, draft_model: Drafter | None) -> None:
        self.drafter = draft_model

    @property
    def gate(self) -> Gate:
        """What may happen to a draft token that is not the target's choice."""
        return self._gate

    @gate.setter
    def gate(self, gate: Gate | str) -> None:
        self._gate = require_gate(gate)

    @property
    def window(self) -> Window:
        """What a deferred mismatch needs to stand. Assigning None makes it the gate's own, whatever the gate is."""
        return self._window or self._gate.window

    @window.setter
    def window(self, window: Window | None) -> None:
        self._window = require_window(window)

    @property
    def draft_max(self) -> int:
        """Most tokens in a round (K). Assigning None hands the decision back to the drafter."""
        return max((self._draft_max_of(drafter) for drafter in require_drafters(self._drafter)), default=0)

    @draft_max.setter
    def draft_max(self, draft_max: int | None) -> None:
        draft_max = _require_draft_max(draft_max)
        self._require_fitting(draft_max)
        self._draft_max = draft_max

    def _draft_max_of(self, drafter: Drafter) -> int:
        k: int = getattr(drafter, "draft_max", 10) if self._draft_max is None else self._draft_max
        n_batch: int = self.n_batch
        return min(k, n_batch - 1)

    def _wanted_snapshots(self, drafters: Sequence[Drafter], kwargs: dict[str, Any]) -> int:
        """How many states behind the last token a recurrent model should keep; llama.cpp ignores it for others.

        A roll-back within a round is free with as many as drafts; each costs one state in memory. Deeper drafts, and a
        drafter that is set later, go through checkpoints."""
        if not drafters or kwargs.get("embedding"):
            return 0
        draft_max = self._draft_max
        if draft_max is None:
            draft_max = max(getattr(drafter, "draft_max", 10) for drafter in drafters)
        return min(draft_max, _MOST_SNAPSHOTS)

    def _require_fitting(self, draft_max: int | None) -> None:
        if draft_max is not None and draft_max > self.n_batch - 1:
            raise ValueError(
                f"draft_max is {draft_max}, but a batch of n_batch = {self.n_batch} tokens holds the last token and at "
                f"most {self.n_batch - 1} drafts; lower draft_max or raise n_batch."
            )

    # ---- Results -----------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Counters since the object was made or `reset_stats()` was called."""
        if self._engine is None:
            return Stats()
        counters = self._engine.counters()
        accepted_by = counters.pop("accepted_by")
        by_drafter = dict(self._accepted_earlier)
        for native, n in zip(self._native_drafters, accepted_by):
            by_drafter[native.name] = by_drafter.get(native.name, 0) + n
        return Stats(
            **counters,
            seconds_python=self._python_seconds,
            accepted_by_drafter=tuple(by_drafter.items()),
            governor=self._engine.governor() if self.adaptive and self._native_drafters else None,
            threads=self._target.threads() if self._target is not None else None,
        )

    def _accepted_before(self, drafters: list[_native.Drafter]) -> dict[str, int]:
        """What `stats` must add to the engine's counters, which go by place, when these drafters take the places."""
        if self._engine is None:
            return {}
        by_drafter = dict(self.stats.accepted_by_drafter)
        for native, n in zip(drafters, self._engine.counters()["accepted_by"]):
            by_drafter[native.name] = by_drafter.get(native.name, 0) - n
        return by_drafter

    def reset_stats(self) -> None:
        """Sets all counters to 0."""
        self._python_seconds = 0.0
        self._accepted_earlier = {}
        if self._engine is not None:
            self._engine.reset_counters()

    @property
    def can_speculate(self) -> bool:
        """Whether this model's memory can be rolled back; where it cannot, decoding is plain."""
        return self._open_target().can_rewind

    @property
    def protected(self) -> frozenset[int]:
        """Token ids that are never accepted loosely."""
        return self._open_target().protected

    # ---- Native objects ----------------------------------------------------------------------------------------------

    def _open_target(self) -> _native.LlamaTarget:
        if self._target is None:
            target = _native.LlamaTarget(self._ctx.ctx, *self._adapts)
            target.protect(self._protected)
            self._target = target
            self._engine = _native.Engine(target)
        return self._target

    def _make_drafter(self, drafter: Drafter) -> _native.Drafter:
        settings = {
            "n_gpu_layers": self.model_params.n_gpu_layers,
            "flash_attn": int(self.context_params.flash_attn_type == llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED),
            "offload_kqv": int(self.context_params.offload_kqv),
            "use_extra_bufts": int(self.model_params.use_extra_bufts),
        }
        return open_drafter(drafter, Host(self._open_target, self._draft_max_of(drafter), self._load_mtp, settings))

    def _close_native(self) -> None:
        for handle in (self._engine, *self._native_drafters, self._target):
            if handle is not None:
                handle.close()
        self._engine = self._target = None
        self._native_drafters = []

    def close(self) -> None:
        """Frees the model, the draft and everything else; a second call does nothing.

        Raises:
            BusyError: another thread uses this object, or this is a callback (a drafter, a logits processor) of its own
                generation.
        """
        if self._is_closed or not hasattr(self, "_stack"):
            return
        with self._exclusive():
            self._is_closed = True
            super().close()
            # The base class would hand the freed pointers to llama.cpp.
            self._model = self._ctx = self._batch = self.tokenizer_ = _Missing(_CLOSED)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "this FlyLlama is in use, by another thread or by the very generation that called this; use one "
                "FlyLlama per thread, or a lock."
            )
        try:
            if self._is_closed:
                raise ValueError(_CLOSED)
            yield
        finally:
            self._lock.release()

    # The base class assigns its parameters before it loads anything: the place to add our own.
    @property
    def model_params(self) -> Any:
        """llama_model_params of the base class."""
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        self._model_params = params
        params.load_mtp = self._load_mtp
        params.use_extra_bufts &= extra_buffers.usable()
        if self._on_load is not None:
            on_load = self._on_load

            def report(fraction: float, _: Any) -> bool:
                try:
                    on_load(fraction)
                except BaseException as failure:  # it cannot pass through C: loading stops, and it is raised again
                    self._load_failure = failure
                return self._load_failure is None

            self._progress_callback = llama_cpp.llama_progress_callback(report)  # C keeps no reference
            params.progress_callback = self._progress_callback

    @property
    def context_params(self) -> Any:
        """llama_context_params of the base class, which goes on to change its sizes until it makes the context."""
        params = self._context_params
        # llama.cpp ends the process unless a batch holds more than the last token and the snapshots.
        n_ubatch = min((n for n in (params.n_ctx, params.n_batch, params.n_ubatch) if n > 0), default=0)
        params.n_rs_seq = max(0, min(self._n_snapshots, n_ubatch - 2))
        return params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        self._context_params = params

    # ---- Generation --------------------------------------------------------------------------------------------------

    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        grammar: Any = None,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Generates tokens after a prompt, speculatively. Arguments and protocol are those of the base class.

        Yields:
            Token ids, without end; end-of-text tokens included. Tokens sent into the generator are appended to the
            sequence after the yielded one.

        Raises:
            ContextFullError: the prompt, or the next token, does not fit in the context.
            BusyError: another thread or another generation uses this object.
        """
        handed_over, self._request = self._request, None
        request = handed_over or _Request()
        processors = _Processors(self, logits_processor) if logits_processor else None
        keep_rows = request.wants_rows or stopping_criteria is not None or bool(self._logits_all)
        generation = -1
        try:
            with self._exclusive():
                history = self._prepare_history(list(tokens), reset, request)
                self._supersede()
                generation = self._generation
                target = self._open_target()
                engine = self._engine
                assert engine is not None
                sampler = self._init_sampler(
                    top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p, temp=temp,
                    repeat_penalty=repeat_penalty, frequency_penalty=frequency_penalty,
                    presence_penalty=presence_penalty, tfs_z=tfs_z, mirostat_mode=mirostat_mode,
                    mirostat_tau=mirostat_tau, mirostat_eta=mirostat_eta, penalize_nl=penalize_nl,
                    logits_processor=processors and LogitsProcessorList([processors]), grammar=grammar,
                )  # fmt: skip
                self._warn_if_strict()
                limits = [self._draft_max_of(drafter) for drafter in require_drafters(self._drafter)]
                engine.configure(
                    self._gate,
                    self.window,
                    list(zip(self._native_drafters, limits)),
                    adaptive=self.adaptive,
                    trace=self.trace,
                    keep_rows=keep_rows,
                    resumable=handed_over is None,  # completions send nothing
                )
                n_evaluated = self._reusable_prefix(history)
                with _interrupts_deferred():
                    engine.begin(history, n_evaluated, sampler)
                    self._hold(history, engine.n_evaluated)
                self._rows.clear()
                self.records = []
                self.rounds = []
                self._requires_eval = True
                if self.verbose and self.n_tokens:
                    n_left = len(history) - self.n_tokens
                    print(f"FlyLlama: {self.n_tokens} prompt tokens reused, {n_left} to evaluate", file=sys.stderr)
            while True:
                self._prefill(engine, generation, history, request)
                self._warn_if_plain(target)
                sent = yield from self._rounds(engine, generation, request, processors, stopping_criteria, keep_rows)
                if sent is None:
                    return
                with self._step(generation), _interrupts_deferred():
                    engine.resume(self.n_tokens + 1, sent)
                    history = engine.history().tolist()
                    self._hold(history, engine.n_evaluated)
        finally:
            self._finish(generation)

    def _hold(self, history: list[int], n_evaluated: int) -> None:
        """Records what the engine has begun with."""
        self.input_ids[: len(history)] = history
        self.n_tokens = n_evaluated  # of a recurrent state it may be less than could be reused

    def _prepare_history(self, tokens: list[int], reset: bool, request: _Request) -> list[int]:
        history = tokens if reset else [*self._input_ids.tolist(), *tokens]
        if not history:
            raise ValueError("the prompt is empty; give at least one token.")
        if len(history) > self._n_ctx:
            raise ContextFullError(
                f"the prompt has {len(history)} tokens and the context holds {self._n_ctx}; shorten the prompt or "
                "raise n_ctx."
            )
        if request.prompt_logprobs is not None:
            self.n_tokens = 0  # the prompt's rows are wanted: nothing of it may come from the cache
        return history

    def _reusable_prefix(self, history: list[int]) -> int:
        """How many tokens of `history` the KV cache holds already; always leaves the last one to evaluate."""
        n: int = self.longest_token_prefix(self._input_ids.tolist(), history)
        return min(n, len(history) - 1)

    def _warn_if_plain(self, target: _native.LlamaTarget) -> None:
        """Says once that a drafter is of no use."""
        if self._native_drafters and not self._warned_plain and not target.can_rewind:
            self._warned_plain = True
            warnings.warn(
                "this model's memory cannot be rolled back, so it is decoded without speculation.", stacklevel=3
            )

    def _warn_if_strict(self) -> None:
        """Says, once for each, that gate, window and draft length together can accept nothing loosely."""
        why = why_strict(self._gate, self.window, self.draft_max)
        if why is not None and why not in self._warned_strict:
            self._warned_strict.add(why)
            warnings.warn(why, stacklevel=3)

    def _prefill(self, engine: _native.Engine, generation: int, history: list[int], request: _Request) -> None:
        """Evaluates the prompt, short of what the first round takes along; one native call for each batch, so that an
        interrupt is heard between them."""
        all_rows = request.prompt_logprobs is not None or bool(self._logits_all)
        position, n_left = self.n_tokens, 1
        n_evaluated = position
        while n_left:
            with self._step(generation):
                n_left = engine.prefill(all_rows)
                if all_rows:
                    position = self._collect_prompt_rows(engine, history, position, request)
                self.n_tokens = engine.n_evaluated
            if self.on_prefill is not None and self.n_tokens > n_evaluated:
                self.on_prefill(self.n_tokens - n_evaluated, len(history) - n_evaluated)

    def _collect_prompt_rows(self, engine: _native.Engine, history: list[int], position: int, request: _Request) -> int:
        while (row := engine.prompt_row(position, self._n_vocab)) is not None:
            if self._logits_all:
                self.scores[position] = row
            if request.prompt_logprobs is not None:
                request.prompt_logprobs.add(row, history[position + 1])
            position += 1
        return position

    def _rounds(
        self,
        engine: _native.Engine,
        generation: int,
        request: _Request,
        processors: _Processors | None,
        stopping_criteria: StoppingCriteriaList | None,
        keep_rows: bool,
    ) -> Generator[int, Sequence[int] | None, list[int] | None]:
        """Runs rounds and yields what they commit, until the caller sends tokens (returned) or wants no more (None)."""
        n_room = request.max_tokens
        before = engine.accepted() if self.log_rounds else (0, 0, 0)
        while True:
            with self._step(generation):
                begun = time.perf_counter()
                if processors is None:
                    n_committed = engine.round(max(n_room, 1))
                else:
                    with processors.heard():
                        n_committed = engine.round(max(n_room, 1))
                started = time.perf_counter()
                committed = engine.tokens()
                records = [engine.record(i) for i in range(n_committed)] if self.trace else []
                rows = [engine.record_row(i, self._n_vocab) for i in range(n_committed)] if keep_rows else []
                if self.log_rounds:
                    now = engine.accepted()
                    drafted, matched, loose = (b - a for a, b in zip(before, now))
                    self.rounds.append(Round(n_committed, drafted, matched, loose, started - begun))
                    before = now
                self._python_seconds += time.perf_counter() - started
            n_room -= n_committed
            for i, (position, token) in enumerate(committed):
                row = rows[i] if rows else None
                with self._step(generation):
                    self.input_ids[position : position + 1] = token
                    self.n_tokens = position
                    if row is not None:
                        self._keep_row(position - 1, row, token, request)
                if stopping_criteria is not None and stopping_criteria(self.input_ids[:position], row):
                    return None
                if records:
                    self.records.append(records[i])
                sent = yield token
                self._require_current(generation)
                if self.n_tokens != position:
                    raise BusyError(
                        "this FlyLlama's state was changed (reset, eval, load_state, ...) while a generation was "
                        "running; exhaust or close the generation first."
                    )
                if sent is not None and len(sent):
                    return list(sent)

    def _keep_row(self, position: int, row: npt.NDArray[np.float32], token: int, request: _Request) -> None:
        if self._logits_all:
            self.scores[position] = row
        if request.logprobs is not None:
            request.logprobs.add(row, token)
        if request.keep_all_rows:
            self._rows.add(position, row)
        else:
            self._rows.replace(position, row)

    # ---- Completions -------------------------------------------------------------------------------------------------

    def _create_completion(
        self,
        prompt: str | list[int],
        suffix: str | None = None,
        max_tokens: float | None = 16,
        *,
        logprobs: int | None = None,
        echo: bool = False,
        stream: bool = False,
        logits_processor: LogitsProcessorList | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """The base class's completion; this adds the limit that drafting should respect, and log-probabilities."""
        request = _Request(_room(max_tokens))
        if logits_processor is not None:
            # A copy that can be extended: the base class appends its logit-bias processor to the caller's own list.
            logits_processor = _ExtendableProcessors(logits_processor)
        collects = logprobs is not None and not stream
        if collects:
            assert logprobs is not None
            request.logprobs = LogprobCollector(logprobs)
            request.prompt_logprobs = LogprobCollector(logprobs) if echo else None
        elif logprobs is not None:
            request.keep_all_rows = True
        self._request = request
        try:
            for response in super()._create_completion(
                prompt, suffix, max_tokens,
                logprobs=None if collects else logprobs, echo=echo, stream=stream, logits_processor=logits_processor,
                **kwargs,
            ):  # fmt: skip
                if collects:
                    response["choices"][0]["logprobs"] = self._response_logprobs(request, prompt, echo, response)
                yield response
        finally:
            self._request = None

    def _response_logprobs(
        self, request: _Request, prompt: str | list[int], echo: bool, response: Any
    ) -> dict[str, Any]:
        collector = request.logprobs
        assert collector is not None
        n_completion = response["usage"]["completion_tokens"]
        n_prompt = response["usage"]["prompt_tokens"]
        tokens = collector.tokens[:n_completion]
        entries: list[Any] = list(collector.entries[:n_completion])
        if request.prompt_logprobs is not None:
            tokens = [*self.input_ids[:n_prompt].tolist(), *tokens]
            entries = [None, *request.prompt_logprobs.entries[: n_prompt - 1], *entries]
        bos = self.token_bos()
        if echo and tokens and tokens[0] == bos:
            tokens, entries = tokens[1:], [None, *entries[2:]]
        return completion_logprobs(self.detokenize, tokens, entries, 0 if echo else len(prompt), bos)

    @property
    def _request(self) -> _Request | None:
        """What the generation that this thread starts next is for."""
        request: _Request | None = getattr(self._handed_over, "request", None)
        return request

    @_request.setter
    def _request(self, request: _Request | None) -> None:
        self._handed_over.request = request

    @property
    def _scores(self) -> Any:
        return super()._scores if self._logits_all else self._rows

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluates tokens behind the sequence, as in the base class. Ends a running generation."""
        with self._exclusive():
            self._supersede()
            super().eval(tokens)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """Embeddings, as in the base class. Ends a running generation."""
        with self._exclusive():
            self._supersede()
            self.n_tokens = 0  # the base class clears the memory
            return super().embed(*args, **kwargs)

    # ---- States ------------------------------------------------------------------------------------------------------

    def save_state(self) -> LlamaState:
        """The state of the sequence, as in the base class. Logits are not part of it (unless logits_all)."""
        with self._exclusive():
            if self._engine is not None:
                self._engine.park(self.n_tokens)  # during a generation: what it holds beyond is not part of the state
            if self._logits_all:
                return super().save_state()
            context = self._ctx.ctx
            buffer = (ctypes.c_uint8 * llama_cpp.llama_state_get_size(context))()
            n = llama_cpp.llama_state_get_data(context, buffer, len(buffer))
            return LlamaState(
                scores=np.zeros((1, self._n_vocab), dtype=np.single),  # one row fits a plain Llama's array by broadcast
                input_ids=self.input_ids.copy(),
                n_tokens=self.n_tokens,
                llama_state=bytes(memoryview(buffer)[:n]),
                llama_state_size=n,
                seed=self._seed,
            )

    def load_state(self, state: LlamaState) -> None:
        """Restores a state of this model, also one that a plain `llama_cpp.Llama` saved. Ends a running generation.

        Raises:
            ValueError: it does not fit in the context; nothing was changed.
            NativeError: llama.cpp refuses it; the sequence is reset.
        """
        with self._exclusive():
            n, n_bytes = state.n_tokens, len(state.llama_state)
            if not 0 <= n <= min(self._n_ctx, len(state.input_ids)):
                raise ValueError(f"the saved state holds {n} tokens and the context {self._n_ctx}; raise n_ctx.")
            scores = np.broadcast_to(state.scores, (n, self._n_vocab)) if self._logits_all else None
            data = (ctypes.c_uint8 * n_bytes).from_buffer_copy(state.llama_state)
            self._supersede()
            with _interrupts_deferred():
                if llama_cpp.llama_state_set_data(self._ctx.ctx, data, n_bytes) != n_bytes:
                    self.reset()
                    self._ctx.kv_cache_clear()
                    raise NativeError(
                        "llama.cpp refused the saved state: it is of another model or of other context settings; "
                        "the sequence was reset."
                    )
                self.input_ids[:n] = state.input_ids[:n]
                self.n_tokens = n
                self._requires_eval = True
                self._seed = state.seed
                if scores is not None:
                    self.scores[:n] = scores

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            **{name: AUTO for name, adapts in zip(_THREAD_COUNTS, self._adapts) if adapts},
            "logits_all": bool(self._logits_all),
            "drafter": None if self.draft_model is not None else self._drafter,
            "adaptive": self.adaptive,
            "gate": self._gate,
            "window": self._window,
            "draft_max": self._draft_max,
            "protected": self._protected,
            "trace": self.trace,
        }

    # ---- Who may use the object --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _step(self, generation: int) -> Iterator[None]:
        """Around native work of a generation: this thread alone, and nobody has started another one since."""
        with self._exclusive():
            self._require_current(generation)
            yield

    def _require_current(self, generation: int) -> None:
        if self._is_closed:
            raise ValueError(_CLOSED)
        if self._generation != generation:
            raise BusyError(
                "another generation was started on this FlyLlama before this one ended; use one FlyLlama for each, or "
                "exhaust or close the first."
            )

    def _supersede(self) -> None:
        """Ends the generation that runs, if one does; its generator will find out."""
        self._generation += 1
        engine = self._engine
        if engine is not None and engine.has_sequence:
            # What lies behind n_tokens (drafts that nobody asked for) goes; n_tokens is what the caller has seen.
            try:
                engine.end(self.n_tokens)
            finally:
                self.n_tokens = min(self.n_tokens, engine.n_evaluated)  # fewer after a failure of the backend

    def _finish(self, generation: int) -> None:
        """Ends a generation whose generator is done. Where the object is in use just now (by another thread, or by
        the call during which the garbage collector closed the generator), whoever uses it next ends the generation."""
        if self._lock.acquire(blocking=False):
            try:
                if self._generation == generation and not self._is_closed:
                    self._supersede()
            finally:
                self._lock.release()


_CLOSED = "this FlyLlama is closed; load the model again."


class _Missing:
    """Stands where the base class has something of llama.cpp's: whoever asks it for anything hears why that is gone."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise ValueError(self._why)


class _Request:
    """What a completion asks of the generation it starts."""

    def __init__(self, max_tokens: int = _UNLIMITED) -> None:
        self.max_tokens = max_tokens
        self.logprobs: LogprobCollector | None = None
        self.prompt_logprobs: LogprobCollector | None = None
        self.keep_all_rows = False

    @property
    def wants_rows(self) -> bool:
        return self.keep_all_rows or self.logprobs is not None


class _ExtendableProcessors(LogitsProcessorList):  # type: ignore[misc]
    """A list of logits processors whose `extend` returns it, as the base class's completion expects."""

    def extend(self, processors: Iterable[Any]) -> _ExtendableProcessors:
        super().extend(processors)
        return self


class _Processors:
    """The caller's logits processors, shown the tokens before the very row they work on.

    The base class shows them its evaluated tokens, which during a round is not the history of the row. What a processor
    raises cannot pass through C; it is kept and raised when the round is over.
    """

    def __init__(self, llama: FlyLlama, processors: LogitsProcessorList) -> None:
        self._llama = llama
        self._processors = processors
        self._failure: BaseException | None = None

    def __call__(self, _: npt.NDArray[np.intc], scores: npt.NDArray[np.single]) -> npt.NDArray[np.single]:
        if self._failure is not None:
            return scores
        engine = self._llama._engine
        assert engine is not None
        try:
            shaped = np.asarray(self._processors(engine.history(), np.array(scores)), dtype=np.single)
            if shaped.shape != scores.shape:
                raise ValueError(
                    f"the logits processors returned an array of shape {list(shaped.shape)}, not {list(scores.shape)}; "
                    "each must return the scores."
                )
            return shaped
        except BaseException as failure:
            self._failure = failure
            return scores

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Around a round: raises what a processor raised during it."""
        with _interrupts_deferred():
            yield
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Ctrl-C waits for the end of the block: what it raises in a ctypes callback would be printed and forgotten."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pending: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: pending.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pending:
            handler(*pending[-1])


def _room(max_tokens: float | None) -> int:
    """The most tokens of a completion, for any number that the base class takes; its 0, None and infinity: no limit."""
    if max_tokens is None or not 0 < max_tokens < _UNLIMITED:
        return _UNLIMITED
    return math.ceil(max_tokens)


def _require_size(name: str, n: Any, least: int) -> None:
    if not is_integer(n) or not least <= n < 2**31:
        raise ValueError(f"{name} must be an integer in {least}..{2**31 - 1}, not {n!r}.")


def _require_draft_max(draft_max: object) -> int | None:
    if draft_max is not None and (isinstance(draft_max, bool) or not isinstance(draft_max, int) or draft_max < 0):
        raise ValueError(f"draft_max must be an integer >= 0 or None, not {draft_max!r}.")
    return draft_max


_OWN_PARAMETERS = [name for name in inspect.signature(FlyLlama.__init__).parameters if name not in ("self", "kwargs")]
