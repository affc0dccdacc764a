"""The drafters behind the words of settings, and their order."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyfly_cpp.decoding.auto import LookupAsWell, choose_drafter, drafter_of_file, own_head
from pyfly_cpp.decoding.drafters import (
    WORDS,
    AnyDrafter,
    Drafter,
    DraftModel,
    OwnDrafter,
    PathOption,
    PromptLookup,
    as_given,
    require_drafters,
    require_word,
    without_optional,
)
from pyfly_cpp.decoding.setting import Decoding
from pyfly_cpp.machine.files import require_gguf
from pyfly_cpp.models.named import resolve_model

AUTO = "auto"
"""Chosen by `choose_drafters`, as in `pyfly-cpp chat`."""


@dataclass(frozen=True)
class Drafters:
    """What the drafter words of settings stand for."""

    given: tuple[OwnDrafter, ...] = ()
    """The drafters that are there, the first of a kind counts. A word that needs no file stands for its kind's default
    if there is none."""
    default: AnyDrafter | None = None
    """The drafter of a setting that names none; None: the draft model if there is one, else prompt lookup."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of drafters that are made of words, by the names of `OwnDrafter.options`."""

    def words(self) -> list[str]:
        """The words that stand for something here: heads first, what needs nothing last."""
        found = [drafter.word for drafter in sorted(self._there(), key=lambda drafter: not drafter.is_head)]
        free = [word for word, (kind, *more) in WORDS.items() if not (more or kind.takes_file)]
        return [*dict.fromkeys([word for word in found if word not in free]), *free]

    def of(self, setting: Decoding) -> AnyDrafter | None:
        """The drafter of a setting that is measured; None for plain decoding. Prompts are answered again and again,
        so prompt lookup is without its memory.

        Raises:
            ValueError: the setting needs a file that nobody has named.
        """
        return as_given([d.alone if isinstance(d, PromptLookup) else d for d in self.parts_of(setting)])

    def parts_of(self, setting: Decoding) -> tuple[Drafter, ...]:
        """The drafters of a setting as they are used, with their memory. Raises ValueError as `of` does."""
        if setting.is_plain:
            return ()
        if setting.drafter is None:
            default = self.default or self._first(DraftModel) or self._first(PromptLookup) or PromptLookup()
            return require_drafters(default)
        return require_drafters(self.of_word(setting.drafter, f"the setting {str(setting)!r}"))

    def without_optional(self) -> Drafters:
        """The same for settings that are not governed."""
        return replace(self, default=as_given(without_optional(require_drafters(self.default))))

    def of_word(self, word: str, who: str) -> AnyDrafter | None:
        """The drafter behind a word; `who` begins the message of the ValueError."""
        name, _, written = word.partition(":")
        if written:
            return as_given([_made(kind, resolve_model(written), self.options) for kind in WORDS[name]])
        parts: list[Drafter] = []
        for kind in WORDS[name]:
            drafter = self._first(kind)
            draft = self._first(DraftModel) if kind.takes_draft else None
            if drafter is None and draft is not None:
                drafter = _made(kind, draft.file, self.options)
            if drafter is None and kind.needs_file:
                raise ValueError(f"{who} needs {kind.noun}; write {name}:FILE, or give it with --draft.")
            parts.append(drafter or _made(kind, None, self.options))
        return as_given(parts)

    def _first(self, kind: type[OwnDrafter]) -> OwnDrafter | None:
        return next((drafter for drafter in self._there() if isinstance(drafter, kind)), None)

    def _there(self) -> tuple[OwnDrafter, ...]:
        """The drafters that were given, and those of the default that are not optional."""
        chosen = without_optional(require_drafters(self.default))
        return (*self.given, *(one for one in chosen if isinstance(one, OwnDrafter)))


def with_draft(drafters: Sequence[Drafter], draft: str | os.PathLike[str] | None) -> list[OwnDrafter]:
    """A preset's drafters with `draft` instead of their draft model's file. None of them if none has a draft model:
    then the draft is meant instead of them."""
    parts = [part for part in drafters if isinstance(part, OwnDrafter)]  # a preset holds no callable
    if draft is None:
        return parts
    has_draft = any(part.takes_draft for part in parts)
    return [part.but(model_path=draft) if part.takes_draft else part for part in parts] if has_draft else []


def choose_drafters(
    model: str | os.PathLike[str],
    draft: str | os.PathLike[str] | None = None,
    word: str = AUTO,
    preset: Sequence[Drafter] = (),
    options: Mapping[str, Any] = {},
) -> tuple[Drafters, str]:
    """The drafters behind the words, and the reason for the default as a sentence without its full stop.

    The order of precedence, for every command: the word, unless it is `auto`; the preset's drafters, `with_draft`; the
    model's own head; what `choose_drafter` finds: the draft, or a file on this machine that fits, and prompt lookup;
    else prompt lookup and the demo model.

    Args:
        model: Path of the target.
        draft: Path of the draft model; of the head if `word` names one without a file.
        word: The default drafter, as in a setting, or `auto`.
        preset: A preset's drafters.
        options: What holds of all but the preset's, by the names of `OwnDrafter.options`.

    Raises:
        ValueError: the model is no usable GGUF file, or the word is unknown or needs a file that is not given.
    """
    require_gguf(os.fspath(model))
    if word != AUTO:
        return _drafters_of_word(word, draft, options), f"--drafter {word}"
    head = own_head(model)
    heads = () if head is None else (_made(type(head), None, options),)
    parts = with_draft(preset, draft)
    if parts:
        return Drafters((*parts, *heads), as_given(parts), options), "the preset sets it"
    given = () if draft is None else (_made(type(drafter_of_file(model, draft)), draft, options),)
    chosen, reason = choose_drafter(model, *given)
    parts = [one for one in require_drafters(chosen) if isinstance(one, OwnDrafter)]
    kinds = [PromptLookup if isinstance(one, LookupAsWell) and _names_texts(options) else type(one) for one in parts]
    default = [_made(kind, one.file, options) for kind, one in zip(kinds, parts)]
    return Drafters((*given, *heads), as_given(default), options), reason


def _names_texts(options: Mapping[str, Any]) -> bool:
    """Whether prompt lookup is to search or keep files, so that it is not optional."""
    return any(options.get(option.name) for option in PromptLookup.options if isinstance(option, PathOption))


def _made(kind: type[OwnDrafter], file: str | os.PathLike[str] | None, options: Mapping[str, Any]) -> Any:
    return kind.make(file, **kind.fields_of(options))


def _drafters_of_word(word: str, draft: str | os.PathLike[str] | None, options: Mapping[str, Any]) -> Drafters:
    name, _, written = require_word(word).partition(":")
    kinds = WORDS[name]
    file: str | os.PathLike[str] | None = resolve_model(written) if written else None
    if file is None and any(kind.takes_file for kind in kinds):
        file, draft = draft, None
    given = [_made(kind, file, options) for kind in kinds if file is not None or not kind.needs_file]
    if draft is not None:
        given.append(_made(DraftModel, draft, options))
    drafters = Drafters(tuple(given), None, options)
    return replace(drafters, default=drafters.of_word(name, f"the drafter {name}"))
