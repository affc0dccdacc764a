"""What is asked of a generation besides its sampling."""

from __future__ import annotations

from dataclasses import dataclass

UNLIMITED = 2**31 - 1


@dataclass(frozen=True)
class Request:
    """How long a generation may become, and which rows of logits are wanted of it."""

    max_tokens: int = UNLIMITED
    """Tokens that somebody wants, >= 1. Drafts go no further; nothing ends there."""
    keeps_rows: bool = False
    """Whether the rows that tokens are chosen by are wanted."""
    n_prompt_logprobs: int | None = None
    """Most probable tokens that are wanted at each place of the prompt; None: no log-probabilities of it."""
    prompt_from: int = 0
    """Position of the first prompt token whose row is wanted: what it says of the next token."""
    resumable: bool = False
    """Whether the caller may send tokens."""
