"""Arguments that a model cannot be loaded with, and attributes that it has not, in sentences that name the remedy."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import llama_cpp

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.decoding.drafters.drafter import field_names
from pyfly_cpp.errors import ArgumentError, did_you_mean
from pyfly_cpp.machine.cache_types import require_cache_types
from pyfly_cpp.ranges import require_integer

BASE_DEFAULTS = {
    name: parameter.default
    for base in reversed(llama_cpp.Llama.__mro__[:-1])  # somebody's own subclass may take (*args, **kwargs)
    for name, parameter in inspect.signature(base.__init__).parameters.items()
    if parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    and name not in ("self", "model_path")
}
"""The arguments of llama_cpp.Llama, with their defaults."""
_FORMER = frozenset(("f16_kv", "low_vram", "mul_mat_q", "n_gqa", "n_parts", "rms_norm_eps"))
"""Arguments of earlier releases of llama-cpp-python, which callers still give (LangChain's LlamaCpp) and it ignores."""


def require_base_arguments(arguments: dict[str, Any], own: Iterable[str], who: str) -> None:
    """Removes arguments that llama_cpp.Llama had once. Raises ValueError unless the others are its arguments, and sizes
    and cache types are possible. `own`: names of the arguments that `who` has besides, for the hint."""
    for name in _FORMER & arguments.keys():
        del arguments[name]
    unknown = [name for name in arguments if name not in BASE_DEFAULTS]
    if unknown:
        names = [*BASE_DEFAULTS, *(name for name in own if name not in ("self", "kwargs"))]
        raise ValueError(f"{who} has no argument {unknown[0]!r}.{did_you_mean(unknown[0], names)}")
    for name, least in (("n_ctx", 0), ("n_batch", 1), ("n_ubatch", 0)):
        require_integer(name, arguments.get(name, least), least)
    require_cache_types(arguments.get("type_k"), arguments.get("type_v"), arguments.get("flash_attn"))


_SETTINGS = ("decoding", *field_names(Decoding), "on_prefill", "protected", "trace")
"""Attributes that may be set on a FlyLlama, besides the attributes of the base class."""


def require_attribute(kind: type, name: str, is_loaded: bool) -> None:
    """Raises ValueError for a new attribute of an object of this class that would set nothing.

    Attributes that the base class sets while it loads, and those of somebody's own subclass, are their business; but no
    name may be nearly, but not quite, a setting's.
    """
    if name.startswith("_") or name in _SETTINGS or hasattr(kind, name):
        return
    is_ours = is_loaded and kind.__module__.startswith("pyfly_cpp.")
    near = did_you_mean(name, _SETTINGS, 0.6 if is_ours else 0.8)
    if near or is_ours:
        raise ValueError(
            f"a {kind.__name__} has no setting {name!r}.{near or ' Attributes of your own need a subclass.'}"
        )


def within_positions(n_ctx: int, n_positions: int, model_path: str) -> int:
    """Most tokens of a request of n_ctx, 0: as many as there can be, if the embeddings of positions are learned; behind
    the last one llama.cpp ends the process. Raises ValueError if n_ctx is more."""
    if n_ctx > n_positions:
        raise ArgumentError(
            f"{{n_ctx}} is {n_ctx}, but {model_path!r} has learned embeddings of {n_positions} positions and no more; "
            f"lower {{n_ctx}} to at most {n_positions}."
        )
    return n_ctx or n_positions


def require_adapter(adapter: Any, lora_path: str | None, model_path: str) -> None:
    """Raises ValueError if llama.cpp gave a null pointer instead of a LoRA adapter."""
    if not adapter:
        raise ArgumentError(
            f"{lora_path!r} cannot be used as a LoRA adapter: it is damaged, or was not made for {model_path!r}{{log}}"
            "; {verbose} shows the reason."
        )


def why_not_loaded(error: ValueError, model_path: str, context_params: Any, has_servers: bool) -> str | None:
    """The meaning of llama-cpp-python's error, as `ArgumentError` takes it; None: it explains itself.

    Args:
        error: What its constructor raised.
        model_path: The file.
        context_params: The llama_context_params that were asked for; None: it did not get so far.
        has_servers: Whether RPC servers hold a part of the model.
    """
    if "Failed to create llama_context" in str(error):
        has_flash = context_params.flash_attn_type == llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        remedy = ", leave out {flash_attn}" if has_flash else ""  # some graphs lack it
        return (
            f"llama.cpp could not make a context for {model_path!r}: there is too little memory for it, or the "
            f"file is damaged{{log}}; lower {{n_ctx}} or {{n_batch}}{remedy}, or let {{verbose}} show why."
        )
    if "Failed to load model" in str(error):
        return (
            f"llama.cpp could not load {model_path!r}{{guess}}: the file is truncated, damaged, or of an architecture "
            f"that llama-cpp-python {llama_cpp.__version__} does not know"
            f"{', or an RPC server is gone or has too little memory' if has_servers else ''}{{log}}; "
            "{verbose} shows why."
        )
    return None
