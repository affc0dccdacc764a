"""Whether a token has the same bits alone and in a batch: then drafts and other requests change no answer.

It is true of a loaded model and its context, not of a machine or an architecture: our kernels compute products and
attention that way, and whatever is left to llama.cpp does not.
"""

from __future__ import annotations

from typing import Any

import llama_cpp

from pyfly_cpp import _native

_MOST_NAMED = 3
"""Most weights that a reason names one by one."""


def reasons(context: Any) -> tuple[str, ...]:
    """The reasons why a token may have other bits in a batch than alone; none if it has the same.

    Args:
        context: A llama_context as llama_cpp holds it (a ctypes pointer), idle; it keeps what it holds.

    Raises:
        NativeError: this release of llama.cpp shows no graphs, so nobody knows.
    """
    found = [one for one in _native.graph_products(context) if not one.is_ours]
    said = []
    model = llama_cpp.llama_get_model(context)
    if llama_cpp.llama_model_is_hybrid(model) and llama_cpp.llama_model_n_swa(model) > 0:
        said.append("rejected drafts are taken back through saved states, whose cells are added up in another order")
    keys = {one.type for one in found if one.op == "FLASH_ATTN_EXT"}
    if keys:
        said.append(
            "llama.cpp computes its attention, whose queries are not products of packed weights"
            if keys == {"f16"}
            else f"llama.cpp computes attention to a cache in {', '.join(sorted(keys - {'f16'})).upper()}"
        )
    others = [one for one in found if one.op != "FLASH_ATTN_EXT" and not one.weights.startswith("attn_inp_")]
    if any(one.weights.startswith("cache_") for one in others):
        said.append("attention runs without flash attention")
    if any(_is_of_adapter(one.weights) for one in others):
        said.append("a LoRA adapter is loaded")
    weights = [
        f"{one.weights} ({one.type.upper()})"
        for one in others
        if one.weights and not one.weights.startswith("cache_") and not _is_of_adapter(one.weights)
    ]
    if weights:
        more = f" and {len(weights) - _MOST_NAMED} more" if len(weights) > _MOST_NAMED else ""
        said.append(f"llama.cpp multiplies by {', '.join(weights[:_MOST_NAMED])}{more}")
    if any(not one.weights for one in others) and not any(one.weights.startswith("cache_") for one in others):
        said.append("llama.cpp multiplies matrices that it has computed")
    return tuple(said)


def _is_of_adapter(weights: str) -> bool:
    return weights.endswith((".lora_a", ".lora_b"))
