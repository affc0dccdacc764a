"""Drafters: what proposes tokens for the target.

The classes here hold configuration (frozen dataclasses) and know how they are written, which options of the command
line set their fields, and how they open (the name of their constructor in pyfly.h); the work is done in
`csrc/drafters/`. `DRAFTERS`, at the end, is the table that settings, presets, the command line and FlyLlama read: a new
drafter is a dataclass here, and its word there. A `FlyLlama` also takes any LlamaDraftModel of llama_cpp, that is, a
callable from token ids to token ids.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Union

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


class Option(NamedTuple):
    """A field of a drafter as an option of the command line."""

    name: str
    """As in Python; drafters whose options have one name share it."""
    field: str
    low: float
    """Least value."""
    help: str
    high: float | None = None
    """Largest value; None: 2**31 - 1."""
    default: float | None = None
    """None: the drafter's own; the help says what that is. A float makes it an option that takes fractions."""


_P_MIN = Option("p_min", "p_min", 0.0, "Draft model: stop where its top probability falls under this.", 1.0, 0.0)


@dataclass(frozen=True)
class Host:
    """The FlyLlama that a drafter is opened for."""

    target: Callable[[], _native.LlamaTarget]
    """Opens the target, if it is not yet."""
    draft_max: int
    """Most tokens that the drafter will be asked for in a round."""
    has_own_head: bool
    """Whether the target was loaded with the MTP head of its file."""
    settings: Mapping[str, int]
    """Fields of `pyfly_draft_model_config` of pyfly.h that a model of the drafter's own takes from the target."""


class OwnDrafter:
    """The base of all drafters but the callables."""

    word: ClassVar[str]
    """In settings, in presets and for --drafter."""
    noun: ClassVar[str]
    """For people, with its article."""
    needs_file: ClassVar[bool] = False
    """Whether it cannot be without a file of its own, `model_path`."""
    takes_file: ClassVar[bool] = False
    is_head: ClassVar[bool] = False
    """Whether it reads the target's hidden states, so that it must see the target evaluate the prompt."""
    options: ClassVar[tuple[Option, ...]] = ()
    draft_max: int | None = None
    """Tokens in a round (K), >= 1, where a number is asked for; None: as many as pay, `draft_most` at most, or without
    the governor just as many."""
    draft_most: int
    """Of a draft model 8, of a head 3, of prompt lookup `num_pred_tokens`."""

    @property
    def in_target(self) -> bool:
        """Whether it is read from the target's own file, together with the target."""
        return False

    @classmethod
    def make(cls, model_path: str | os.PathLike[str] | None = None, **fields: Any) -> Any:
        """The drafter with these fields; `model_path` and `draft_max` count where it has such fields."""
        if model_path is not None and cls.takes_file:
            fields["model_path"] = model_path
        return cls(**fields)

    def open(self, host: Host) -> _native.Drafter:
        """Loads it; raises ValueError or IncompatibleDraftError."""
        raise NotImplementedError


class _WithModel(OwnDrafter):
    """The base of those with a model."""

    takes_file = True
    options: ClassVar[tuple[Option, ...]] = (_P_MIN,)
    model_path: str | os.PathLike[str] | None
    p_min: float
    """Stop drafting where its top probability falls under this, in [0, 1]. 0 never stops early."""

    def __post_init__(self) -> None:
        if self.model_path is not None:
            object.__setattr__(self, "model_path", os.fspath(self.model_path))
        if self.draft_max is not None:
            _integer("draft_max", self.draft_max, 1)
        _probability("p_min", self.p_min)


@dataclass(frozen=True)
class DraftModel(_WithModel):
    """A second, cheaper GGUF model of the same vocabulary, decoded greedily with a KV cache of its own."""

    word = "draft"
    noun = "a draft model"
    needs_file = True
    draft_most = 8
    options = (_P_MIN, Option("draft_n_ctx", "n_ctx", 16, "Draft model: its context.  [default: the target's]"))

    model_path: str | os.PathLike[str]
    """Path of the GGUF file."""

    draft_max: int | None = None
    p_min: float = 0.0

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
        super().__post_init__()
        if self.n_threads == AUTO:
            object.__setattr__(self, "n_threads", None)
        for name, low in (("n_ctx", 16), ("n_batch", 1), ("n_gpu_layers", -1)):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), low)
        if self.n_threads is not None:
            require_threads(self.n_threads)
        require_cache_types(self.type_k, self.type_v)

    def open(self, host: Host) -> _native.Drafter:
        require_gguf(str(self.model_path), "draft model")
        names = ("n_ctx", "n_batch", "n_gpu_layers", "n_threads", "type_k", "type_v")
        given = {name: int(getattr(self, name)) for name in names if getattr(self, name) is not None}
        settings = {**host.settings, **given}
        return _native.ModelDrafter("draft model", "model", host.target(), str(self.model_path), self.p_min, **settings)

    def __str__(self) -> str:
        return f"draft model {os.path.basename(self.model_path)}"


@dataclass(frozen=True)
class MTP(_WithModel):
    """Multi-token prediction: the NextN blocks that many models carry in their own file (or in a companion file). They
    read the target's hidden states, use the weights that are loaded, and cost one block for each drafted token.
    """

    word = "mtp"
    noun = "an MTP head"
    is_head = True
    draft_most = 3

    model_path: str | os.PathLike[str] | None = None
    """Path of the companion GGUF file; None: the head is in the target's own file."""

    draft_max: int | None = None
    p_min: float = 0.0

    @property
    def in_target(self) -> bool:
        return self.model_path is None

    def open(self, host: Host) -> _native.Drafter:
        if (path := None if self.model_path is None else str(self.model_path)) is not None:
            require_gguf(path, "MTP head")
        # Chained heads draft one token each; where no number was asked for, as many as there are.
        k = 1 if self.draft_max is None else host.draft_max
        own = host.has_own_head
        return _native.ModelDrafter("MTP", "mtp", host.target(), path, self.p_min, k, own, **host.settings)

    def __str__(self) -> str:
        return "MTP head" if self.model_path is None else f"MTP head {os.path.basename(self.model_path)}"


@dataclass(frozen=True)
class Eagle3(_WithModel):
    """An EAGLE-3 head: a one-layer model that reads the target's hidden states at three depths. It belongs to one
    model; token embedding and output matrix may be the target's. Source: Li et al. 2025, "EAGLE-3".
    """

    word = "eagle3"
    noun = "an EAGLE-3 head"
    needs_file = is_head = True
    draft_most = 3

    model_path: str | os.PathLike[str]
    """Path of the head's GGUF file."""

    draft_max: int | None = None
    p_min: float = 0.0

    def open(self, host: Host) -> _native.Drafter:
        require_gguf(path := str(self.model_path), "EAGLE-3 head")
        return _native.ModelDrafter("EAGLE-3", "eagle3", host.target(), path, self.p_min, **host.settings)

    def __str__(self) -> str:
        return f"EAGLE-3 head {os.path.basename(self.model_path)}"


@dataclass(frozen=True)
class PromptLookup(OwnDrafter):
    """What followed the last n tokens when they occurred before is proposed again. Costs nothing; pays where the answer
    repeats the prompt (edits, summaries, code). Source: Saxena 2023, "Prompt Lookup Decoding".
    """

    word = "lookup"
    noun = "prompt lookup"
    # One token is no evidence of a repetition; two often are. The governor decides how many are worth verifying.
    options = (
        Option("max_ngram_size", "max_ngram_size", 1, "Prompt lookup: longest n-gram.", 64, 4),
        Option("min_ngram_size", "min_ngram_size", 1, "Prompt lookup: shortest n-gram.", 64, 2),
        Option("num_pred_tokens", "num_pred_tokens", 1, "Prompt lookup: most tokens in a round.", None, 10),
    )

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
    def draft_most(self) -> int:  # type: ignore[override]
        return self.num_pred_tokens

    @classmethod
    def make(cls, model_path: str | os.PathLike[str] | None = None, **fields: Any) -> PromptLookup:
        longest = fields.get("max_ngram_size", cls.max_ngram_size)
        shortest = min(fields.get("min_ngram_size", cls.min_ngram_size), longest)
        fields.pop("draft_max", None)  # limits what is verified, not what is looked for
        return cls(**{**fields, "min_ngram_size": shortest})

    def open(self, host: Host | None = None) -> _native.Drafter:
        sizes = self.max_ngram_size, self.min_ngram_size, self.num_pred_tokens
        return _native.Drafter("prompt lookup", "lookup", *sizes, MATCHES.index(self.match))

    def propose(self, history: Sequence[int]) -> list[int]:
        """The proposal for a token history, without a model: 0..num_pred_tokens token ids."""
        with self.open() as drafter:
            return drafter.propose(history, self.num_pred_tokens)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return "prompt lookup"


DRAFTERS: dict[str, type[OwnDrafter]] = {kind.word: kind for kind in (DraftModel, PromptLookup, MTP, Eagle3)}
"""All drafters by their words."""

WORDS: dict[str, tuple[type[OwnDrafter], ...]] = {
    **{word: (kind,) for word, kind in DRAFTERS.items()},
    "both": (PromptLookup, DraftModel),
}
"""These, and words for several together, the cheapest first."""

Drafter = Union[OwnDrafter, LlamaDraftModel]

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
    if isinstance(drafter, OwnDrafter) or callable(drafter):
        return (drafter,)
    names = ", ".join(f"{kind.__name__}(...)" for kind in DRAFTERS.values())
    raise ValueError(
        f"drafter must be {names}, a llama_cpp LlamaDraftModel (a callable from tokens to tokens), a list of these, or "
        f"None, not {drafter!r}."
    )


def as_given(drafters: Sequence[Drafter]) -> AnyDrafter | None:
    """One drafter, several as a tuple, or None: what `require_drafters` takes apart."""
    return drafters[0] if len(drafters) == 1 else tuple(drafters) or None


def options_of(kinds: Iterable[type[OwnDrafter]]) -> tuple[Option, ...]:
    """Their options, each once."""
    return tuple({option.name: option for kind in kinds for option in kind.options}.values())


def has_head(drafter: object) -> bool:
    """Whether one of the drafters reads the target's hidden states."""
    return any(isinstance(one, OwnDrafter) and one.is_head for one in require_drafters(drafter))


def has_own_head(drafter: object) -> bool:
    """Whether one of the drafters is read from the target's own file."""
    return any(isinstance(one, OwnDrafter) and one.in_target for one in require_drafters(drafter))


def open_drafter(drafter: Drafter, host: Host) -> _native.Drafter:
    """Loads a drafter; raises ValueError or IncompatibleDraftError."""
    return drafter.open(host) if isinstance(drafter, OwnDrafter) else _native.CallbackDrafter(drafter)
