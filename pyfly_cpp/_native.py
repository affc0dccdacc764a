"""The only module that touches cffi: handles, buffers and errors of pyfly.h as Python objects.

Two doors guard the boundary: `_check` turns a status into an exception with the message of the core, and `_floats` and
`_tokens` turn what the caller has into contiguous arrays of the right type before a pointer to them is taken.
A handle belongs to one thread at a time; what C borrows is kept alive on the Python object.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import llama_cpp  # loads libllama, which the extension below resolves to
import numpy as np
import numpy.typing as npt

from pyfly_cpp import stats as _stats
from pyfly_cpp.errors import (
    ContextFullError,
    IncompatibleDraftError,
    NativeError,
    NotFiniteError,
    PyflyError,
    VersionMismatchError,
)
from pyfly_cpp.rules import Gate, GateNode
from pyfly_cpp.windows import Window

ABI_VERSION = 1

FloatArray = npt.NDArray[np.float32]
TokenArray = npt.NDArray[np.int32]


def require_release(compiled: str, installed: str) -> None:
    """Raises VersionMismatchError unless pyfly-cpp was compiled against the llama-cpp-python that is installed."""
    if compiled != installed:
        raise VersionMismatchError(
            f"pyfly-cpp was compiled against llama-cpp-python {compiled}, but {installed} is installed; run "
            "`pip install --force-reinstall --no-deps --no-build-isolation pyfly-cpp` to compile it for that release."
        )


def _import_extension() -> Any:
    """The compiled extension: beside this file, or, when Python was started in a source checkout, the installed one."""
    try:
        return importlib.import_module("pyfly_cpp._pyfly")
    except ModuleNotFoundError:
        pass
    try:
        files = importlib.metadata.files("pyfly-cpp") or []
        path = next(str(f.locate()) for f in files if f.name.startswith("_pyfly."))
    except (importlib.metadata.PackageNotFoundError, StopIteration):
        raise ModuleNotFoundError(
            "pyfly-cpp's extension is not built; run `pip install .` in its source folder."
        ) from None
    spec = importlib.util.spec_from_file_location("pyfly_cpp._pyfly", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _load() -> tuple[Any, Any]:
    try:
        extension = _import_extension()
    except ModuleNotFoundError:
        raise
    except ImportError as error:
        raise VersionMismatchError(
            f"pyfly-cpp's extension does not load with llama-cpp-python {llama_cpp.__version__} ({error}); run "
            "`pip install --force-reinstall --no-deps --no-build-isolation pyfly-cpp` to compile it for that release."
        ) from None
    ffi, lib = extension.ffi, extension.lib
    require_release(ffi.string(lib.pyfly_llama_cpp_python_version()).decode(), llama_cpp.__version__)
    if lib.pyfly_abi_version() != ABI_VERSION:
        raise VersionMismatchError(
            "pyfly-cpp's extension and its Python files are of different versions; run `pip install .` again."
        )
    return ffi, lib


_ffi, _lib = _load()

simd_level: str = _ffi.string(_lib.pyfly_simd_level()).decode()
"""Instruction set of the row statistics on this machine: "avx512", "avx2" or "baseline"."""

_EXCEPTIONS: dict[int, type[Exception]] = {
    _lib.PYFLY_STATUS_INVALID: ValueError,
    _lib.PYFLY_STATUS_NO_MEMORY: MemoryError,
    _lib.PYFLY_STATUS_NATIVE: NativeError,
    _lib.PYFLY_STATUS_NOT_FINITE: NotFiniteError,
    _lib.PYFLY_STATUS_CONTEXT_FULL: ContextFullError,
    _lib.PYFLY_STATUS_INCOMPATIBLE: IncompatibleDraftError,
    _lib.PYFLY_STATUS_INTERNAL: PyflyError,
}


def _check(call: Callable[..., int], *arguments: Any) -> None:
    """Calls a function of pyfly.h with an error buffer and raises what it reports."""
    error = _ffi.new("pyfly_error *")
    status = call(*arguments, error)
    if status == _lib.PYFLY_OK:
        return
    if status == _lib.PYFLY_STATUS_CALLBACK and _callback_failure.pending is not None:
        failure, _callback_failure.pending = _callback_failure.pending, None
        raise failure
    message = _ffi.string(error.message).decode("utf-8", errors="replace")
    raise _EXCEPTIONS.get(status, PyflyError)(message + ".")


class _CallbackFailure(threading.local):
    """What a Python callback raised while C was calling it on this thread; raised again when the call has returned."""

    pending: BaseException | None = None


_callback_failure = _CallbackFailure()


def _floats(name: str, values: Any, shape: tuple[int | None, ...]) -> FloatArray:
    """A C-contiguous float32 array of this shape (None: any length), copied only if need be."""
    array = np.asarray(values)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{name} must be an array of numbers, not of {array.dtype}.")
    if array.ndim != len(shape) or any(n is not None and n != m for n, m in zip(shape, array.shape)):
        wanted = ", ".join("*" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} must have shape [{wanted}], not {list(array.shape)}.")
    return np.ascontiguousarray(array, dtype=np.float32)


def _tokens(name: str, values: Any, length: int | None = None) -> TokenArray:
    """A C-contiguous int32 array [length] of token ids."""
    try:
        array = np.asarray(values if isinstance(values, np.ndarray) else list(values))
    except (TypeError, ValueError):  # no sequence, or a ragged one
        raise ValueError(f"{name} must be a one-dimensional sequence of token ids, not {values!r}.") from None
    if array.size == 0:
        array = np.zeros(0, dtype=np.int32)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ValueError(f"{name} must be a one-dimensional sequence of token ids.")
    if length is not None and array.shape[0] != length:
        raise ValueError(f"{name} must hold {length} tokens, not {array.shape[0]}.")
    if array.size and (array.min() < -(2**31) or array.max() > 2**31 - 1):
        raise ValueError(f"{name} holds a token id that is no 32-bit integer.")
    return np.ascontiguousarray(array, dtype=np.int32)


def _float_pointer(array: FloatArray) -> Any:
    return _ffi.cast("float *", _ffi.from_buffer(array))


def _token_pointer(array: TokenArray) -> Any:
    return _ffi.cast("int32_t *", _ffi.from_buffer(array))


def _gate_nodes(gate: Gate) -> Any:
    nodes: tuple[GateNode, ...] = gate.nodes()
    return _ffi.new("pyfly_gate_node[]", [tuple(node) for node in nodes])


# ---- Rows and verification -------------------------------------------------------------------------------------------


class RowStatistics(NamedTuple):
    """Statistics of one logits row; p = softmax(row), logarithms natural."""

    argmax: int
    max: float
    log_sum_exp: float
    entropy: float
    top_entropy: float


def row_statistics(row: Any, top: int = 3) -> RowStatistics:
    """Statistics of row, float32 [V]; `top_entropy` is over the `top` (1..32) most probable tokens.

    Raises NotFiniteError for a row without a distribution (NaN, +inf, or -inf everywhere).
    """
    array = _floats("row", row, (None,))
    out = _ffi.new("pyfly_row_stats *")
    _check(_lib.pyfly_row_statistics, _float_pointer(array), array.shape[0], top, out)
    return RowStatistics(out.argmax, out.max, out.log_sum_exp, out.entropy, out.top_entropy)


def row_argmax(row: FloatArray) -> int:
    """Lowest index among the largest logits of a C-contiguous float32 row [V]; -1 for one without a distribution."""
    return int(_lib.pyfly_row_argmax(_float_pointer(row), row.shape[0]))


class RawDecision(NamedTuple):
    """`pyfly_decision` of pyfly.h."""

    reason: int
    choice: int
    entropy: float
    margin: float


def verify(
    logits: Any,
    draft: Any,
    gate: Gate,
    window: Window,
    protected: Iterable[int],
    target_tokens: Any | None,
) -> tuple[list[RawDecision], list[int]]:
    """One round, see `pyfly_cpp.verify`: the decision on every drafted position, and the emitted tokens."""
    draft_array = _tokens("draft", draft)
    n_draft = draft_array.shape[0]
    rows = _floats("logits", logits, (n_draft + 1, None))
    protected_array = _tokens("protected", sorted(protected))
    choices = None if target_tokens is None else _tokens("target_tokens", target_tokens, n_draft + 1)
    nodes = _gate_nodes(gate)
    config = _ffi.new("pyfly_window_config *", replace(window, across_rounds=False).config())
    decisions = _ffi.new("pyfly_decision[]", max(n_draft, 1))
    tokens = _ffi.new("int32_t[]", n_draft + 1)
    n_tokens = _ffi.new("size_t *")
    _check(
        _lib.pyfly_verify, _float_pointer(rows), rows.shape[1], _token_pointer(draft_array), n_draft,
        _ffi.NULL if choices is None else _token_pointer(choices), nodes, len(nodes), config,
        _token_pointer(protected_array), protected_array.shape[0], decisions, tokens, n_tokens,
    )  # fmt: skip
    judged = [RawDecision(d.reason, d.choice, d.entropy, d.margin) for d in decisions[0:n_draft]]
    return judged, list(tokens[0 : n_tokens[0]])


class ModelInfo(NamedTuple):
    """`pyfly_model_info` of pyfly.h."""

    architecture: str
    n_nextn: int
    mtp_draft_max: int


def inspect_model(path: str, wants_mtp: bool = False) -> ModelInfo:
    """What the header of a GGUF file says; ValueError if it is none, or one that would end the process as a target.
    With `wants_mtp` also if it has no MTP head that can be used."""
    info = _ffi.new("pyfly_model_info *")
    _check(_lib.pyfly_model_inspect, _ffi.new("char[]", path.encode("utf-8")), int(wants_mtp), info)
    architecture = _ffi.string(info.architecture).decode("utf-8", errors="replace")
    return ModelInfo(architecture, int(info.n_nextn), int(info.mtp_draft_max))


@contextlib.contextmanager
def load_guard() -> Iterator[None]:
    """Around llama.cpp's loading of a model or making of a context: an assertion that fails in there lets it fail, with
    what llama.cpp logs and returns then, instead of ending the process. On this thread alone."""
    _lib.pyfly_load_guard(1)
    try:
        yield
    finally:
        _lib.pyfly_load_guard(0)


# ---- Callbacks -------------------------------------------------------------------------------------------------------


def _on_error(exception: Any, value: BaseException | None, traceback: Any) -> None:
    _callback_failure.pending = value


@_ffi.def_extern(error=1, onerror=_on_error)  # type: ignore[untyped-decorator]
def pyfly_py_row(user: Any, history: Any, n_history: int, out: Any) -> int:
    target: ScriptedTarget = _ffi.from_handle(user)
    tokens = np.frombuffer(_ffi.buffer(history, n_history * 4), dtype=np.int32)
    row = np.frombuffer(_ffi.buffer(out, target.n_vocab * 4), dtype=np.float32)
    row[:] = target.row(tokens)
    return 0


@_ffi.def_extern(error=-1, onerror=_on_error)  # type: ignore[untyped-decorator]
def pyfly_py_draft(user: Any, history: Any, n_history: int, out: Any, capacity: int) -> int:
    drafter: CallbackDrafter = _ffi.from_handle(user)
    tokens = np.frombuffer(_ffi.buffer(history, n_history * 4), dtype=np.int32).astype(np.intc)
    proposal = _tokens("the drafter's proposal", drafter.propose_callback(tokens))[:capacity]
    _ffi.memmove(out, proposal, proposal.nbytes)
    return int(proposal.shape[0])


# ---- Handles ---------------------------------------------------------------------------------------------------------


class _Handle:
    """An owned pointer of pyfly.h; a context manager, freed once."""

    def __init__(self, new: Callable[..., int], free: Callable[[Any], None], kind: str, *arguments: Any) -> None:
        out = _ffi.new(f"{kind} **")
        _check(new, *arguments, out)
        self._free = free
        self.pointer = out[0]

    def close(self) -> None:
        """Frees the handle; a second call does nothing."""
        if self.pointer is not None:
            self._free(self.pointer)
            self.pointer = None

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "pointer", None) is not None:
            self.close()


class Target(_Handle):
    """What an engine verifies with."""

    def protect(self, protected: Iterable[int] = (), eog: Iterable[int] = ()) -> None:
        """Marks tokens that are never accepted loosely, and tokens that end a text."""
        a, b = _tokens("protected", sorted(protected)), _tokens("eog", sorted(eog))
        _check(_lib.pyfly_target_protect, self.pointer, _token_pointer(a), len(a), _token_pointer(b), len(b))

    @property
    def protected(self) -> frozenset[int]:
        """All protected tokens."""
        n = _lib.pyfly_target_protected(self.pointer, _ffi.NULL, 0)
        out = np.zeros(n, dtype=np.int32)
        _lib.pyfly_target_protected(self.pointer, _token_pointer(out), n)
        return frozenset(out.tolist())

    @property
    def can_rewind(self) -> bool:
        """Whether evaluated positions can be taken back, which speculation needs. Known once a prompt was evaluated."""
        return bool(_lib.pyfly_target_can_rewind(self.pointer))


class LlamaTarget(Target):
    """A llama_context as llama_cpp holds it (a ctypes pointer). Must be closed before the context is.

    `adapts`, `adapts_batch`: whether its thread counts for one token and for batches follow the load of the machine.
    """

    def __init__(self, context: Any, adapts: bool = False, adapts_batch: bool = False) -> None:
        adaptive = (
            _lib.PYFLY_THREADS_FIXED
            if not adapts
            else _lib.PYFLY_THREADS_ADAPT_ALL
            if adapts_batch
            else _lib.PYFLY_THREADS_ADAPT_SINGLE
        )
        super().__init__(
            _lib.pyfly_target_llama_new, _lib.pyfly_target_free, "pyfly_target",
            _ffi.cast("void *", _address(context)), adaptive,
        )  # fmt: skip

    def threads(self) -> _stats.Threads | None:
        """How the threads stand; None where their number is fixed."""
        out = _ffi.new("pyfly_threads *")
        _lib.pyfly_target_threads(self.pointer, out)
        return _stats.Threads(out.n, out.n_max, out.n_changes, out.n_trials) if out.n > 0 else None


class ScriptedTarget(Target):
    """A target for tests: `row(history) -> logits [n_vocab]` is the model."""

    def __init__(self, row: Callable[[TokenArray], Any], n_vocab: int, n_ctx: int = 4096, n_batch: int = 512) -> None:
        self.row = row
        self.n_vocab = n_vocab
        self._self = _ffi.new_handle(self)
        super().__init__(
            _lib.pyfly_target_scripted_new, _lib.pyfly_target_free, "pyfly_target",
            n_vocab, n_ctx, n_batch, _lib.pyfly_py_row, self._self,
        )  # fmt: skip

    def limit(self, n_snapshots: int, has_checkpoints: bool) -> None:
        """Makes it behave as a recurrent memory does."""
        _check(_lib.pyfly_target_scripted_limit, self.pointer, n_snapshots, int(has_checkpoints))


def _address(pointer: Any) -> int:
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


class Drafter(_Handle):
    """What proposes tokens."""

    name = "drafter"

    def propose(self, history: Sequence[int], n_max: int) -> list[int]:
        """One proposal for a history: at most n_max tokens."""
        tokens = _tokens("history", history)
        out = np.zeros(max(n_max, 1), dtype=np.int32)
        n_out = _ffi.new("int32_t *")
        _check(
            _lib.pyfly_drafter_propose,
            self.pointer,
            _token_pointer(tokens),
            len(tokens),
            n_max,
            _token_pointer(out),
            n_out,
        )
        return [int(token) for token in out[: n_out[0]]]

    @property
    def n_evaluated(self) -> int:
        """Tokens evaluated on a model of the drafter's own so far."""
        return int(_lib.pyfly_drafter_n_evaluated(self.pointer))


class LookupDrafter(Drafter):
    """Prompt lookup: n-grams of min_ngram_size..max_ngram_size tokens, n_predicted tokens at most. `match` is a
    `pyfly_lookup_match` of pyfly.h."""

    name = "prompt lookup"

    def __init__(self, max_ngram_size: int, min_ngram_size: int, n_predicted: int, match: int) -> None:
        super().__init__(
            _lib.pyfly_drafter_lookup_new, _lib.pyfly_drafter_free, "pyfly_drafter",
            max_ngram_size, min_ngram_size, n_predicted, match,
        )  # fmt: skip


class ModelDrafter(Drafter):
    """A draft model, loaded. `settings`: further fields of `pyfly_draft_model_config` of pyfly.h. Must be closed before
    its target is, like the drafters below."""

    name = "draft model"

    def __init__(self, target: LlamaTarget, model_path: str, p_min: float, **settings: int) -> None:
        self._target = target
        native, _path = _draft_model_config(model_path, p_min, settings)
        super().__init__(_lib.pyfly_drafter_model_new, _lib.pyfly_drafter_free, "pyfly_drafter", target.pointer, native)


class MTPDrafter(Drafter):
    """An MTP head, of the target's own file (`model_path` None) or of a companion. `is_loaded`: the target was loaded
    with its MTP blocks."""

    name = "MTP"

    def __init__(
        self,
        target: LlamaTarget,
        model_path: str | None,
        p_min: float,
        draft_max: int,
        is_loaded: bool,
        **settings: int,
    ) -> None:
        self._target = target
        native, _path = _draft_model_config(model_path, p_min, settings)
        super().__init__(
            _lib.pyfly_drafter_mtp_new, _lib.pyfly_drafter_free, "pyfly_drafter",
            target.pointer, native, draft_max, int(is_loaded),
        )  # fmt: skip


class Eagle3Drafter(Drafter):
    """An EAGLE-3 head, loaded."""

    name = "EAGLE-3"

    def __init__(self, target: LlamaTarget, model_path: str, p_min: float, **settings: int) -> None:
        self._target = target
        native, _path = _draft_model_config(model_path, p_min, settings)
        super().__init__(
            _lib.pyfly_drafter_eagle3_new, _lib.pyfly_drafter_free, "pyfly_drafter", target.pointer, native
        )


def _draft_model_config(path: str | None, p_min: float, settings: dict[str, int]) -> tuple[Any, Any]:
    """A pyfly_draft_model_config, and the buffer of its path, which must live as long."""
    buffer = _ffi.NULL if path is None else _ffi.new("char[]", path.encode("utf-8"))
    given = {"model_path": buffer, "p_min": p_min, "type_k": -1, "type_v": -1, **settings}
    return _ffi.new("pyfly_draft_model_config *", given), buffer


class CallbackDrafter(Drafter):
    """A callable from token ids (intc [n]) to token ids, such as a llama_cpp LlamaDraftModel."""

    name = "callable"

    def __init__(self, propose: Callable[[Any], Any]) -> None:
        self.propose_callback = propose
        self._self = _ffi.new_handle(self)
        super().__init__(
            _lib.pyfly_drafter_callback_new, _lib.pyfly_drafter_free, "pyfly_drafter", _lib.pyfly_py_draft, self._self
        )


class Engine(_Handle):
    """The round loop of one sequence on one target. Must be closed before its target and drafter are."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._drafters: list[tuple[Drafter, int]] = []
        self._sampler: Any = None  # what the running sequence's copy of the chain calls back into
        self.has_sequence = False
        """Whether a sequence runs: from `begin` to `end`, also after an error."""
        super().__init__(_lib.pyfly_engine_new, _lib.pyfly_engine_free, "pyfly_engine", target.pointer)
        self._n_left = _ffi.new("size_t *")
        self._n_records = _ffi.new("size_t *")
        self._stats = _ffi.new("pyfly_stats *")

    def configure(
        self,
        gate: Gate,
        window: Window,
        drafters: Sequence[tuple[Drafter, int]] = (),
        *,
        adaptive: bool = False,
        trace: bool = False,
        keep_rows: bool = False,
        resumable: bool = False,
    ) -> None:
        """Sets what the next sequence uses; an error changes nothing. `drafters` are given with their draft_max."""
        nodes = _gate_nodes(gate)
        config = _ffi.new(
            "pyfly_engine_config *",
            {
                "gate": nodes,
                "n_gate": len(nodes),
                "window": window.config(),
                "adaptive": int(adaptive),
                "trace": int(trace),
                "keep_rows": int(keep_rows),
                "resumable": int(resumable),
            },
        )
        natives = _ffi.new("pyfly_engine_drafter[]", [(drafter.pointer, k) for drafter, k in drafters])
        _check(_lib.pyfly_engine_configure, self.pointer, config, natives, len(natives))
        self._drafters = list(drafters)

    def begin(self, history: Any, n_evaluated: int = 0, sampler: Any = None) -> None:
        """Starts a sequence of which the target's memory holds the first n_evaluated tokens. `sampler` is a
        llama_cpp LlamaSampler, whose chain is copied and whose Python functions are kept alive, or None for the argmax.
        An error leaves the sequence as it was that ran before, unless the target's memory could not be rolled back."""
        tokens = _tokens("the prompt", history)
        chain = _ffi.NULL if sampler is None else _ffi.cast("void *", _address(sampler.sampler))
        _check(_lib.pyfly_engine_begin, self.pointer, _token_pointer(tokens), len(tokens), n_evaluated, chain)
        self._sampler = sampler  # not before: the copy that was replaced called back into the old one
        self.has_sequence = True

    def resume(self, n_keep: int, tokens: Any) -> None:
        """Goes on behind the first n_keep tokens, which end with one that the last round committed, with the caller's
        tokens; the sampler is as it was there."""
        array = _tokens("what was sent", tokens)
        _check(_lib.pyfly_engine_resume, self.pointer, n_keep, _token_pointer(array), len(array))

    def prefill(self, all_rows: bool = False) -> int:
        """Evaluates at most one batch of the prompt; returns how many tokens are left to do so."""
        _check(_lib.pyfly_engine_prefill, self.pointer, int(all_rows), self._n_left)
        return int(self._n_left[0])

    def prompt_row(self, position: int, n_vocab: int) -> FloatArray | None:
        """A copy of the raw logits row that follows a prompt token of the last prefill with all_rows."""
        return self._row(_lib.pyfly_engine_prompt_row(self.pointer, position), n_vocab)

    def round(self, n_room: int = 2**31 - 1) -> int:
        """One round; returns how many tokens it committed."""
        _check(_lib.pyfly_engine_round, self.pointer, n_room, self._n_records)
        return int(self._n_records[0])

    def tokens(self) -> list[tuple[int, int]]:
        """(position, token) of what the last round committed."""
        records = _lib.pyfly_engine_records(self.pointer)
        return [(records[i].position, records[i].token) for i in range(self._n_records[0])]

    def record(self, i: int) -> _stats.Record:
        """Record i of the last round."""
        r = _lib.pyfly_engine_records(self.pointer)[i]
        rejected = _lib.pyfly_engine_rejected(self.pointer)
        return _stats.Record(
            position=r.position,
            token=r.token,
            origin=_stats.ORIGINS[r.origin],
            choice=r.choice,
            depth=r.depth,
            reason="bonus" if r.reason < 0 else _stats.REASONS[r.reason],
            round=r.round,
            entropy=r.entropy,
            margin=r.margin,
            logprob=r.logprob,
            rejected=tuple(rejected[j] for j in range(r.rejected_begin, r.rejected_end)),
        )

    def record_row(self, i: int, n_vocab: int) -> FloatArray | None:
        """A copy of the raw logits row behind record i of the last round; None unless rows are kept."""
        return self._row(_lib.pyfly_engine_record_row(self.pointer, i), n_vocab)

    @staticmethod
    def _row(pointer: Any, n_vocab: int) -> FloatArray | None:
        if pointer == _ffi.NULL:
            return None
        row: FloatArray = np.frombuffer(_ffi.buffer(pointer, n_vocab * 4), dtype=np.float32).copy()
        return row

    def history(self) -> TokenArray:
        """A copy of every token the engine holds; inside a logits processor: the tokens before the row it sees."""
        n = _ffi.new("size_t *")
        pointer = _lib.pyfly_engine_history(self.pointer, n)
        return np.frombuffer(_ffi.buffer(pointer, n[0] * 4), dtype=np.int32).copy() if n[0] else np.zeros(0, np.int32)

    @property
    def n_evaluated(self) -> int:
        """Positions of the sequence that the target's memory holds."""
        return int(_lib.pyfly_engine_n_evaluated(self.pointer))

    def park(self, n_keep: int) -> None:
        """Makes the target's memory hold exactly n_keep positions, for others to look at between two rounds."""
        _check(_lib.pyfly_engine_park, self.pointer, n_keep)

    def end(self, n_keep: int) -> None:
        """Ends the sequence; the target's memory keeps at most its first n_keep positions."""
        try:
            _check(_lib.pyfly_engine_end, self.pointer, n_keep)
        finally:
            self._sampler = None
            self.has_sequence = False

    def counters(self) -> dict[str, Any]:
        """The counters as fields of `pyfly_cpp.Stats`."""
        s = self._stats
        _lib.pyfly_engine_stats(self.pointer, s)
        drafted = list(s.drafted_at)
        n_depth = max((i + 1 for i, n in enumerate(drafted) if n), default=0)
        names = (
            "rounds", "drafted", "committed", "matched", "loose_accepted", "rejected_gate", "rejected_window",
            "rejected_boundary", "rejected_safety", "rollbacks", "rolled_back", "window_fallbacks",
            "prefilled", "replayed", "checkpoints",
        )  # fmt: skip
        return {
            **{name: int(getattr(s, name)) for name in names},
            "drafted_at_depth": tuple(drafted[:n_depth]),
            "accepted_at_depth": tuple(list(s.accepted_at)[:n_depth]),
            "accepted_by": tuple(s.accepted_by),
            "mean_margin_loose": s.sum_margin_loose / s.loose_accepted if s.loose_accepted else math.nan,
            "mean_margin_rejected": s.sum_margin_rejected / s.n_margin_rejected if s.n_margin_rejected else math.nan,
            **{f"seconds_{part}": getattr(s, f"us_{part}") / 1e6 for part in ("prefill", "draft", "verify", "gate")},
        }

    def accepted(self) -> tuple[int, int, int]:
        """The counters drafted, matched and loose_accepted: cheap enough for every round."""
        _lib.pyfly_engine_stats(self.pointer, self._stats)
        return int(self._stats.drafted), int(self._stats.matched), int(self._stats.loose_accepted)

    def governor(self) -> _stats.Governor:
        """What the governor has learned."""
        state = _ffi.new("pyfly_governor_state *")
        _lib.pyfly_engine_governor(self.pointer, state)
        most = _lib.PYFLY_MAX_DEPTH
        n_rows = min(max((k for _, k in self._drafters), default=0), most) + 1

        def by_drafter(values: Any, scale: float) -> tuple[tuple[str, tuple[float, ...]], ...]:
            return tuple(
                (d.name, tuple(values[i * most + j] * scale for j in range(min(k, most))))
                for i, (d, k) in enumerate(self._drafters)
            )

        return _stats.Governor(
            target_seconds=tuple(us / 1e6 for us in list(state.target_us)[:n_rows]),
            draft_seconds=by_drafter(state.draft_us, 1e-6),
            catch_up_seconds=tuple((d.name, state.catch_up_us[i] / 1e6) for i, (d, _) in enumerate(self._drafters)),
            acceptance_at_depth=by_drafter(state.acceptance, 1.0),
            rounds_at=tuple(list(state.rounds_at)[:n_rows]),
        )

    def reset_counters(self) -> None:
        """Sets all counters to 0."""
        _lib.pyfly_engine_reset_stats(self.pointer)
