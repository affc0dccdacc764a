"""Models: what a GGUF file's header contains, the guard around loading, and the targets that verify."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pyfly_cpp._native.boundary import (
    FloatArray,
    NativeHandle,
    TokenArray,
    check,
    float_pointer,
    keep_failure,
    token_pointer,
    tokens,
    void_pointer,
)
from pyfly_cpp._native.library import ffi, lib

# ---- Files and loading -----------------------------------------------------------------------------------------------


class ModelInfo(NamedTuple):
    """`pyfly_model_info` of pyfly.h."""

    architecture: str
    n_ctx_train: int
    n_positions: int
    n_ctx_short: int
    n_nextn: int
    mtp_draft_max: int
    n_layer: int
    layer_inputs: int
    query_types: int


def inspect_model(path: str, wants_mtp: bool = False) -> ModelInfo:
    """The header of a GGUF file; ValueError if it is none, or one that would end the process as a target.
    With `wants_mtp` also if it has no MTP head that can be used."""
    info = ffi.new("pyfly_model_info *")
    check(lib.pyfly_model_inspect, ffi.new("char[]", path.encode("utf-8")), int(wants_mtp), info)
    architecture = ffi.string(info.architecture).decode("utf-8", errors="replace")
    numbers = (
        info.n_ctx_train, info.n_positions, info.n_ctx_short, info.n_nextn, info.mtp_draft_max, info.n_layer,
        info.layer_inputs, info.query_types,
    )  # fmt: skip
    return ModelInfo(architecture, *map(int, numbers))


def companion_word(target: Any, path: str) -> str:
    """The word of the drafter that the GGUF file at `path` could be for `target`, a llama_model as llama_cpp holds it
    (a ctypes pointer), loaded with or without its weights. Reads no weights.

    Raises:
        ValueError, PyflyError: it could not: what that drafter would raise.
    """
    word = ffi.new("char[]", 16)
    check(lib.pyfly_companion_word, void_pointer(target), ffi.new("char[]", path.encode("utf-8")), word)
    return str(ffi.string(word), "ascii")


class ContextMemory(NamedTuple):
    """`pyfly_memory` of pyfly.h, in bytes."""

    host: int
    device: int


def context_memory(context: Any) -> ContextMemory:
    """What a llama_context as llama_cpp holds it (a ctypes pointer) takes in addition to the weights, or, if its model
    was loaded with no_alloc, would take."""
    memory = ffi.new("pyfly_memory *")
    check(lib.pyfly_context_memory, void_pointer(context), memory)
    return ContextMemory(int(memory.host), int(memory.device))


class GraphProduct(NamedTuple):
    """A product of a graph. If it is not ours, llama.cpp computes it in its own way, and its rounding depends on the
    batch."""

    op: str
    """ggml's name of the operation."""
    weights: str
    """The name of its first matrix, N for the number of a layer; of attention, the keys. "" if it is computed."""
    type: str
    """ggml's name of the type of that matrix."""
    number: int
    """The number of that type, a `ggml_type`."""
    n: int
    """How many there are, as a rule one in each layer."""
    is_ours: bool


def graph_products(context: Any) -> list[GraphProduct]:
    """Those of a llama_context as llama_cpp holds it (a ctypes pointer), with the adapters that are set. If all are
    ours, a token has the same bits alone and in a batch. The context must be idle; it keeps what it holds. Raises
    NativeError if llama.cpp shows no graphs."""
    out = ffi.new("char[]", 1 << 16)
    check(lib.pyfly_context_products, void_pointer(context), out, len(out))
    lines = str(ffi.string(out), "utf-8", errors="replace").splitlines()
    fields = [line.split("\t") for line in lines if line.count("\t") == 5]
    return [
        GraphProduct(op, weights, kind, int(number), int(n), ours == "1")
        for op, weights, kind, number, n, ours in fields
    ]


@contextlib.contextmanager
def load_guard() -> Iterator[None]:
    """Around llama.cpp's loading of a model or making of a context: an assertion that fails in there lets it fail, with
    what llama.cpp logs and returns then, instead of ending the process. On this thread alone."""
    lib.pyfly_load_guard(1)
    try:
        yield
    finally:
        lib.pyfly_load_guard(0)


# ---- Targets ---------------------------------------------------------------------------------------------------------


class Target(NativeHandle):
    """The model that verifies drafts."""

    def protect(self, protected: Iterable[int] = (), eog: Iterable[int] = ()) -> None:
        """Marks tokens that are never accepted loosely, and tokens that end a text."""
        a, b = tokens("protected", sorted(protected)), tokens("eog", sorted(eog))
        check(lib.pyfly_target_protect, self.pointer, token_pointer(a), len(a), token_pointer(b), len(b))

    def protect_texts(self, texts: Sequence[str]) -> None:
        """Sets the texts, without NUL, that no token may begin or continue loosely."""
        kept = [ffi.new("char[]", text.encode("utf-8")) for text in texts]
        check(lib.pyfly_target_protect_texts, self.pointer, ffi.new("char *[]", kept), len(kept))

    @property
    def protected(self) -> frozenset[int]:
        """All protected tokens."""
        n = lib.pyfly_target_protected(self.pointer, ffi.NULL, 0)
        out = np.zeros(n, dtype=np.int32)
        lib.pyfly_target_protected(self.pointer, token_pointer(out), n)
        return frozenset(out.tolist())

    @property
    def n_sequences(self) -> int:
        """Requests it can hold at a time."""
        return int(lib.pyfly_target_n_sequences(self.pointer))

    @property
    def can_rewind(self) -> bool:
        """Whether evaluated positions can be taken back, which speculation needs. Known once a prompt was evaluated."""
        return bool(lib.pyfly_target_can_rewind(self.pointer))


class LayerTap:
    """A `pyfly_layer_tap` of pyfly.h. Must be kept until the context is freed that calls it.

    callback, user: addresses, `cb_eval` and `cb_eval_user_data` of the context's parameters.
    """

    def __init__(self) -> None:
        self.pointer = ffi.gc(lib.pyfly_layer_tap_new(), lib.pyfly_layer_tap_free)
        self.callback = int(ffi.cast("uintptr_t", lib.pyfly_layer_tap_callback()))
        self.user = int(ffi.cast("uintptr_t", lib.pyfly_layer_tap_user(self.pointer)))


class States(NamedTuple):
    """What `pyfly_target_states` of pyfly.h gives of n tokens."""

    inputs: npt.NDArray[np.float16]
    """Inputs of the layers, side by side: [n, layers * n_embd]."""
    final: npt.NDArray[np.float16]
    """What the output matrix reads: [n, n_embd]."""
    ids: TokenArray
    """The most probable next tokens, by falling probability: [n, k]."""
    log_probs: FloatArray
    """In nats, [n, k]."""


class LlamaTarget(Target):
    """A llama_context as llama_cpp holds it (a ctypes pointer). Must be closed before the context is.

    `adapts`, `adapts_batch`: whether its thread counts for one token and for batches follow the load of the machine.
    `n_requests`: how many of its sequences are used; 0: all. `n_ctx`: most positions of one request; 0: what the
    context allows. `tap`: the context's, if it has one.
    """

    def __init__(
        self,
        context: Any,
        adapts: bool = False,
        adapts_batch: bool = False,
        n_requests: int = 0,
        n_ctx: int = 0,
        tap: LayerTap | None = None,
    ) -> None:
        self._tap = tap
        adaptive = (
            lib.PYFLY_THREADS_FIXED
            if not adapts
            else lib.PYFLY_THREADS_ADAPT_ALL
            if adapts_batch
            else lib.PYFLY_THREADS_ADAPT_SINGLE
        )
        super().__init__(
            lib.pyfly_target_llama_new,
            lib.pyfly_target_free,
            "pyfly_target",
            void_pointer(context),
            adaptive,
            n_requests,
            n_ctx,
            ffi.NULL if tap is None else tap.pointer,
        )

    def states(self, layers: Sequence[int], text: Sequence[int], k: int, n_embd: int) -> States:
        """What a head learns from: the inputs of layers and the last states [n_embd wide], and the k most probable next
        tokens, of a text. What the target's first sequence held is gone. Raises NotFiniteError for a NaN,
        IncompatibleDraftError for layers that cannot be read."""
        read, given = tokens("layers", layers), tokens("text", text)
        n = len(given)
        out = States(
            np.zeros((n, len(read) * n_embd), np.float16),
            np.zeros((n, n_embd), np.float16),
            np.zeros((n, k), np.int32),
            np.zeros((n, k), np.float32),
        )
        check(
            lib.pyfly_target_states, self.pointer, token_pointer(read), len(read), token_pointer(given), n, k,
            ffi.cast("uint16_t *", ffi.from_buffer(out.inputs)), ffi.cast("uint16_t *", ffi.from_buffer(out.final)),
            token_pointer(out.ids), float_pointer(out.log_probs),
        )  # fmt: skip
        return out

    @property
    def vocabulary(self) -> int:
        """A fingerprint of its vocabulary."""
        return int(lib.pyfly_target_vocabulary(self.pointer))

    def threads(self) -> tuple[int, int, int, int] | None:
        """How the threads stand: (number, most, changes, trials); None if their number is fixed."""
        out = ffi.new("pyfly_threads *")
        lib.pyfly_target_threads(self.pointer, out)
        return (out.n, out.n_max, out.n_changes, out.n_trials) if out.n > 0 else None


class RowSource:
    """`row(history) -> logits [n_vocab]` as a `pyfly_row_callback` of pyfly.h; to be kept while C uses its handle."""

    def __init__(self, row: Callable[[TokenArray], Any], n_vocab: int) -> None:
        self.row = row
        self.n_vocab = n_vocab
        self.handle = ffi.new_handle(self)


class ScriptedTarget(Target):
    """A target for tests: `row(history) -> logits [n_vocab]` is the model."""

    def __init__(
        self,
        row: Callable[[TokenArray], Any],
        n_vocab: int,
        n_ctx: int = 4096,
        n_batch: int = 512,
        *,
        n_sequences: int = 1,
        n_cells: int | None = None,
        recurrent: tuple[int, bool] | None = None,
        pieces: Sequence[bytes] | None = None,
    ) -> None:
        """
        Args:
            row: The model.
            n_vocab: Tokens.
            n_ctx: Positions of one sequence.
            n_batch: Most tokens in one evaluation.
            n_sequences: Requests at a time.
            n_cells: Positions of all sequences together; None: n_ctx each.
            pieces: The texts of the tokens, without NUL; None: they have none.
            recurrent: Snapshots behind the last token, and whether there are checkpoints, of a recurrent memory.
        """
        self._source = RowSource(row, n_vocab)
        n_snapshots, has_checkpoints = recurrent or (-1, True)
        texts = [ffi.new("char[]", piece) for piece in pieces or ()]
        config = (
            n_vocab, n_ctx, n_batch, n_sequences, n_ctx * n_sequences if n_cells is None else n_cells, n_snapshots,
            int(has_checkpoints), ffi.new("char *[]", texts) if texts else ffi.NULL,
        )  # fmt: skip
        super().__init__(
            lib.pyfly_target_scripted_new, lib.pyfly_target_free, "pyfly_target",
            ffi.new("pyfly_scripted_config *", config), lib.pyfly_py_row, self._source.handle,
        )  # fmt: skip


@ffi.def_extern(error=1, onerror=keep_failure)  # type: ignore[untyped-decorator]
def pyfly_py_row(user: Any, history: Any, n_history: int, out: Any) -> int:
    """A row of a RowSource."""
    source: RowSource = ffi.from_handle(user)
    seen = np.frombuffer(ffi.buffer(history, n_history * 4), dtype=np.int32)
    row = np.frombuffer(ffi.buffer(out, source.n_vocab * 4), dtype=np.float32)
    row[:] = source.row(seen)
    return 0
