"""Where defaults are chosen: the drafters for a model, with the reason, and how to decode with them. The only place,
for Python, every command and the server.

`resolve` has the order of precedence of drafters. Its result, a `Resolved`, also has the drafters behind the words of
settings (`of`), those that a way of decoding can use (`kept`), and the length of each draft (`lengths`).
`resolve_setting` has the order of precedence of gate, window, draft length and governor.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyfly_cpp import _native
from pyfly_cpp.decoding.companions import companions
from pyfly_cpp.decoding.drafters import (
    DRAFTERS,
    MTP,
    WORDS,
    AnyDrafter,
    CrossVocabulary,
    Drafter,
    DraftModel,
    OwnDrafter,
    PathOption,
    PromptLookup,
    as_given,
    require_drafters,
    require_word,
)
from pyfly_cpp.decoding.presets import Preset
from pyfly_cpp.decoding.setting import Decoding
from pyfly_cpp.errors import ArgumentError
from pyfly_cpp.machine import log
from pyfly_cpp.machine.devices import default_gpus
from pyfly_cpp.machine.files import require_gguf
from pyfly_cpp.machine.memory import available, bytes_of_model
from pyfly_cpp.models.metadata import is_whole_model, open_metadata
from pyfly_cpp.models.named import embedded_model, resolve_model

AUTO = "auto"
"""The word for a drafter that is chosen, because nobody has named one."""

MOST_SHARE_OF_DEMO = 0.15
"""Largest share of the model's bytes at which the demo model drafts as well as prompt lookup. Both are 1.17 times
as fast as lookup alone at a share of 0.09, and no faster at 0.18 (docs/design/governor.md)."""

N_CTX_OF_DEMO = 2048
"""Tokens of each request that the demo model sees as a drafter; its cache takes 47 MB for them."""


@dataclass(frozen=True)
class Resolved:
    """Drafters and why these. Two are equal if the drafters are, whatever the reason."""

    drafters: tuple[Drafter, ...] = ()
    """The cheapest first; none: plain decoding."""
    may_be_left_out: tuple[Drafter, ...] = ()
    """Drafters that were chosen for the speed alone: they draft only under the governor and for one request at a
    time (`kept`), and one that cannot be opened is no error."""
    reason: str | None = field(default=None, compare=False)
    """The reason as a sentence without its full stop; None: somebody has named them."""
    given: tuple[OwnDrafter, ...] = field(default=(), compare=False)
    """Drafters that the words of settings may stand for, besides the needed ones of `drafters`; the first of a kind
    counts."""
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Options for drafters that are made from words, by the names of `OwnDrafter.options`."""

    @property
    def drafter(self) -> AnyDrafter | None:
        """The drafters as `FlyLlama(drafter=...)` takes them."""
        return as_given(self.drafters)

    @property
    def needed(self) -> Resolved:
        """The same without the drafters that may be left out."""
        drafters = tuple(one for one in self.drafters if one not in self.may_be_left_out)
        return replace(self, drafters=drafters, may_be_left_out=())

    # ---- How somebody decodes ----------------------------------------------------------------------------------------

    def kept(self, is_governed: bool = True, n_requests: int = 1, embeds: bool = False) -> Resolved:
        """The drafters for a way of decoding: with the governor or without, for n_requests >= 1 at a time, in a
        context for embeddings or not. Those that may be left out need the governor, one request and no embeddings."""
        return self if is_governed and n_requests == 1 and not embeds else self.needed

    def lengths(self, draft_max: int | None, is_governed: bool, n_batch: int) -> list[int]:
        """Most tokens that each drafter proposes in a step, 0..n_batch - 1, for a request with this
        `Decoding.draft_max`."""
        return [
            0 if one in self.may_be_left_out and not is_governed else draft_max_of(one, draft_max, n_batch)
            for one in self.drafters
        ]

    # ---- The words of settings ---------------------------------------------------------------------------------------

    def words(self) -> list[str]:
        """The words that can be used here: heads first, drafters that need no file last."""
        found = [drafter.word for drafter in sorted(self._there(), key=lambda drafter: not drafter.is_head)]
        free = [word for word, (kind, *more) in WORDS.items() if not (more or kind.takes_file)]
        return [*dict.fromkeys([word for word in found if word not in free]), *free]

    def of(self, setting: Decoding) -> Resolved:
        """The drafters of a setting that is measured. Prompts are answered again and again, so prompt lookup is
        without its memory.

        Raises:
            ValueError: the setting needs a file that nobody has named.
        """
        used = self.as_used(setting)
        return replace(used, drafters=_alone(used.drafters), may_be_left_out=_alone(used.may_be_left_out))

    def as_used(self, setting: Decoding) -> Resolved:
        """The drafters of a setting, prompt lookup with its memory. Raises ValueError as `of` does."""
        if setting.is_plain:
            return replace(self, drafters=(), may_be_left_out=())
        if setting.drafter is None:
            return self
        if isinstance(setting.drafter, str):
            return self._of_word(setting.drafter, f"the setting {str(setting)!r}")
        return replace(self, drafters=require_drafters(setting.drafter), may_be_left_out=())

    def _of_word(self, word: str, who: str) -> Resolved:
        """The drafters behind a word; `who` begins the message of the ValueError."""
        name, _, written = word.partition(":")
        file = resolve_model(written) if written else None
        parts = []
        for kind in WORDS[name]:
            drafter = self._of_kind(kind) if file is None else _made(kind, file, self.options)
            if drafter is None:
                raise ArgumentError(f"{who} needs {kind.noun}; write {name}:FILE{{draft}}.")
            parts.append(drafter)
        return replace(self, drafters=tuple(parts), may_be_left_out=())

    def _of_kind(self, kind: type[OwnDrafter]) -> OwnDrafter | None:
        """The drafter of a kind, if there is one, else one that is made from the draft model or from nothing; None if
        it needs a file."""
        found, draft = self._first(kind), self._first(DraftModel) if kind.takes_draft else None
        if found is None and (draft is not None or not kind.needs_file):
            found = _made(kind, None if draft is None else draft.file, self.options)
        return found

    def _first(self, kind: type[OwnDrafter]) -> OwnDrafter | None:
        return next((drafter for drafter in self._there() if isinstance(drafter, kind)), None)

    def _there(self) -> tuple[OwnDrafter, ...]:
        return (*self.given, *(one for one in self.needed.drafters if isinstance(one, OwnDrafter)))


def resolve(
    model: str | os.PathLike[str],
    drafter: object = AUTO,
    draft: Drafter | str | os.PathLike[str] | None = None,
    preset: Sequence[Drafter] = (),
    options: Mapping[str, Any] = {},
    takes_heads: bool = True,
) -> Resolved:
    """Chooses the drafters. The order of precedence:

    1. `drafter`, unless it is `auto`: drafters, a word, the path of a file, or nothing (None: `draft` alone, if there
       is one);
    2. the preset's drafters, with `draft` instead of their draft model's file;
    3. the model's own MTP head;
    4. `draft`, with prompt lookup as well;
    5. the best of the files on this machine that could draft for the model (`companions`), with prompt lookup as well;
    6. prompt lookup and, on a machine without a GPU, the demo model as well if it is far smaller.

    A drafter that is added "as well" may be left out. Reads headers of GGUF files, not the models.

    Args:
        model: Path of the target's GGUF file.
        drafter: As in `FlyLlama(drafter=...)`, or an earlier result, which is returned.
        draft: A drafter, or the path of a draft model or head; a word that names a head without a file means it.
        preset: The drafters of a preset that names some.
        options: Options for drafters that are made here, by the names of `OwnDrafter.options`. The preset's keep their
            own.
        takes_heads: Whether heads in files count among those of 5.

    Raises:
        ValueError, PyflyError: the model or a file is no usable GGUF file, a file is no drafter for this model, or
            the word is unknown or needs a file that is not given.
    """
    if isinstance(drafter, Resolved):
        return drafter
    if drafter is None or not isinstance(drafter, str) or drafter == "none":
        return Resolved(require_drafters(draft if drafter is None else drafter), options=options)
    if drafter.endswith(".gguf") and drafter.partition(":")[0] not in WORDS:
        return Resolved((drafter_of_file(model, drafter),), options=options)
    require_gguf(os.fspath(model))
    if drafter != AUTO:
        return _of_said_word(drafter, draft, options)
    info = _native.inspect_model(os.fspath(model))
    heads: tuple[OwnDrafter, ...] = (_made(MTP, None, options),) if _has_head(info) else ()
    parts = _with_draft(preset, draft)
    if parts:
        return Resolved(parts, (), "the preset sets it", (*parts, *heads), options)
    given = _given(model, draft, options)
    own = tuple(one for one in given if isinstance(one, OwnDrafter))
    if heads:
        return Resolved(heads, (), "the model has an MTP head", (*own, *heads), options)
    why = "has no MTP head that llama.cpp can run" if info.n_nextn > 0 else "has no MTP head"
    drafters, left_out, reason = _others(model, given, options, takes_heads)
    return Resolved(drafters, left_out, f"the model {why}, and {reason}", own, options)


def _others(
    model: str | os.PathLike[str], given: Sequence[Drafter], options: Mapping[str, Any], takes_heads: bool
) -> tuple[tuple[Drafter, ...], tuple[Drafter, ...], str]:
    """The drafters of a model without a head, those of them that may be left out, and the rest of the reason."""
    if given:
        return (*_with_lookup(given[0], options), "a draft was given")
    found = next((one for one in companions(model) if takes_heads or not one.drafter.is_head), None)
    if found is not None:
        where = "next to it" if found.path.parent == Path(model).parent else "on this machine"
        drafter = _made(type(found.drafter), found.path, options)
        return (
            *_with_lookup(drafter, options), f"{found.path.name} {where} fits it at {found.share:.0%} of its size",
        )  # fmt: skip
    reason = "no file on this machine fits it as a draft"
    lookup, demo = _made(PromptLookup, None, options), _demo_draft(model, options)
    if demo is None:
        return (lookup,), (), reason
    return (lookup, demo), (demo,), f"{reason}; the demo model is far smaller"


def _with_lookup(drafter: Drafter, options: Mapping[str, Any]) -> tuple[tuple[Drafter, ...], tuple[Drafter, ...]]:
    """The drafter, and prompt lookup as well if it is a draft model or a head: it copies repetitions faster. Callables
    may look up themselves, and nothing was measured beside a model's own head."""
    if not isinstance(drafter, OwnDrafter) or isinstance(drafter, (PromptLookup, MTP)):
        return (drafter,), ()
    lookup = _made(PromptLookup, None, options)
    names_texts = any(options.get(option.name) for option in PromptLookup.options if isinstance(option, PathOption))
    return (lookup, drafter), () if names_texts else (lookup,)


def _demo_draft(model: str | os.PathLike[str], options: Mapping[str, Any]) -> CrossVocabulary | None:
    """The demo model as a drafter; None if it is not installed, not far smaller, or there is a GPU, with which its gain
    was not measured."""
    demo = embedded_model()
    if demo is None or default_gpus():
        return None
    size, n_target = bytes_of_model(demo), bytes_of_model(model)
    free = available()
    if size > MOST_SHARE_OF_DEMO * n_target or (free is not None and n_target + 3 * size > free):
        return None
    return CrossVocabulary.make(demo, **{"n_ctx": N_CTX_OF_DEMO, **CrossVocabulary.fields_of(options)})


def _of_said_word(word: str, draft: Drafter | str | os.PathLike[str] | None, options: Mapping[str, Any]) -> Resolved:
    name, _, written = require_word(word).partition(":")
    kinds = WORDS[name]
    file: Any = written or None  # a name stays one
    if file is None and any(kind.takes_file for kind in kinds):
        file, draft = draft, None
    given = [_made(kind, file, options) for kind in kinds if file is not None or not kind.needs_file]
    if draft is not None:
        given.append(_made(DraftModel, draft, options))
    there = Resolved((), (), None, tuple(given), options)
    return there._of_word(name, f"the drafter {name}")


def _with_draft(preset: Sequence[Drafter], draft: Any) -> tuple[OwnDrafter, ...]:
    """A preset's drafters with `draft` instead of their draft model's file. None of them if none has a draft model:
    then the draft is meant instead of them."""
    parts = tuple(part for part in preset if isinstance(part, OwnDrafter))  # a preset holds no callable
    if draft is None:
        return parts
    has_draft = any(part.takes_draft for part in parts)
    return tuple(part.but(model_path=draft) if part.takes_draft else part for part in parts) if has_draft else ()


def _given(model: str | os.PathLike[str], draft: Any, options: Mapping[str, Any]) -> tuple[Drafter, ...]:
    if draft is None:
        return ()
    if isinstance(draft, (str, os.PathLike)):
        return (_made(type(drafter_of_file(model, draft)), draft, options),)
    return (draft,)


# ---- How to decode ---------------------------------------------------------------------------------------------------


def resolve_setting(
    preset: Preset | None = None,
    drafter: object = AUTO,
    draft: object = None,
    window_words: str | None = None,
    **said: Any,
) -> Decoding:
    """Chooses how to decode, whatever drafts. The order of precedence, for each field:

    1. what is said, by options or arguments; of the window, the words change that of 2 or 3 (the gate's own);
    2. the preset; not its window if the gate that is said has no use for one;
    3. the default of `Decoding`.

    A preset that names drafters is without the governor unless it says otherwise, as it was measured.

    Args:
        drafter, draft: As of `resolve`.
        window_words: As of `Window.but_written`.
        **said: Fields of `Decoding` except for the drafter; None: not said.

    Returns:
        With the drafter `"none"` if `drafter` is none, or if the preset names none and nobody else names one; else
        None: `resolve` chooses it. A preset without a drafter sets no draft length.

    Raises:
        ValueError: a field is out of range, or gate and window do not go together.
    """
    setting = Decoding()
    if preset is not None:
        own = preset.decoding
        is_plain = own.drafter == "none"
        setting = replace(
            own,
            draft_max=None if is_plain else own.draft_max,
            drafter="none" if is_plain and draft is None and drafter == AUTO else None,
            adaptive=preset.leaves_drafter if own.adaptive is None else own.adaptive,
        )
    if drafter == "none":
        setting = replace(setting, drafter="none")
    setting = setting.but(**said)
    if window_words is None:
        return setting
    return setting.but(window=setting.effective_window.but_written(window_words))


# ---- Files -----------------------------------------------------------------------------------------------------------


def has_mtp_head(model: str | os.PathLike[str]) -> bool:
    """Whether the model's own file has an MTP head that llama.cpp can run. Raises ValueError for no usable GGUF
    model."""
    return _has_head(_native.inspect_model(os.fspath(model)))


def _has_head(info: _native.ModelInfo) -> bool:
    return info.mtp_draft_max > 0


def drafter_of_file(model: str | os.PathLike[str], file: str | os.PathLike[str]) -> OwnDrafter:
    """The drafter that a file is for a model: a draft model, or the head that its header describes. Reads no weights.

    Raises:
        ValueError, PyflyError: it is neither, or the head of another model.
    """
    if os.path.isfile(file):  # opening it tells why not
        require_gguf(os.fspath(file), "draft model")
        if not is_whole_model(file):
            with open_metadata(Path(model)) as opened, log.silenced(unless_verbose=True):
                kind = DRAFTERS[_native.companion_word(opened, os.fspath(file))]
            made: OwnDrafter = kind.make(file)
            return made
    return DraftModel(file)


# ---- Lengths ---------------------------------------------------------------------------------------------------------


def draft_max_of(drafter: Drafter, asked: int | None, n_batch: int = 2**31) -> int:
    """Most tokens in a step with this drafter: the number set for all or for this one, or else its own, as far as a
    batch of n_batch holds them."""
    asked = getattr(drafter, "draft_max", None) if asked is None else asked
    k: int = getattr(drafter, "draft_most", 10) if asked is None else asked
    return min(k, n_batch - 1)


def _made(kind: type[OwnDrafter], file: Any, options: Mapping[str, Any]) -> Any:
    return kind.make(file, **kind.fields_of(options))


def _alone(drafters: Sequence[Drafter]) -> tuple[Drafter, ...]:
    return tuple(one.alone if isinstance(one, PromptLookup) else one for one in drafters)
