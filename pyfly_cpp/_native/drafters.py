"""Drafters: what proposes tokens. One class for each constructor of pyfly.h."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pyfly_cpp._native.boundary import Handle, check, keep_failure, token_pointer, tokens
from pyfly_cpp._native.library import ffi, lib
from pyfly_cpp._native.model import LlamaTarget


class Drafter(Handle):
    """What proposes tokens."""

    name = "drafter"

    def __init__(self, new: Callable[..., int], *arguments: Any) -> None:
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
    """Prompt lookup: n-grams of min_ngram_size..max_ngram_size tokens, n_predicted tokens at most. `match` is a
    `pyfly_lookup_match` of pyfly.h."""

    name = "prompt lookup"

    def __init__(self, max_ngram_size: int, min_ngram_size: int, n_predicted: int, match: int) -> None:
        super().__init__(lib.pyfly_drafter_lookup_new, max_ngram_size, min_ngram_size, n_predicted, match)


class ModelDrafter(Drafter):
    """A draft model, loaded. `settings`: further fields of `pyfly_draft_model_config` of pyfly.h. Must be closed before
    its target is, like the drafters below."""

    name = "draft model"

    def __init__(self, target: LlamaTarget, model_path: str, p_min: float, **settings: int) -> None:
        self._target = target
        config, _path = _draft_model_config(model_path, p_min, settings)
        super().__init__(lib.pyfly_drafter_model_new, target.pointer, config)


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
        config, _path = _draft_model_config(model_path, p_min, settings)
        super().__init__(lib.pyfly_drafter_mtp_new, target.pointer, config, draft_max, int(is_loaded))


class Eagle3Drafter(Drafter):
    """An EAGLE-3 head, loaded."""

    name = "EAGLE-3"

    def __init__(self, target: LlamaTarget, model_path: str, p_min: float, **settings: int) -> None:
        self._target = target
        config, _path = _draft_model_config(model_path, p_min, settings)
        super().__init__(lib.pyfly_drafter_eagle3_new, target.pointer, config)


def _draft_model_config(path: str | None, p_min: float, settings: dict[str, int]) -> tuple[Any, Any]:
    """A pyfly_draft_model_config, and the buffer of its path, which must live as long."""
    buffer = ffi.NULL if path is None else ffi.new("char[]", path.encode("utf-8"))
    given = {"model_path": buffer, "p_min": p_min, "type_k": -1, "type_v": -1, **settings}
    return ffi.new("pyfly_draft_model_config *", given), buffer


class CallbackDrafter(Drafter):
    """A callable from token ids (intc [n]) to token ids, such as a llama_cpp LlamaDraftModel."""

    name = "callable"

    def __init__(self, propose: Callable[[Any], Any]) -> None:
        self.propose_callback = propose
        self._self = ffi.new_handle(self)
        super().__init__(lib.pyfly_drafter_callback_new, lib.pyfly_py_draft, self._self)


@ffi.def_extern(error=-1, onerror=keep_failure)  # type: ignore[untyped-decorator]
def pyfly_py_draft(user: Any, history: Any, n_history: int, out: Any, capacity: int) -> int:
    """The proposal of a CallbackDrafter."""
    drafter: CallbackDrafter = ffi.from_handle(user)
    seen = np.frombuffer(ffi.buffer(history, n_history * 4), dtype=np.int32).astype(np.intc)
    proposal = tokens("the drafter's proposal", drafter.propose_callback(seen))[:capacity]
    ffi.memmove(out, proposal, proposal.nbytes)
    return int(proposal.shape[0])
