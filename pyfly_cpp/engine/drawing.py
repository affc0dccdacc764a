"""Draws a token from a row of logits outside of the batch."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp
import numpy as np

from pyfly_cpp.engine.output import Row

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


def draw(chain: Any, row: Row) -> int | None:
    """The token that a llama_sampler chain chooses by a row of logits [n_vocab], and accepts. None, and nothing is
    accepted, if a sampler is missing (a grammar that llama.cpp could not parse) or the row has no distribution: NaN,
    +inf, or -inf everywhere."""
    n_samplers = llama_cpp.llama_sampler_chain_n(chain)
    if not all(llama_cpp.llama_sampler_chain_get(chain, i) for i in range(n_samplers)):
        return None
    candidates = np.zeros(len(row), _CANDIDATE)
    candidates["id"], candidates["logit"] = np.arange(len(row)), row
    data = candidates.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
    array = llama_cpp.llama_token_data_array(data=data, size=len(row), selected=-1, sorted=False)
    if not _has_distribution(row):
        return None
    llama_cpp.llama_sampler_apply(chain, ctypes.byref(array))
    if array.selected < 0 or not _has_distribution(candidates["logit"][: array.size]):
        return None
    token = int(candidates["id"][array.selected])
    llama_cpp.llama_sampler_accept(chain, token)
    return token


def _has_distribution(row: Row) -> bool:
    return bool(np.isfinite(row.max()))  # NaN is the maximum of a row that has one
