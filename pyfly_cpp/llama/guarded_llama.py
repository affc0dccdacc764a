"""`GuardedLlama`: a `llama_cpp.Llama` that loads, is used and closes in ways that cannot end the process."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import _logger
from llama_cpp.llama import LlamaState
from llama_cpp.llama_tokenizer import LlamaTokenizer
from typing_extensions import Unpack

from pyfly_cpp import _native
from pyfly_cpp.decoding.drafters import Drafter
from pyfly_cpp.engine.access import CLOSED, Access
from pyfly_cpp.engine.adapters import Applied, applied
from pyfly_cpp.engine.arguments import BASE_DEFAULTS, require_attribute, require_names
from pyfly_cpp.engine.costs import expect_costs, setup_of
from pyfly_cpp.engine.decoder import Decoder
from pyfly_cpp.engine.kv_key import difference, kv_key, may_rotate
from pyfly_cpp.engine.loaded_model import LoadedModel
from pyfly_cpp.engine.vocabulary import Vocabulary
from pyfly_cpp.errors import ContextFullError
from pyfly_cpp.llama import states
from pyfly_cpp.llama.arguments import ChatArguments, described_by
from pyfly_cpp.llama.load_limits import require_adapter, why_not_loaded, within_positions
from pyfly_cpp.llama.prompting import as_texts, chat_handler, markers_of, only_formats
from pyfly_cpp.llama.response_format import with_grammar
from pyfly_cpp.machine import exactness, extra_buffers, kernels
from pyfly_cpp.machine.files import files_of_model, fingerprint
from pyfly_cpp.machine.memory import in_words
from pyfly_cpp.machine.placement import Placement
from pyfly_cpp.machine.processes import Process
from pyfly_cpp.machine.threads import AUTO, THREAD_COUNTS, fill_thread_counts
from pyfly_cpp.models.special_tokens import LEAST, SpecialTokens
from pyfly_cpp.models.tokenizing import tokenized

_MOST_SNAPSHOTS = 16

# llama-cpp-python takes warnings for errors, which it prints with verbose=False, too.
_logger.GGML_LOG_LEVEL_TO_LOGGING_LEVEL[3] = logging.WARNING
_CHAT = inspect.signature(llama_cpp.Llama.create_chat_completion)
_SAMPLE = inspect.signature(llama_cpp.Llama.sample)


class GuardedLlama(llama_cpp.Llama):  # type: ignore[misc]
    """The base class's model and context, with the native decoder.

    Whatever changes the sequence from outside a generation (eval, embed, load_state, a new drafter) ends the one that
    runs; two threads at the same time are refused.
    """

    has_row = False
    """Whether the context's last row of logits is that of the last token."""

    # Attributes of the (untyped) base class that are used here.
    input_ids: npt.NDArray[np.intc]
    scores: npt.NDArray[np.single]
    n_tokens: int
    _n_ctx: int
    _context_params: Any = None
    n_batch: int
    model_path: str
    verbose: bool
    _logits_all: bool
    _model: Any
    kv_overrides: dict[str, bool | int | float | str] | None
    tensor_split: list[float] | None
    lora_path: str | None
    lora_scale: float
    metadata: dict[str, str]
    tokenizer_: Any
    vocabulary: Any
    spm_infill: bool
    cache: Any

    n_parallel = 1  # texts at once
    _close_waits = False
    """Whether `close` waits for threads that tokenize."""
    _n_ctx_of_text = 0
    """Most tokens of one text, for subclasses whose context holds several; 0: as many as the context holds."""

    def __init__(
        self,
        model_path: str,
        *,
        has_own_head: bool,
        n_snapshots: int,
        rpc_servers: Sequence[str],
        devices: Sequence[str] | None,
        protected: Iterable[int],
        kernel_choice: str | None,
        on_load: Callable[[float], None] | None,
        **kwargs: Any,
    ) -> None:
        """Loads a model.

        Args:
            model_path: Path of the GGUF file.
            has_own_head: Also load the MTP head of the file.
            n_snapshots: How many states behind the last token a recurrent model should keep, if it can: a roll-back
                within a step is free with as many as drafts, and each costs one state in memory. Deeper drafts, and a
                drafter that is set later, go through checkpoints. llama.cpp ignores it for other models.
            rpc_servers, devices: Where to put the model, see `Placement`; if they are set, all layers unless
                n_gpu_layers is set.
            protected: Token ids that are never accepted loosely, besides those the vocabulary names.
            kernel_choice: "auto" or "stock", see `pyfly_cpp.kernels`; None: by the environment.
            on_load: Called with the loaded fraction, 0..1.
            **kwargs: Arguments of `llama_cpp.Llama`; `n_threads` and `n_threads_batch` may be "auto".

        Raises:
            ValueError: the file or a thread count cannot be used, or what on_load raised.
            RpcError: an RPC server is not there, or of another version.
        """
        self._access = Access()
        self._special_tokens: dict[bool, SpecialTokens] = {}
        self._has_own_head = has_own_head
        self._n_snapshots = min(n_snapshots, _MOST_SNAPSHOTS)
        self._on_load = on_load
        self._load_failure: BaseException | None = None
        info = _native.inspect_model(model_path, has_own_head)  # refuses what would end the process
        self._tap = _native.LayerTap() if info.layer_inputs == 2 else None
        self._n_ctx_short, self._may_rotate = info.n_ctx_short, may_rotate()
        n_positions = info.n_positions
        if n_positions:
            given = self._n_ctx_of_text or int(kwargs.get("n_ctx", BASE_DEFAULTS["n_ctx"]))
            self._n_ctx_of_text = within_positions(given, n_positions, model_path)
        self._adapts = fill_thread_counts(kwargs)
        if kwargs.get("lora_path") is not None:
            kwargs["lora_path"] = os.fspath(kwargs["lora_path"])
        self._kernel_choice = kernel_choice
        self._where = {"rpc_servers": rpc_servers, "devices": devices}
        self._placement = Placement(rpc_servers, devices)
        self._placement.require_fitting(kwargs.get("tensor_split"), kwargs.get("split_mode"))
        if self._placement.addresses:
            kwargs.setdefault("n_gpu_layers", -1)
        self._kernels = kernels.take(kernel_choice, model_path, kwargs)
        if kwargs.get("flash_attn") is None:
            kwargs["flash_attn"] = self._kernels.attends(info) and kernels.is_for_attention(kwargs)
        try:
            with _native.load_guard(), _native.kernels_taken(_locked(self._kernels.bits, kwargs), _warn_of_unlocked):
                super().__init__(model_path, **kwargs)
        except ValueError as error:
            self.close()  # the traceback may keep this object for long
            if self._load_failure is not None:
                raise self._load_failure from None
            why = why_not_loaded(error, model_path, self._context_params, self._placement.has_servers)
            if why is not None:
                raise ValueError(why) from error
            raise
        if max(self.n_threads, self.n_threads_batch) > 1 or llama_cpp.llama_supports_gpu_offload():
            self._access.process = Process(self._public_name)
        has_texts = llama_cpp.llama_vocab_type(self._model.vocab) != llama_cpp.LLAMA_VOCAB_TYPE_NONE
        self.vocabulary = Vocabulary(self._model.vocab, self._access.reading)
        if not has_texts and kwargs.get("tokenizer") is None:
            self.tokenizer_ = _Missing("this model has no vocabulary: give generate() token ids, or pass tokenizer=.")
        if n_positions:
            self._n_ctx = min(self._n_ctx, self._n_ctx_of_text)
        # llama.cpp rounds the context up: what it holds counts, for the base class's arrays, too.
        self.input_ids = np.zeros(self._n_ctx, dtype=np.intc)
        if self._logits_all:
            self.scores = np.zeros((self._n_ctx, self._n_vocab), dtype=np.single)
        self.decoder = Decoder(
            self._ctx.ctx,
            protected=protected,
            markers=markers_of(self) if has_texts else (),
            adapts=self._adapts,
            has_own_head=has_own_head,
            n_texts=self.n_parallel,
            n_ctx=self._n_ctx_of_text,
            settings={
                "n_gpu_layers": self.model_params.n_gpu_layers,
                "flash_attn": int(self.context_params.flash_attn_type),
                "offload_kqv": int(self.context_params.offload_kqv),
                "use_extra_bufts": int(self.model_params.use_extra_bufts),
                "kernel_types": self._kernels.bits,
            },
            tap=self._tap,
        )
        self._stack.callback(self.decoder.close)
        self.loaded = LoadedModel(
            path=model_path,
            metadata=self.metadata,
            native=self.model,
            model_params=self.model_params,
            context_params=self.context_params,
            vocabulary=self.vocabulary,
            lora=self._lora_adapter,
            lora_scale=self.lora_scale,
            lora_path=self.lora_path,
            on_close=self._stack.callback,
        )
        self._is_loaded = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__:
            require_attribute(type(self), name, self.__dict__.get("_is_loaded", False))
        super().__setattr__(name, value)

    # ---- Parameters: the base class assigns them before it loads anything, so this is the place to add our own -------

    @property
    def model_params(self) -> Any:
        """llama_model_params of the base class."""
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        self._model_params = params
        params.load_mtp = self._has_own_head
        self._placement.place(params)
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
        """llama_context_params of the base class, which changes its sizes until it makes the context."""
        params = self._context_params
        # llama.cpp ends the process unless a batch holds more than the last token and the snapshots.
        n_ubatch = min((n for n in (params.n_ctx, params.n_batch, params.n_ubatch) if n > 0), default=0)
        params.n_rs_seq = max(0, min(self._n_snapshots, n_ubatch - 2))
        if self._tap is not None:
            params.cb_eval = llama_cpp.ggml_backend_sched_eval_callback(self._tap.callback)
            params.cb_eval_user_data = self._tap.user
        return params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        self._context_params = params

    @property
    def _lora_adapter(self) -> Any:
        """The LoRA adapter of the base class, which takes a null pointer for one."""
        return self._adapter

    @_lora_adapter.setter
    def _lora_adapter(self, adapter: Any) -> None:
        if adapter is not None:
            require_adapter(adapter, self.lora_path, self.model_path)
        self._adapter = adapter

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            **{name: AUTO for name, adapts in zip(THREAD_COUNTS, self._adapts) if adapts},
            **self._where,
            "kernels": self._kernel_choice,
        }

    @property
    def can_speculate(self) -> bool:
        """Whether this model's memory can be rolled back; if it cannot, decoding is plain."""
        return self.decoder.target.can_rewind

    @property
    def inexact(self) -> tuple[str, ...]:
        """Why a token may have other bits in a batch than alone, so that drafts may change an answer even with the gate
        `exact`; empty: they cannot. It is true of this model with its cache, kernels and adapter.

        Raises:
            NativeError: this release of llama.cpp does not show what it computes.
            BusyError: another thread uses this object.
        """
        with self._access.exclusive():
            return exactness.reasons(self._ctx.ctx)

    @property
    def n_ctx_of_text(self) -> int:
        """Most tokens of one request, prompt and answer."""
        return min(self._n_ctx, self._n_ctx_of_text or self._n_ctx)

    @property
    def protected(self) -> frozenset[int]:
        """Token ids that are never accepted loosely."""
        return self.decoder.target.protected

    @property
    def protected_texts(self) -> tuple[str, ...]:
        """Markers that ordinary tokens write (`pyfly_cpp.engine.markers`): if a drafted token or the target's choice
        begins or continues one, nothing is accepted loosely."""
        return self.decoder.markers

    def _configure(self, drafters: Sequence[tuple[Drafter, int]], adaptive: bool) -> None:
        """Sets what the next text drafts with: the drafters that are open, each with its draft_max. The governor gets
        to know what that costs, measured when the context holds nothing that would be lost."""
        decoder = self.decoder
        decoder.batch.configure([(native, k) for native, (_, k) in zip(decoder.drafters, drafters)], adaptive=adaptive)
        if adaptive and drafters and not decoder.knows_costs:
            where = self._placement.describe()
            changes = (self.kv_overrides, self.tensor_split, self.lora_path, self.lora_scale, self._kernels, *where)
            setup = setup_of(self.model_path, drafters, self.model_params, self.context_params, changes)
            decoder.knows_costs = expect_costs(
                decoder.batch, setup, may_measure=self.n_tokens == 0, verbose=self.verbose
            )

    # ---- The end of a generation, and of the object ------------------------------------------------------------------

    def _supersede(self) -> None:
        """Ends the generation that runs, if one does; its generator will find out."""
        self._access.generation += 1
        slot = self.decoder.running
        if slot is not None:
            # What lies behind n_tokens (drafts that nobody asked for) goes; n_tokens is what the caller has seen.
            try:
                slot.end(self.n_tokens)
            finally:
                self.n_tokens = min(self.n_tokens, slot.n_evaluated)  # fewer after a failure of the backend

    def close(self) -> None:
        """Frees the model, the draft and everything else; a second call does nothing, nor does a call in a fork that
        cannot use the object.

        Raises:
            BusyError: another thread uses this object, also to tokenize, or this is a callback (a drafter, a logits
                processor) of its own generation.
        """
        if not hasattr(self, "_stack"):  # nothing was loaded
            return
        if self._access.is_closed or self._access.is_elsewhere:
            return
        with self._access.exclusive():
            self._access.close(self._close_waits)
            super().close()
            # The base class would hand the freed pointers to llama.cpp.
            self._model = self._ctx = self._batch = self.tokenizer_ = _Missing(CLOSED)
            self.vocabulary = self._model

    # ---- Completions -------------------------------------------------------------------------------------------------

    @described_by(llama_cpp.Llama.create_chat_completion)
    def create_chat_completion(self, messages: Sequence[Any], *more: Any, **arguments: Unpack[ChatArguments]) -> Any:
        return super().create_chat_completion(**self.chat_arguments(messages, *more, **arguments))

    def chat_arguments(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """All arguments of `create_chat_completion`, with defaults, and schemas as grammars. Raises as it does."""
        require_names("create_chat_completion", _CHAT, kwargs)
        given = _CHAT.bind(self, *args, **kwargs)
        messages = given.arguments["messages"]
        if isinstance(messages, (str, bytes, Mapping)):
            raise ValueError(
                'messages must be a list of messages, such as [{"role": "user", "content": "Hi"}], not '
                f"{type(messages).__name__}; for a bare prompt call create_completion."
            )
        if only_formats(chat_handler(self)):
            given.arguments["messages"] = as_texts(messages)
        given.apply_defaults()
        return with_grammar({k: v for k, v in given.arguments.items() if k != "self"})

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """As in the base class, also quick for texts with many special tokens. Raises ValueError if the text would end
        the process (tokenizing.py)."""
        tokens: list[int] = []
        with self.reading():
            for i, part in enumerate(self._parts(text, add_bos, special)):
                tokenize = functools.partial(super().tokenize, part, add_bos and i == 0, special)
                tokens += tokenized(tokenize, part, self.metadata)
        return tokens

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Around a use of the model's vocabulary in any thread, see `Access.reading`."""
        return self._access.reading()

    @property
    def is_reading(self) -> bool:
        """Whether this thread is within `reading`."""
        return self._access.is_reading

    def _parts(self, text: bytes, add_bos: bool, special: bool) -> list[bytes]:
        """The text in parts that can be tokenized one after the other."""
        if len(text) < LEAST or not isinstance(self.tokenizer_, LlamaTokenizer):
            return [text]
        vocab = self._model.vocab
        if add_bos and (llama_cpp.llama_vocab_get_add_eos(vocab) or llama_cpp.llama_vocab_get_add_sep(vocab)):
            return [text]  # something is to stand behind all of it
        if special not in self._special_tokens:
            self._special_tokens[special] = SpecialTokens(vocab, self.metadata, special)
        return self._special_tokens[special].parts(text)

    # ---- The sequence ------------------------------------------------------------------------------------------------

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluates tokens behind the sequence, as in the base class. Ends a running generation.

        Raises:
            ContextFullError: they do not fit in the context; nothing was evaluated.
        """
        with self._access.exclusive():
            self._supersede()
            if self.n_tokens + len(tokens) > self._n_ctx:
                raise ContextFullError(
                    f"{len(tokens)} tokens do not fit behind the {self.n_tokens} of the sequence: the context holds "
                    f"{self._n_ctx}; reset() it or raise n_ctx."
                )
            self._require_weights()
            if self.n_tokens == 0:
                self.decoder.take_adapters()
            super().eval(tokens)
            self.has_row = True

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """A token by the row of the last evaluated one, as in the base class.

        Raises:
            ValueError: that row is not there: a state was loaded, or drafts were evaluated behind it.
        """
        idx = _SAMPLE.bind(self, *args, **kwargs).arguments.get("idx")
        with self._access.exclusive():
            if not self.has_row or not self._ctx.get_logits_ith(-1 if idx is None else idx - self.n_tokens):
                raise ValueError(
                    "sample() needs logits that the context does not hold (drafts replace them, and a saved state has "
                    "none); eval() tokens first, or take tokens from generate()."
                )
            return super().sample(*args, **kwargs)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """Embeddings, as in the base class. Ends a running generation. Raises RuntimeError if the model was loaded
        without embedding=True."""
        with self._access.exclusive():
            if not self.context_params.embeddings:
                raise RuntimeError("this FlyLlama makes no embeddings; load the model with embedding=True.")
            self._require_weights()
            self._supersede()
            self.n_tokens = 0  # the base class clears the memory
            return super().embed(*args, **kwargs)

    def _require_weights(self) -> None:
        if self.model_params.vocab_only:
            raise ValueError("this model was loaded with vocab_only=True and computes nothing; load it without.")

    def save_state(self) -> LlamaState:
        """The state of the sequence, as in the base class. Logits are not part of it (unless logits_all)."""
        with self._access.exclusive():
            slot = self.decoder.running
            if slot is not None:
                slot.park(self.n_tokens)  # what it holds beyond is not part of the state
            state = super().save_state() if self._logits_all else states.save_state(self)
            state.kv_key = self.kv_key
            state.kept = states.kept_states(self)
            return state

    def load_state(self, state: LlamaState) -> None:
        """Restores a state of this model, also one that a plain `llama_cpp.Llama` saved. Ends a running generation.

        Raises:
            ValueError: it does not fit in the context, or was computed with another model, other adapters or other
                settings (a plain Llama's state does not tell); nothing was changed.
            NativeError: llama.cpp refuses it; the sequence is reset.
        """
        with self._access.exclusive():
            why = self.why_not_usable(state)
            if why is not None:
                raise ValueError(
                    f"the saved state was computed with {why}; load it where they are the same, or let the prompt be "
                    "read again."
                )
            states.load_state(self, state, self._logits_all, before=self._begin_anew)
            states.restore_kept(self, getattr(state, "kept", []))
            self.has_row = False

    def _begin_anew(self) -> None:
        """The context is about to hold something else, computed with the adapters of now."""
        self._supersede()
        self.decoder.take_adapters()

    def why_not_usable(self, state: LlamaState) -> str | None:
        """By what this object computes differently than the one that saved a state; None: by nothing that is known."""
        key = getattr(state, "kv_key", None)
        return None if key is None else difference(key, self._kv_key(applied(self._ctx.ctx)))

    @property
    def kv_key(self) -> dict[str, Any]:
        """What the context's memory depends on besides its tokens, see `engine.kv_key`."""
        return self._kv_key(self.decoder.computed_with)

    def _kv_key(self, adapters: Applied) -> dict[str, Any]:
        has_long_rope = 0 < self._n_ctx_short < self._n_ctx
        return kv_key(
            self._fingerprint, self.kv_overrides, self.context_params, adapters, self._may_rotate, has_long_rope
        )

    @functools.cached_property
    def _fingerprint(self) -> str:
        return hashlib.sha256("".join(map(fingerprint, files_of_model(self.model_path))).encode()).hexdigest()

    def _follow_adapters(self) -> None:
        """Drops what the context holds if it was computed with other adapters than those that it applies now."""
        if self.decoder.has_new_adapters:
            self.n_tokens = 0
            self.decoder.take_adapters()


def _locked(what: int, kwargs: dict[str, Any]) -> int:
    """What the kernels take, locked if use_mlock is set. The file is then read and not mapped: llama.cpp would lock all
    of the mapping, of which little is used, and not the packed weights."""
    if not what or not kwargs.get("use_mlock"):
        return what
    kwargs["use_mmap"] = False
    return what | _native.KERNELS_LOCKED


def _warn_of_unlocked(n_bytes: int) -> None:
    warnings.warn(
        f"the system refused to lock {in_words(n_bytes)} of weights in memory, so they may be swapped out; raise the "
        "limit of locked memory (`ulimit -l`), or load without use_mlock.",
        RuntimeWarning,
        stacklevel=3,
    )


class _Missing:
    """Stands where the base class has something of llama.cpp's: whoever asks it for anything hears why that is gone."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise ValueError(self._why)
