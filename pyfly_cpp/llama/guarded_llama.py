"""`GuardedLlama`: a `llama_cpp.Llama` that loads, is used and closes in ways that cannot end the process."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import _logger
from llama_cpp.llama_tokenizer import LlamaTokenizer

from pyfly_cpp import _native
from pyfly_cpp.engine.access import CLOSED, Access
from pyfly_cpp.engine.decoder import Decoder
from pyfly_cpp.engine.kv_key import may_rotate
from pyfly_cpp.engine.loaded_model import LoadedModel
from pyfly_cpp.engine.output import Output
from pyfly_cpp.engine.request_limits import require_names
from pyfly_cpp.engine.vocabulary import Vocabulary
from pyfly_cpp.errors import ArgumentError
from pyfly_cpp.llama.load_limits import (
    BASE_DEFAULTS,
    require_adapter,
    require_attribute,
    why_not_loaded,
    within_positions,
)
from pyfly_cpp.llama.prompting import as_texts, chat_handler, is_own, markers_of, takes_texts
from pyfly_cpp.llama.strict_grammars import with_grammar
from pyfly_cpp.machine import exactness, extra_buffers, kernels, memory
from pyfly_cpp.machine.cache_types import needs_flash_attention
from pyfly_cpp.machine.placement import Placement
from pyfly_cpp.machine.processes import Process, require_own_threads
from pyfly_cpp.machine.threads import AUTO, THREAD_COUNTS, fill_thread_counts
from pyfly_cpp.models.special_tokens import LEAST, SpecialTokens
from pyfly_cpp.models.tokenizing import tokenized

_MOST_SNAPSHOTS = 16

# llama-cpp-python takes warnings for errors, which it prints with verbose=False, too.
_logger.GGML_LOG_LEVEL_TO_LOGGING_LEVEL[3] = logging.WARNING
_CHAT = inspect.signature(llama_cpp.Llama.create_chat_completion)
_SAMPLE = inspect.signature(llama_cpp.Llama.sample)


_quiet_load = threading.RLock()
"""Held while a model loads with verbose=False: llama-cpp-python leads the process's stdout and stderr away and back
again, and if a second thread begins in between, they do not come back."""


def _renew_quiet_load() -> None:
    """Makes the lock anew: a thread that is not in this fork may hold it."""
    global _quiet_load
    _quiet_load = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_quiet_load)


class GuardedLlama(llama_cpp.Llama):  # type: ignore[misc]
    """The base class's model and context, which `loaded` has by public names."""

    loaded: LoadedModel
    _public_name = "FlyLlama"  # for errors; a subclass may be part of something else
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

    n_parallel = 1  # requests at a time
    _close_waits = False
    """Whether `close` waits for threads that tokenize."""
    _n_ctx_of_request = 0
    """Most tokens of one request, for subclasses whose context holds several; 0: as many as the context holds."""
    _may_choose_attention = False
    """Whether llama.cpp chooses between flash attention and none."""
    _bytes_of_context: int | None = None
    """What the context takes besides the weights; 0: not known, but little; None: nobody has looked yet."""

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
            RpcError: an RPC server cannot be reached, or of another version.
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
            given = self._n_ctx_of_request or int(kwargs.get("n_ctx", BASE_DEFAULTS["n_ctx"]))
            self._n_ctx_of_request = within_positions(given, n_positions, model_path)
        self._adapts = fill_thread_counts(kwargs)
        if max(kwargs["n_threads"], kwargs["n_threads_batch"]) > 1:
            require_own_threads()
        if kwargs.get("lora_path") is not None:
            kwargs["lora_path"] = os.fspath(kwargs["lora_path"])
        self._kernel_choice = kernel_choice
        self._where = {"rpc_servers": rpc_servers, "devices": devices}
        self._placement = Placement(rpc_servers, devices)
        self._placement.require_fitting(kwargs.get("tensor_split"), kwargs.get("split_mode"))
        if self._placement.addresses:
            kwargs.setdefault("n_gpu_layers", -1)
        self._kernels = kernels.take(kernel_choice, model_path, kwargs, self.n_parallel)
        if kwargs.get("flash_attn") is None:
            is_ours = self._kernels.attends(info) and kernels.is_for_attention(kwargs)
            kwargs["flash_attn"] = is_ours or needs_flash_attention(kwargs.get("type_v"))
        try:
            wish = _locked(self._kernels.bits, kwargs)
            taken = _native.kernels_taken(wish, kwargs["n_threads_batch"], _warn_of_unlocked)
            is_quiet = not kwargs.get("verbose", BASE_DEFAULTS["verbose"])
            with _quiet_load if is_quiet else contextlib.nullcontext(), _native.load_guard(), taken:
                super().__init__(model_path, **kwargs)
        except ValueError as error:
            self.close()  # the traceback may keep this object for long
            if self._load_failure is not None:
                raise self._load_failure from None
            why = why_not_loaded(error, model_path, self._context_params, self._placement.has_servers)
            if why is not None:
                raise ArgumentError(why) from error
            raise
        if max(self.n_threads, self.n_threads_batch) > 1 or llama_cpp.llama_supports_gpu_offload():
            self._access.process = Process(self._public_name)
        has_texts = llama_cpp.llama_vocab_type(self._model.vocab) != llama_cpp.LLAMA_VOCAB_TYPE_NONE
        self.vocabulary = Vocabulary(self._model.vocab, self._access.reading)
        if not has_texts and kwargs.get("tokenizer") is None:
            self.tokenizer_ = _Missing("this model has no vocabulary: give generate() token ids, or pass tokenizer=.")
        if n_positions:
            self._n_ctx = min(self._n_ctx, self._n_ctx_of_request)
        # llama.cpp rounds the context up: what it holds counts, for the base class's arrays, too.
        self.input_ids = np.zeros(self._n_ctx, dtype=np.intc)
        if self._logits_all:
            self.scores = np.zeros((self._n_ctx, self._n_vocab), dtype=np.single)
        decoder = Decoder(
            self._ctx.ctx,
            protected=protected,
            markers=markers_of(self) if has_texts else (),
            adapts=self._adapts,
            has_own_head=has_own_head,
            n_requests=self.n_parallel,
            n_ctx=self._n_ctx_of_request,
            settings={
                "n_gpu_layers": self.model_params.n_gpu_layers,
                "flash_attn": int(self.context_params.flash_attn_type),
                "offload_kqv": int(self.context_params.offload_kqv),
                "use_extra_bufts": int(self.model_params.use_extra_bufts),
                "kernel_types": self._kernels.bits,
            },
            tap=self._tap,
        )
        self._stack.callback(decoder.close)
        where = self._placement.describe()
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
            access=self._access,
            decoder=decoder,
            n_parallel=self.n_parallel,
            n_ctx=min(self._n_ctx, self._n_ctx_of_request or self._n_ctx),
            n_batch=self.n_batch,
            changes=(self.kv_overrides, self.tensor_split, self.lora_path, self.lora_scale, self._kernels, *where),
            verbose=self.verbose,
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
        """llama_context_params of the base class, which changes its sizes until it makes the context. Checks that it
        fits first."""
        params = self._context_params
        # llama.cpp ends the process unless a batch holds more than the last token and the snapshots.
        n_ubatch = min((n for n in (params.n_ctx, params.n_batch, params.n_ubatch) if n > 0), default=0)
        params.n_rs_seq = max(0, min(self._n_snapshots, n_ubatch - 2))
        if self._tap is not None:
            params.cb_eval = llama_cpp.ggml_backend_sched_eval_callback(self._tap.callback)
            params.cb_eval_user_data = self._tap.user
        self._adapt(params)
        has_sizes = "_model" in self.__dict__ and params.n_ctx > 0 and params.n_batch > 0
        if has_sizes and self._bytes_of_context is None:
            self._require_memory(params)
        return params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        self._context_params = params

    def _adapt(self, params: Any) -> None:
        """Sets what a subclass's llama_context_params have besides."""

    def _is_surely_small(self, params: Any) -> bool:
        """Whether the context fits by far, which spares the time of simulating it: with keys and values as wide as the
        model, in F32, it would take less than half of what is free. Few models have wider ones, by twice at most."""
        width, n_layers = llama_cpp.llama_model_n_embd(self.model), llama_cpp.llama_model_n_layer(self.model)
        n_free = memory.available()
        is_small = n_free is None or 2 * params.n_ctx * n_layers * width * 2 * 4 < n_free
        return is_small and not self._n_ctx_of_request  # contexts for several requests say what each takes

    def _require_memory(self, params: Any) -> None:
        """Raises ValueError if the context is larger than what is free; llama.cpp fills it, and the system would end
        the process."""
        if self._is_surely_small(params):
            self._bytes_of_context = 0
            return
        n = self._simulated(params)
        if n is None and self._may_choose_attention:
            # llama.cpp has no graph of this model with flash attention (PLM), or cannot make the context at all.
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
            n = self._simulated(params)
            self._may_choose_attention = n is None
        n_needed, n_free = n or 0, memory.available()
        self._bytes_of_context = n_needed
        if n_free is not None and n_needed > n_free:
            need = f"would need {memory.in_words(n_needed)}, and {memory.in_words(n_free)} are free"
            raise ArgumentError(self._too_large(params.n_ctx, need))

    def _simulated(self, params: Any) -> int | None:
        return memory.simulated_context(self.model_path, self.model_params, params, self.n_parallel, params.n_ctx)

    def _too_large(self, n_ctx: int, need: str) -> str:
        """The message for a context that memory cannot hold, as `ArgumentError` takes it."""
        return f"a context of {n_ctx} tokens {need}; lower {{n_ctx}}."

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
        return self.loaded.decoder.target.can_rewind

    @property
    def kernels_used(self) -> kernels.KernelVerdict:
        """The kernels of ours that were offered to this model's weights and attention."""
        return self._kernels

    @property
    def inexact(self) -> tuple[str, ...]:
        """Why a token may have other bits in a batch than alone, so that drafts may change an answer even with the gate
        `exact`; empty: they cannot. It is true of this model with its cache, kernels and adapter.

        Raises:
            NativeError: this release of llama.cpp does not show what it computes.
            BusyError: another thread uses this object.
        """
        with self._access.exclusive():
            said = exactness.reasons(self._ctx.ctx)
            if self.context_params.attention_type == llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL:
                said = (*said, "tokens attend to later ones (attention_type), drafts among them")
            return said

    @property
    def protected(self) -> frozenset[int]:
        """Token ids that are never accepted loosely."""
        return self.loaded.decoder.target.protected

    @property
    def protected_texts(self) -> tuple[str, ...]:
        """Markers that ordinary tokens write (`pyfly_cpp.engine.markers`): if a drafted token or the target's choice
        begins or continues one, nothing is accepted loosely."""
        return self.loaded.decoder.markers

    # ---- The end of a generation, and of the object ------------------------------------------------------------------

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

    # ---- Chats, tokens and texts -------------------------------------------------------------------------------------

    def chat_arguments(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """All arguments of `create_chat_completion`, with defaults, and schemas as grammars; a chat handler of the
        user's own gets what it was given. Raises as `create_chat_completion` does."""
        require_names("create_chat_completion", _CHAT, kwargs)
        given = _CHAT.bind(self, *args, **kwargs)
        messages, handler = given.arguments["messages"], chat_handler(self)
        given.apply_defaults()
        if is_own(handler):
            return {k: v for k, v in given.arguments.items() if k != "self"}
        if isinstance(messages, (str, bytes, Mapping)):
            raise ValueError(
                'messages must be a list of messages, such as [{"role": "user", "content": "Hi"}], not '
                f"{type(messages).__name__}; for a bare prompt call create_completion."
            )
        if takes_texts(handler):
            given.arguments["messages"] = as_texts(messages)
        return with_grammar({k: v for k, v in given.arguments.items() if k != "self"})

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """As in the base class, also quick for texts with many special tokens. Raises ValueError if the text would end
        the process (tokenizing.py)."""
        tokens: list[int] = []
        with self._access.reading():
            for i, part in enumerate(self._parts(text, add_bos, special)):
                tokenize = functools.partial(super().tokenize, part, add_bos and i == 0, special)
                tokens += tokenized(tokenize, part, self.metadata)
        return tokens

    def new_output(
        self,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        n_logprobs: int | None = None,
        line_seconds: float | None = None,
        shown: frozenset[int] = frozenset(),
        stops_loops: bool = False,
    ) -> Output:
        """The maker of the text of an answer.

        Args:
            prompt: The tokens that it answers.
            shown: Control tokens whose texts belong to the answer.
            stop, max_tokens, n_logprobs, line_seconds, stops_loops: As of `Output`.
        """
        pieces = self.pieces(prompt)
        if len(prompt) == 0 or list(prompt) == [self.token_bos()]:
            pieces = _without_space(pieces)

        def piece_of(token: int) -> bytes:
            return self.vocabulary.piece(token, True) if token in shown else pieces(token)

        return Output(
            piece_of if shown else pieces, self.vocabulary.ends_text, stop, max_tokens, n_logprobs, line_seconds,
            stops_loops,
        )  # fmt: skip

    def pieces(self, before: Sequence[int]) -> Callable[[int], bytes]:
        """What tells the bytes of each token of a text behind these."""
        if self._has_own_pieces:
            pieces: Callable[[int], bytes] = self.vocabulary.piece
            return pieces
        return _Growth(self.detokenize, list(before))

    @property
    def _has_own_pieces(self) -> bool:
        """Whether the model's vocabulary tells the text of tokens, and no tokenizer of the user's."""
        return getattr(type(self.tokenizer_), "detokenize", None) is LlamaTokenizer.detokenize

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """As in the base class, which leaves out tokens of more than 32 bytes."""
        with self._access.reading():
            if not self._has_own_pieces:
                text: bytes = super().detokenize(tokens, prev_tokens, special)
                return text
            text = b"".join([self.vocabulary.piece(token, special) for token in tokens])
            return text[1:] if text[:1] == b" " and tokens[0] == self.token_bos() else text

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


def _locked(what: int, kwargs: dict[str, Any]) -> int:
    """What the kernels take, locked if use_mlock is set. The file is then read and not mapped: llama.cpp would lock all
    of the mapping, of which little is used, and not the packed weights."""
    if not what or not kwargs.get("use_mlock"):
        return what
    kwargs["use_mmap"] = False
    return what | _native.KERNELS_LOCKED


def _warn_of_unlocked(n_bytes: int) -> None:
    warnings.warn(
        f"the system refused to lock {memory.in_words(n_bytes)} of weights in memory, so they may be swapped out; "
        "raise the limit of locked memory (`ulimit -l`), or load without use_mlock.",
        RuntimeWarning,
        stacklevel=3,
    )


class _Missing:
    """Stands where the base class has something of llama.cpp's: whoever asks it for anything hears why that is gone."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise ValueError(self._why)


class _Growth:
    """The pieces of a tokenizer that knows whole texts alone: what the text has grown by with each token."""

    def __init__(self, detokenize: Callable[..., bytes], before: list[int]) -> None:
        self._detokenize = detokenize
        self._before = before
        self._tokens: list[int] = []
        self._n = 0

    def __call__(self, token: int) -> bytes:
        self._tokens.append(token)
        text = self._detokenize(self._tokens, prev_tokens=self._before)
        if text.endswith(b"\xef\xbf\xbd"):  # U+FFFD: in the middle of a character
            return b""
        piece, self._n = text[self._n :], len(text)
        return piece


def _without_space(pieces: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """Without the space that vocabularies put before a text."""
    is_first = True

    def piece(token: int) -> bytes:
        nonlocal is_first
        was_first, is_first = is_first, False
        return pieces(token).removeprefix(b" ") if was_first else pieces(token)

    return piece
