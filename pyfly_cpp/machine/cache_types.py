"""The types of a KV cache: their names, and which go together."""

from __future__ import annotations

from typing import Any

from pyfly_cpp.errors import ArgumentError
from pyfly_cpp.machine.releases import CACHE_TYPES
from pyfly_cpp.ranges import is_integer

CACHE_WORDS = {name.lower(): number for number, name in CACHE_TYPES.items()}
"""Numbers of the types, by their names on the command line."""

_PLAIN = ("F32", "F16", "BF16")


def needs_flash_attention(type_v: int | None) -> bool:
    """Whether llama.cpp needs flash attention for a V cache of this type: a quantised one."""
    return type_v is not None and CACHE_TYPES[type_v] not in _PLAIN


def require_cache_types(type_k: Any, type_v: Any, flash_attn: object = None) -> None:
    """Raises ValueError unless both are None (F16) or in CACHE_TYPES, and `flash_attn` is not off (None: nobody said)
    where the V cache needs it."""
    for name, value in (("type_k", type_k), ("type_v", type_v)):
        if value is None:
            continue
        if not is_integer(value) or value not in CACHE_TYPES:
            known = ", ".join(f"{number} ({text})" for number, text in CACHE_TYPES.items())
            raise ValueError(f"{name} must be a type that a KV cache can have, one of {known}, not {value!r}.")
    if needs_flash_attention(type_v) and flash_attn is not None and not flash_attn:
        raise ArgumentError(
            f"a V cache of type {CACHE_TYPES[type_v]} ({{type_v}}) needs flash attention; add {{flash_attn}}."
        )
