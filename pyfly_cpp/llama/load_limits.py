"""Arguments that a model cannot be loaded with, in sentences that name the remedy."""

from __future__ import annotations

from typing import Any

import llama_cpp

from pyfly_cpp.errors import ArgumentError


def within_positions(n_ctx: int, n_positions: int, model_path: str) -> int:
    """Most tokens of a text of n_ctx, 0: as many as there can be, if the embeddings of positions are learned; behind
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
            "; verbose=True shows the reason."
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
        remedy = ", leave out flash_attn" if has_flash else ""  # some graphs lack it
        return (
            f"llama.cpp could not make a context for {model_path!r}: there is too little memory for it, or the "
            f"file is damaged{{log}}; lower {{n_ctx}} or {{n_batch}}{remedy}, or let verbose=True show why."
        )
    if "Failed to load model" in str(error):
        return (
            f"llama.cpp could not load {model_path!r}{{guess}}: the file is truncated, damaged, or of an architecture "
            f"that llama-cpp-python {llama_cpp.__version__} does not know"
            f"{', or an RPC server is gone or has too little memory' if has_servers else ''}{{log}}; "
            "verbose=True shows why."
        )
    return None
