"""What the memory of a context (K and V) depends on, besides its tokens: the one place that names it.

States and prompt caches carry such a key. Where it differs from that of a context, what they hold was computed in
another way, and llama.cpp would use it without a word.
"""

from __future__ import annotations

import os
import re
from typing import Any

import llama_cpp

from pyfly_cpp.engine.adapters import Applied

_WORDS = {
    "model": "another model",
    "kv_overrides": "other kv_overrides",
    "adapters": "other LoRA adapters or scales of them",
    "control_vector": "another control vector",
    "caches": "other types of the K or V cache",
    "is_rotated": "another choice of LLAMA_ATTN_ROT_DISABLE",
    "rope": "other settings of RoPE",
    "layout": "another layout of the cache (flash_attn, swa_full)",
    "llama_cpp_python": "another release of llama-cpp-python",
}
"""The names of a key, and what it means for people if the values differ."""

_ROPE = ("rope_scaling_type", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor",
         "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx", "attention_type")  # fmt: skip
_NOT_QUANTISED = (llama_cpp.GGML_TYPE_F32, llama_cpp.GGML_TYPE_F16, 30)  # 30: BF16


def may_rotate() -> bool:
    """Whether contexts that are made now rotate quantised caches where llama.cpp can, by the environment."""
    number = re.match(r"\s*[+-]?\d+", os.environ.get("LLAMA_ATTN_ROT_DISABLE", ""))  # as C's atoi reads it
    return number is None or int(number[0]) == 0


def kv_key(
    model: str, overrides: Any, params: Any, adapters: Applied, may_rotate: bool, has_long_rope: bool
) -> dict[str, Any]:
    """The key of a context, fit for JSON.

    Args:
        model: What tells the model's file from others.
        overrides: Metadata that was set instead of the file's; None: none.
        params: The llama_context_params.
        adapters: Those that the memory was computed with.
        may_rotate: What `may_rotate` was when the context was made.
        has_long_rope: Whether the size of the context has the model use its long one of two RoPE scalings.
    """
    caches = [int(params.type_k), int(params.type_v)]
    return {
        "model": model,
        "kv_overrides": sorted(f"{name}={value!r}" for name, value in (overrides or {}).items()),
        "adapters": [list(lora) for lora in adapters.loras],
        "control_vector": adapters.control,
        "caches": caches,
        "is_rotated": may_rotate and any(kind not in _NOT_QUANTISED for kind in caches),
        "rope": [*(getattr(params, name) for name in _ROPE), has_long_rope],
        "layout": [int(params.flash_attn_type), bool(params.swa_full)],
        "llama_cpp_python": llama_cpp.__version__,
    }


def difference(one: Any, other: dict[str, Any]) -> str | None:
    """The first thing by which two keys differ, for people; None: nothing."""
    if not isinstance(one, dict):
        return "nothing known of the settings"
    return next((words for name, words in _WORDS.items() if one.get(name) != other[name]), None)
