"""Drafters, which propose tokens for the target.

The classes here hold configuration (frozen dataclasses) and know how they are written, which options of the command
line set their fields, and how they open (the name of their constructor in pyfly.h); the work is done in
`csrc/drafters/` and `csrc/llama/drafters/`. `DRAFTERS`, at the end, is the table that settings, presets, the command
line and FlyLlama read: a new drafter is a dataclass in a file of its own, and a place there. A `FlyLlama` also takes
any LlamaDraftModel of llama_cpp, that is, a callable from token ids to token ids.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Union

from llama_cpp.llama_speculative import LlamaDraftModel

from pyfly_cpp import _native
from pyfly_cpp.decoding.drafters.cross_vocabulary import CrossVocabulary
from pyfly_cpp.decoding.drafters.draft_heads import MTP, DFlash, DSpark, Eagle3
from pyfly_cpp.decoding.drafters.draft_model import DraftModel
from pyfly_cpp.decoding.drafters.drafter import AnyOption, Host, NamesOption, Option, OwnDrafter, PathOption
from pyfly_cpp.decoding.drafters.prompt_lookup import PromptLookup

__all__ = [
    "DRAFTERS",
    "MTP",
    "WORDS",
    "AnyDrafter",
    "AnyOption",
    "CrossVocabulary",
    "DFlash",
    "DSpark",
    "DraftModel",
    "Drafter",
    "Eagle3",
    "Host",
    "NamesOption",
    "Option",
    "OwnDrafter",
    "PathOption",
    "PromptLookup",
    "as_given",
    "has_head",
    "has_own_head",
    "open_drafter",
    "options_of",
    "parse_drafters",
    "require_drafters",
    "require_word",
]

DRAFTERS: dict[str, type[OwnDrafter]] = {
    kind.word: kind
    for kind in (
        DraftModel,
        PromptLookup,
        CrossVocabulary,
        MTP,
        Eagle3,
        DFlash,
        DSpark,
    )
}
"""All drafters by their words."""

WORDS: dict[str, tuple[type[OwnDrafter], ...]] = {
    **{word: (kind,) for word, kind in DRAFTERS.items()},
    "both": (PromptLookup, DraftModel),
    **{f"lookup+{word}": (PromptLookup, kind) for word, kind in DRAFTERS.items() if kind is not PromptLookup},
}
"""These, and words for several together, the cheapest first; `both` is lookup+draft."""

_NAMED = (*DRAFTERS, "both", "lookup+WORD")
"""In messages."""

Drafter = Union[OwnDrafter, LlamaDraftModel]

AnyDrafter = Union[Drafter, tuple[Drafter, ...]]
"""One drafter, or several, the cheapest first."""


def require_drafters(drafter: object) -> tuple[Drafter, ...]:
    """The drafters that `drafter` names: one, its written form, a sequence of them, or None for none; raises ValueError
    otherwise."""
    if drafter is None:
        return ()
    if isinstance(drafter, str):
        return parse_drafters(drafter)
    if isinstance(drafter, (list, tuple)):
        if not drafter:
            raise ValueError("the list of drafters is empty; give at least one, or None for plain decoding.")
        return tuple(d for one in drafter for d in require_drafters(one))
    if isinstance(drafter, type):
        file = '"draft.gguf"' if getattr(drafter, "needs_file", False) else ""
        raise ValueError(f"drafter is the class {drafter.__name__}; give one of it: {drafter.__name__}({file}).")
    if isinstance(drafter, OwnDrafter) or callable(drafter):
        return (drafter,)
    names = ", ".join(f"{kind.__name__}(...)" for kind in DRAFTERS.values())
    raise ValueError(
        f"drafter must be {names}, a text such as lookup, a llama_cpp LlamaDraftModel (a callable from tokens to "
        f"tokens), a list of these, or None, not {drafter!r}."
    )


def require_word(text: str) -> str:
    """Returns `text` if it is a word of `WORDS`, with `:FILE` behind it if the word takes one; raises ValueError."""
    word, separator, file = text.partition(":")
    if word not in WORDS:
        near = difflib.get_close_matches(word, WORDS, n=1)
        near = [f"draft:{text}"] if text.endswith(".gguf") else near
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown drafter {text!r}.{hint} A drafter is written auto, {', '.join(_NAMED)} or none.")
    takes_file = any(kind.takes_file for kind in WORDS[word])
    if separator and not (file and takes_file):
        what = f"{word}:FILE, or {word} alone" if takes_file else f"{word}, which takes no file"
        raise ValueError(f"the drafter {text!r} is incomplete or too long; write {what}.")
    return text


def parse_drafters(text: str) -> tuple[Drafter, ...]:
    """The drafters of a written form, as `require_word` has it, or of `none`; raises ValueError."""
    if text == "none":
        return ()
    word, _, file = require_word(text).partition(":")
    if not file and any(kind.needs_file for kind in WORDS[word]):
        raise ValueError(f"the drafter {word} needs a file; write {word}:FILE.")
    return tuple(kind.make(file or None) for kind in WORDS[word])


def as_given(drafters: Sequence[Drafter]) -> AnyDrafter | None:
    """One drafter, several as a tuple, or None: as `require_drafters` takes it apart."""
    return drafters[0] if len(drafters) == 1 else tuple(drafters) or None


def options_of(kinds: Iterable[type[OwnDrafter]]) -> tuple[AnyOption, ...]:
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
