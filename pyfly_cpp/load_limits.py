"""What a model cannot be loaded with, in sentences that name the remedy."""

from __future__ import annotations

import llama_cpp


def within_positions(n_ctx: int, n_positions: int, model_path: str) -> int:
    """Most tokens of a text of n_ctx, 0: as many as there can be, where the embeddings of positions are learned; behind
    the last one llama.cpp ends the process. Raises ValueError where n_ctx is more."""
    if n_ctx > n_positions:
        raise ValueError(
            f"n_ctx is {n_ctx}, but {model_path!r} has learned embeddings of {n_positions} positions and no more; "
            f"lower n_ctx to at most {n_positions}."
        )
    return n_ctx or n_positions


def why_not_loaded(error: ValueError, model_path: str, *, has_flash: bool, has_servers: bool) -> str | None:
    """What llama-cpp-python's error means, with flash attention or RPC servers asked for; None: it says so itself."""
    if "Failed to create llama_context" in str(error):
        remedy = ", leave out flash_attn" if has_flash else ""  # some graphs lack it
        return (
            f"llama.cpp could not make a context for {model_path!r}: there is too little memory for it, or the "
            f"file is damaged; lower n_ctx or n_batch{remedy}, or let verbose=True show why."
        )
    if "Failed to load model" in str(error):
        return (
            f"llama.cpp could not load {model_path!r}: the file is truncated, damaged, or of an architecture "
            f"that llama-cpp-python {llama_cpp.__version__} does not know"
            f"{', or an RPC server has too little memory' if has_servers else ''}; "
            "verbose=True shows why."
        )
    return None
