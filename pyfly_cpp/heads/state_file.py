"""The states file: for every token of the texts, the inputs of the target's chosen layers, its last state and its most
probable next tokens. One memory-mapped file, written text by text, so that an interrupted run resumes from there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pyfly_cpp.errors import NotFiniteError
from pyfly_cpp.heads.texts import Tell, Text
from pyfly_cpp.llama.fly_llama import FlyLlama
from pyfly_cpp.machine.files import resumable

N_TOP = 16
"""Tokens of the target's row that are kept."""

N_LAYERS = 3
"""Layers whose inputs a head reads."""

MOST_LOST = 3
"""Most consecutive texts whose states are not numbers. With more, the model is damaged."""

Rows = npt.NDArray[Any]


def row_type(n_embd: int) -> np.dtype[Any]:
    """The record of a token: itself, the most probable next ones with log probabilities in nats, the layers' inputs
    side by side [N_LAYERS * n_embd], and what the output matrix reads [n_embd]."""
    return np.dtype([
        ("token", "<i4"), ("ids", "<i4", N_TOP), ("log_probs", "<f2", N_TOP), ("inputs", "<f2", N_LAYERS * n_embd),
        ("final", "<f2", n_embd),
    ])  # fmt: skip


def write_states(
    path: Path, llm: FlyLlama, texts: Sequence[Text], layers: Sequence[int], deadline: float, tell: Tell
) -> int:
    """Evaluates the texts that are not yet in the file, until a time (`time.monotonic`); returns how many are in it.
    A text with a state that is not a number has rows without next tokens (`ids` -1).

    Raises:
        NotFiniteError: more than `MOST_LOST` texts in a row are such; IncompatibleDraftError: the layers cannot be
            read.
        OutputError: the disk is full; what was written stays.
    """
    n_embd = llm.n_embd()
    kind = row_type(n_embd)
    ends = np.cumsum([len(text.tokens) for text in texts])
    n_rows = path.stat().st_size // kind.itemsize if path.exists() else 0
    n_done = int(np.searchsorted(ends, n_rows, side="right"))
    n_lost = 0
    with resumable(path), path.open("ab") as file:
        file.truncate(int(ends[n_done - 1]) * kind.itemsize if n_done else 0)
        for text in texts[n_done:]:
            if time.monotonic() > deadline:
                break
            tell("reading hidden states", float(n_done / len(texts)))
            rows = np.zeros(len(text.tokens), kind)
            rows["token"], rows["ids"] = text.tokens, -1
            try:
                states = llm.loaded.decoder.target.states(layers, text.tokens, N_TOP, n_embd)
                rows["ids"], rows["inputs"], rows["final"] = states.ids, states.inputs, states.final
                rows["log_probs"] = np.maximum(states.log_probs, -6e4)
                n_lost = 0
            except NotFiniteError:
                n_lost += 1
                if n_lost > MOST_LOST:
                    raise
                # Attention multiplies old values of the cache by zero, and NaN stays NaN.
                llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True)
            file.write(rows.tobytes())
            file.flush()
            n_done += 1
    return n_done


def read_states(path: Path, n_embd: int) -> Rows:
    """All rows [tokens], memory-mapped."""
    kind = row_type(n_embd)
    return np.memmap(path, kind, "r") if path.stat().st_size else np.zeros(0, kind)
