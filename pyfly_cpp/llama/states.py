"""Saving and loading the state of a sequence, without the logits of all its positions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama import LlamaState

from pyfly_cpp.errors import ArgumentError, NativeError
from pyfly_cpp.machine.interrupts import interrupts_deferred


def save_state(llm: Any) -> LlamaState:
    """The state of a GuardedLlama, which a plain llama_cpp.Llama can also load."""
    context = llm._ctx.ctx
    buffer = (ctypes.c_uint8 * llama_cpp.llama_state_get_size(context))()
    n = llama_cpp.llama_state_get_data(context, buffer, len(buffer))
    return _state(llm, llm.input_ids.copy(), llm.n_tokens, bytes(memoryview(buffer)[:n]))


def made_state(llm: Any, tokens: Sequence[int], content: bytes, kept: list[tuple[int, bytes]]) -> LlamaState:
    """A state with the seed of now, of what a file has kept: its tokens, the bytes of llama.cpp and `kept_states`."""
    state = _state(llm, np.array(tokens, dtype=np.intc), len(tokens), content)
    state.kept = kept
    return state


def _state(llm: Any, ids: npt.NDArray[np.intc], n_tokens: int, content: bytes) -> LlamaState:
    return LlamaState(
        scores=np.zeros((1, llm.n_vocab()), dtype=np.single),  # one row fits a plain Llama's array by broadcast
        input_ids=ids,
        n_tokens=n_tokens,
        llama_state=content,
        llama_state_size=len(content),
        seed=llm._seed,
    )


_MOST_KEPT = 2
"""States of a recurrent memory that go with a saved one: where the last message ends, and where the prompt does."""


def kept_states(llm: Any) -> list[tuple[int, bytes]]:
    """Of a recurrent memory, (n, state behind the first n tokens): places that a longer or another prompt can begin at.
    Empty for other memories, which can be cut anywhere."""
    kept: list[tuple[int, bytes]] = llm.loaded.decoder.slot.kept(llm.input_ids[: llm.n_tokens])
    return kept[-_MOST_KEPT:]


def restore_kept(llm: Any, states: list[tuple[int, bytes]]) -> None:
    """Gives back the result of `kept_states` with the state that it was saved with."""
    for n, state in states:
        llm.loaded.decoder.slot.restore_kept(llm.input_ids[:n], state)


def load_state(llm: Any, state: LlamaState, with_scores: bool, before: Callable[[], None]) -> None:
    """Restores a state; `before` is called once it was found to fit. See `FlyLlama.load_state` for what is raised."""
    n, n_bytes = state.n_tokens, len(state.llama_state)
    if not 0 <= n <= min(llm.n_ctx(), len(state.input_ids)):
        raise ArgumentError(f"the saved state holds {n} tokens and the context {llm.n_ctx()}; raise {{n_ctx}}.")
    scores = np.broadcast_to(state.scores, (n, llm.n_vocab())) if with_scores else None
    data = (ctypes.c_uint8 * n_bytes).from_buffer_copy(state.llama_state)
    before()
    with interrupts_deferred():
        if llama_cpp.llama_state_set_data(llm._ctx.ctx, data, n_bytes) != n_bytes:
            llm.reset()
            llm._ctx.kv_cache_clear()
            raise NativeError(
                "llama.cpp refused the saved state: it comes from another model, release or other context settings; "
                "the sequence was reset."
            )
        llm.input_ids[:n] = state.input_ids[:n]
        llm.n_tokens = n
        llm._requires_eval = True
        llm._seed = state.seed
        if scores is not None:
            llm.scores[:n] = scores
