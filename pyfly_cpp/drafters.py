"""Drafters: what proposes tokens for the target.

The classes here hold configuration (frozen dataclasses) and know how to open it; the work is done in `csrc/drafters/`.
A `FlyLlama` also takes any `llama_cpp.llama_speculative.LlamaDraftModel`, that is, a callable from token ids to token
ids.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Union

from llama_cpp.llama_speculative import LlamaDraftModel

from pyfly_cpp import _native
from pyfly_cpp.cache_types import require_cache_types
from pyfly_cpp.files import require_gguf
from pyfly_cpp.threads import AUTO, require_threads

MATCHES = ("latest", "earliest")
"""In the order of `pyfly_lookup_match` of pyfly.h."""


def _integer(name: str, value: object, low: int, high: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        limit = f">= {low}" if high == 2**31 - 1 else f"in {low}..{high}"
        raise ValueError(f"{name} must be an integer {limit}, not {value!r}.")


def _probability(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], not {value!r}.")


@dataclass(frozen=True)
class Host:
    """The FlyLlama that a drafter is opened for."""

    target: Callable[[], _native.LlamaTarget]
    """Opens the target, if it is not yet."""
    draft_max: int
    """Most tokens that the drafter will be asked for in a round."""
    has_own_head: bool
    """Whether the target was loaded with the MTP head of its file."""
    settings: Mapping[str, int] = field(default_factory=dict)
    """Fields of `pyfly_draft_model_config` of pyfly.h that a model of the drafter's own takes from the target."""


@dataclass(frozen=True)
class DraftModel:
    """A second, cheaper GGUF model of the same vocabulary, decoded greedily with a KV cache of its own."""

    model_path: str | os.PathLike[str]
    """Path of the GGUF file."""

    draft_max: int = 8
    """Most tokens in a round (K), >= 1."""

    p_min: float = 0.0
    """Stop drafting where the draft's top probability falls under this, in [0, 1]. 0 never stops early."""

    n_ctx: int | None = None
    """Context of the draft in tokens, >= 16; None: the target's. A smaller one drafts from its most recent window."""

    n_batch: int | None = None
    """Largest batch in tokens, >= 1; None: the target's."""

    n_gpu_layers: int | None = None
    """Layers on the GPU, -1 for all; None: as the target."""

    n_threads: int | str | None = None
    """Threads, 1..512; None or "auto": the target's, as they change."""

    type_k: int | None = None
    """ggml type of the K cache, one of `cache_types.CACHE_TYPES`; None: F16."""

    type_v: int | None = None
    """ggml type of the V cache likewise; a quantised one needs a target with flash_attn=True."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "model_path", os.fspath(self.model_path))
        if self.n_threads == AUTO:
            object.__setattr__(self, "n_threads", None)
        _integer("draft_max", self.draft_max, 1)
        _probability("p_min", self.p_min)
        for name, low in (("n_ctx", 16), ("n_batch", 1), ("n_gpu_layers", -1)):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), low)
        if self.n_threads is not None:
            require_threads(self.n_threads)
        require_cache_types(self.type_k, self.type_v)

    def open(self, host: Host) -> _native.Drafter:
        """Loads it; raises ValueError or IncompatibleDraftError."""
        path = os.fspath(self.model_path)
        require_gguf(path, "draft model")
        # What is None is as the target has it, or for the types as llama.cpp does.
        given = {"n_ctx": self.n_ctx, "n_batch": self.n_batch, "n_gpu_layers": self.n_gpu_layers,
                 "n_threads": self.n_threads, "type_k": self.type_k, "type_v": self.type_v}  # fmt: skip
        own = {name: int(n) for name, n in given.items() if n is not None}
        return _native.ModelDrafter(host.target(), path, self.p_min, **{**host.settings, **own})

    def __str__(self) -> str:
        return f"draft model {os.path.basename(self.model_path)}"


@dataclass(frozen=True)
class MTP:
    """Multi-token prediction: the NextN blocks that many models carry in their own file (or in a companion file). They
    read the target's hidden states, use the weights that are loaded, and cost one block for each drafted token.
    """

    model_path: str | os.PathLike[str] | None = None
    """Path of the companion GGUF file; None: the head is in the target's own file."""

    draft_max: int = 3
    """Most tokens in a round (K), >= 1. Chained heads draft one token each, so no more than there are."""

    p_min: float = 0.0
    """Stop drafting where the head's top probability falls under this, in [0, 1]. 0 never stops early."""

    def __post_init__(self) -> None:
        if self.model_path is not None:
            object.__setattr__(self, "model_path", os.fspath(self.model_path))
        _integer("draft_max", self.draft_max, 1)
        _probability("p_min", self.p_min)

    def open(self, host: Host) -> _native.Drafter:
        """Loads it; raises ValueError or IncompatibleDraftError."""
        path = None if self.model_path is None else os.fspath(self.model_path)
        if path is not None:
            require_gguf(path, "MTP head")
        return _native.MTPDrafter(host.target(), path, self.p_min, host.draft_max, host.has_own_head, **host.settings)

    def __str__(self) -> str:
        return "MTP head" if self.model_path is None else f"MTP head {os.path.basename(self.model_path)}"


@dataclass(frozen=True)
class Eagle3:
    """An EAGLE-3 head: a one-layer model that reads the target's hidden states at three depths. It belongs to one
    model; token embedding and output matrix may be the target's. Source: Li et al. 2025, "EAGLE-3".
    """

    model_path: str | os.PathLike[str]
    """Path of the head's GGUF file."""

    draft_max: int = 3
    """Most tokens in a round (K), >= 1."""

    p_min: float = 0.0
    """Stop drafting where the head's top probability falls under this, in [0, 1]. 0 never stops early."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "model_path", os.fspath(self.model_path))
        _integer("draft_max", self.draft_max, 1)
        _probability("p_min", self.p_min)

    def open(self, host: Host) -> _native.Drafter:
        """Loads it; raises ValueError or IncompatibleDraftError."""
        path = os.fspath(self.model_path)
        require_gguf(path, "EAGLE-3 head")
        return _native.Eagle3Drafter(host.target(), path, self.p_min, **host.settings)

    def __str__(self) -> str:
        return f"EAGLE-3 head {os.path.basename(self.model_path)}"


@dataclass(frozen=True)
class PromptLookup:
    """What followed the last n tokens when they occurred before is proposed again. Costs nothing; pays where the answer
    repeats the prompt (edits, summaries, code). Source: Saxena 2023, "Prompt Lookup Decoding".
    """

    max_ngram_size: int = 4
    """Longest n-gram that is looked up, 1..64. The longest one with an earlier occurrence wins."""

    num_pred_tokens: int = 10
    """Most tokens in a round (K), >= 1."""

    match: str = "latest"
    """Which earlier occurrence: `"latest"`, or `"earliest"` as the FLy reference code and llama-cpp-python do."""

    min_ngram_size: int = 1
    """Shortest n-gram that is looked up, 1..max_ngram_size. Larger proposes more rarely and is right more often."""

    def __post_init__(self) -> None:
        _integer("max_ngram_size", self.max_ngram_size, 1, 64)
        _integer("min_ngram_size", self.min_ngram_size, 1, self.max_ngram_size)
        _integer("num_pred_tokens", self.num_pred_tokens, 1)
        if self.match not in MATCHES:
            raise ValueError(f"match must be 'latest' or 'earliest', not {self.match!r}.")

    @property
    def draft_max(self) -> int:
        """Most tokens in a round (K)."""
        return self.num_pred_tokens

    def propose(self, history: Sequence[int]) -> list[int]:
        """The proposal for a token history, without a model: 0..num_pred_tokens token ids."""
        with self.open() as drafter:
            proposal: list[int] = drafter.propose(history, self.num_pred_tokens)
        return proposal

    def open(self, host: Host | None = None) -> _native.Drafter:
        """Needs no host."""
        match = MATCHES.index(self.match)
        return _native.LookupDrafter(self.max_ngram_size, self.min_ngram_size, self.num_pred_tokens, match)

    def __str__(self) -> str:
        return "prompt lookup"


_OWN = (DraftModel, Eagle3, MTP, PromptLookup)

Drafter = Union[DraftModel, Eagle3, MTP, PromptLookup, LlamaDraftModel]

AnyDrafter = Union[Drafter, tuple[Drafter, ...]]
"""One drafter, or several, the cheapest first."""


def require_drafters(drafter: object) -> tuple[Drafter, ...]:
    """The drafters that `drafter` names: one, a sequence of them, or None for none; raises ValueError otherwise."""
    if drafter is None:
        return ()
    if isinstance(drafter, (list, tuple)):
        if not drafter:
            raise ValueError("the list of drafters is empty; give at least one, or None for plain decoding.")
        return tuple(d for one in drafter for d in require_drafters(one))
    if isinstance(drafter, _OWN) or callable(drafter):
        return (drafter,)
    raise ValueError(
        "drafter must be DraftModel(...), MTP(...), Eagle3(...), PromptLookup(...), a llama_cpp LlamaDraftModel (a "
        f"callable from tokens to tokens), a list of these, or None, not {drafter!r}."
    )


def open_drafter(drafter: Drafter, host: Host) -> _native.Drafter:
    """Loads a drafter; raises ValueError or IncompatibleDraftError."""
    return drafter.open(host) if isinstance(drafter, _OWN) else _native.CallbackDrafter(drafter)


def draft_max_of(drafter: Drafter, asked: int | None, n_batch: int = 2**31) -> int:
    """Most tokens in a round with this drafter: what was asked for, or else what it says, as far as a batch of n_batch
    holds them."""
    k: int = getattr(drafter, "draft_max", 10) if asked is None else asked
    return min(k, n_batch - 1)
