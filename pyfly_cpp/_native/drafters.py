"""Drafters: what proposes tokens. Opened by a constructor's name in pyfly.h, so that a new one needs nothing here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pyfly_cpp._native.boundary import NativeHandle, TokenArray, check, floats, keep_failure, token_pointer, tokens
from pyfly_cpp._native.library import ffi, lib
from pyfly_cpp._native.targets import LlamaTarget, RowSource


class Drafter(NativeHandle):
    """What proposes tokens: what `pyfly_drafter_<kind>_new` of pyfly.h makes of `arguments`. `name`: for people."""

    def __init__(self, name: str, kind: str, *arguments: Any) -> None:
        self.name = name
        new = getattr(lib, f"pyfly_drafter_{kind}_new")
        super().__init__(new, lib.pyfly_drafter_free, "pyfly_drafter", *arguments)

    def propose(self, history: Sequence[int], n_max: int) -> list[int]:
        """One proposal for a history: at most n_max tokens."""
        array = tokens("history", history)
        out = np.zeros(max(n_max, 1), dtype=np.int32)
        n_out = ffi.new("int32_t *")
        check(
            lib.pyfly_drafter_propose, self.pointer, token_pointer(array), len(array), n_max, token_pointer(out), n_out
        )
        return [int(token) for token in out[: n_out[0]]]

    @property
    def n_evaluated(self) -> int:
        """Tokens evaluated on a model of the drafter's own so far."""
        return int(lib.pyfly_drafter_n_evaluated(self.pointer))


class LookupDrafter(Drafter):
    """Prompt lookup.

    Args:
        target: Of whose requests answers are remembered; None: it is not used in a batch.
        config: `pyfly_lookup_config` of pyfly.h.
        texts: Further tokens to look in, -1 between two texts.
        answers: What is remembered at first, likewise.
        on_keep: Called with what is remembered, to keep it, when it is closed and before.
    """

    def __init__(
        self,
        target: LlamaTarget | None,
        config: Sequence[int],
        texts: TokenArray,
        answers: TokenArray,
        on_keep: Callable[[TokenArray], None] | None = None,
    ) -> None:
        self._on_keep = on_keep
        super().__init__(
            "prompt lookup", "lookup", ffi.NULL if target is None else target.pointer,
            ffi.new("pyfly_lookup_config *", config), token_pointer(texts), len(texts),
            token_pointer(answers), len(answers),
        )  # fmt: skip

    @property
    def answers(self) -> TokenArray:
        """The tokens [n] of owner 0 that are remembered, the oldest answer first, -1 behind each."""
        n_out = ffi.new("size_t *")
        out = np.zeros(0, dtype=np.int32)
        for _ in range(2):
            out = np.zeros(int(n_out[0]), dtype=np.int32)
            check(lib.pyfly_drafter_lookup_answers, self.pointer, token_pointer(out), len(out), n_out)
        return out

    def keep(self) -> None:
        """Lets what is remembered be kept."""
        if self.pointer is not None and self._on_keep is not None:
            self._on_keep(self.answers)

    def close(self) -> None:
        try:
            self.keep()
        finally:
            super().close()


class ModelDrafter(Drafter):
    """A drafter with a model of its own, loaded: one whose constructor takes a target and a `pyfly_draft_model_config`.
    Must be closed before its target is.

    Args:
        model_path: None if the model is in the target's file.
        more: What the constructor takes after the config.
        devices: Addresses (integers) of the ggml_backend_devs for the model; None: see `pyfly_draft_model_config`.
        settings: Further fields of the config, integers.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        target: LlamaTarget,
        model_path: str | None,
        p_min: float,
        *more: Any,
        devices: Any = None,
        **settings: Any,
    ) -> None:
        self._target = target
        path = ffi.NULL if model_path is None else ffi.new("char[]", model_path.encode("utf-8"))
        given = {"model_path": path, "p_min": p_min, "type_k": -1, "type_v": -1, **settings}
        if devices is not None:
            listed = ffi.new("void *[]", [ffi.cast("void *", address) for address in (*devices, 0)])
            given["devices"] = listed
        super().__init__(name, kind, target.pointer, ffi.new("pyfly_draft_model_config *", given), *more)

    def translate(self, history: Sequence[int]) -> list[int]:
        """A text as the model of another vocabulary sees it; ValueError for other drafters."""
        array = tokens("history", history)
        n_out = ffi.new("size_t *")
        out = np.zeros(0, dtype=np.int32)
        for _ in range(2):
            out = np.zeros(max(int(n_out[0]), 1), dtype=np.int32)
            check(
                lib.pyfly_drafter_translate, self.pointer, token_pointer(array), len(array), token_pointer(out),
                len(out), n_out,
            )  # fmt: skip
        return [int(token) for token in out[: n_out[0]]]


class CallbackDrafter(Drafter):
    """A callable from token ids (intc [n]) to token ids, such as a llama_cpp LlamaDraftModel. With n_vocab > 0 it
    returns token ids and their rows, float32 [tokens, n_vocab]."""

    def __init__(self, propose: Callable[[Any], Any], n_vocab: int = 0) -> None:
        self.propose_callback = propose
        self.n_vocab = n_vocab
        self._self = ffi.new_handle(self)
        super().__init__("callable", "callback", lib.pyfly_py_draft, self._self, n_vocab)


class RowDrafter(Drafter):
    """A drafter whose rows the caller gives: `row(history) -> logits [n_vocab]`."""

    def __init__(self, row: Callable[[TokenArray], Any], n_vocab: int) -> None:
        self._source = RowSource(row, n_vocab)
        super().__init__("rows", "rows", lib.pyfly_py_row, self._source.handle, n_vocab)


@ffi.def_extern(error=-1, onerror=keep_failure)  # type: ignore[untyped-decorator]
def pyfly_py_draft(user: Any, history: Any, n_history: int, out: Any, rows: Any, capacity: int) -> int:
    """The proposal of a CallbackDrafter."""
    drafter: CallbackDrafter = ffi.from_handle(user)
    seen = np.frombuffer(ffi.buffer(history, n_history * 4), dtype=np.int32).astype(np.intc)
    proposed = drafter.propose_callback(seen)
    proposal = tokens("the drafter's proposal", proposed[0] if drafter.n_vocab else proposed)[:capacity]
    ffi.memmove(out, proposal, proposal.nbytes)
    if rows != ffi.NULL:
        given = floats("the drafter's rows", proposed[1][: len(proposal)], (len(proposal), drafter.n_vocab))
        ffi.memmove(rows, given, given.nbytes)
    return int(proposal.shape[0])
