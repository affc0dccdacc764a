"""What the drafter words of settings stand for, and a target that is loaded so that all of them can draft for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyfly_cpp import _native
from pyfly_cpp.arguments import draft_max_of
from pyfly_cpp.auto import choose_drafter, own_head
from pyfly_cpp.decoding import Decoding, parse_drafter
from pyfly_cpp.drafters import (
    MTP,
    WORDS,
    AnyDrafter,
    Drafter,
    DraftModel,
    OwnDrafter,
    PromptLookup,
    as_given,
    has_own_head,
    require_drafters,
)
from pyfly_cpp.files import require_gguf
from pyfly_cpp.llama import FlyLlama
from pyfly_cpp.models import resolve_model
from pyfly_cpp.parallel import FlyBatch

AUTO = "auto"
"""The model's MTP head, else the draft model, else prompt lookup: as in `pyfly-cpp chat`."""


@dataclass(frozen=True)
class Drafters:
    """What the drafter words of settings stand for."""

    given: tuple[OwnDrafter, ...] = ()
    """The drafters that are there, the first of a kind counts. A word that needs no file stands for its kind's default
    where there is none."""
    default: AnyDrafter | None = None
    """Of a setting without a word; None: the draft model if there is one, else prompt lookup."""

    def words(self) -> list[str]:
        """The words that stand for something here: heads first, what needs nothing last."""
        found = [drafter.word for drafter in sorted(self.given, key=lambda drafter: not drafter.is_head)]
        free = [word for word, (kind, *more) in WORDS.items() if not (more or kind.takes_file)]
        return [*dict.fromkeys([word for word in found if word not in free]), *free]

    def of(self, setting: Decoding) -> AnyDrafter | None:
        """What drafts for a setting; None for plain decoding.

        Raises:
            ValueError: the setting needs a file that nobody has named.
        """
        if setting.is_plain:
            return None
        if setting.drafter is None:
            drafter = self.default or self._first(DraftModel) or self._first(PromptLookup) or PromptLookup()
        else:
            drafter = self.of_word(setting.drafter, f"the setting {str(setting)!r}")
        # Prompts are answered again and again, which is not to be looked up.
        return as_given([d.alone if isinstance(d, PromptLookup) else d for d in require_drafters(drafter)])

    def of_word(self, word: str, who: str) -> AnyDrafter | None:
        """What a drafter's word stands for; `who` begins the message of the ValueError."""
        name, _, written = word.partition(":")
        if written:
            (kind,) = WORDS[name]
            return kind.make(resolve_model(written))
        parts: list[Drafter] = []
        for kind in WORDS[name]:
            drafter = self._first(kind)
            draft = self._first(DraftModel) if kind.takes_draft else None
            if drafter is None and draft is not None:
                drafter = kind.make(draft.model_path)  # type: ignore[attr-defined]
            if drafter is None and kind.needs_file:
                raise ValueError(f"{who} needs {kind.noun}; write {kind.word}:FILE, or give it with --draft.")
            parts.append(drafter or kind.make())
        return as_given(parts)

    def _first(self, kind: type[OwnDrafter]) -> OwnDrafter | None:
        return next((drafter for drafter in self.given if isinstance(drafter, kind)), None)


def choose_drafters(
    model: str | os.PathLike[str],
    draft: str | os.PathLike[str] | None = None,
    word: str = AUTO,
    preset: AnyDrafter | None = None,
) -> tuple[Drafters, str]:
    """What the words stand for, and a sentence without its full stop on why the default is what it is.

    Args:
        model: Path of the target.
        draft: Path of the draft model; of the head if `word` names one without a file.
        word: The default drafter, as in a setting, or `auto`.
        preset: A preset's drafter; the default if `word` is `auto`, with `draft` in place of its draft model's file.

    Raises:
        ValueError: the model is no usable GGUF file, or the word is unknown or needs a file that is not given.
    """
    require_gguf(os.fspath(model))
    head = own_head(model)
    heads = [] if head is None else [head]
    given: list[OwnDrafter] = []
    if word != AUTO:
        name, _, written = parse_drafter(word).partition(":")
        kind = WORDS[name][-1]
        file: str | os.PathLike[str] | None = resolve_model(written) if written else None
        if file is None and kind.takes_file:
            file, draft = draft, None
        if file is not None:
            given.append(kind.make(file))
        if draft is not None:
            given.append(DraftModel(draft))
        drafters = Drafters((*given, *heads))
        return replace(drafters, default=drafters.of_word(name, f"the drafter {name}")), f"--drafter {word}"
    parts = [part for part in require_drafters(preset) if isinstance(part, OwnDrafter)]
    if parts and (draft is None or any(part.takes_draft for part in parts)):
        if draft is not None:
            parts = [part.but(model_path=draft) if part.takes_draft else part for part in parts]
        return Drafters((*parts, *heads), as_given(parts)), "the preset says so"
    if draft is not None:
        given.append(DraftModel(draft))
    default, reason = choose_drafter(model, given[0] if given else None)
    return Drafters((*given, *heads), default), reason


def load_target(
    model: str | os.PathLike[str],
    drafters: Drafters,
    settings: Sequence[Decoding],
    draft_max: int = 0,
    **arguments: Any,
) -> FlyLlama:
    """The target, with its own MTP head if a setting drafts with it, and with room to roll back as deep as any drafts.

    Args:
        draft_max: A K for which there shall be room, too.
        **arguments: Of `FlyLlama`.
    """
    drafter = _first_drafter(model, drafters, settings, draft_max)
    return FlyLlama(model, drafter=drafter, adaptive=False, **arguments)


def load_batch(
    model: str | os.PathLike[str], drafters: Drafters, settings: Sequence[Decoding], n_parallel: int, **arguments: Any
) -> FlyBatch:
    """The same for n_parallel texts at once."""
    drafter = _first_drafter(model, drafters, settings, 0)
    return FlyBatch(model, n_parallel, drafter=drafter, adaptive=False, **arguments)


def _first_drafter(
    model: str | os.PathLike[str], drafters: Drafters, settings: Sequence[Decoding], draft_max: int
) -> Drafter | None:
    """What a target is loaded with, so that it has its head if one is needed, and room to roll back."""
    wanted = [(require_drafters(drafters.of(setting)), setting.draft_max) for setting in settings]
    own_head = any(has_own_head(parts) for parts, _ in wanted if parts)
    k = max((draft_max_of(part, k or None) for parts, k in wanted for part in parts), default=0)
    k = max(k, draft_max)
    if own_head:
        return MTP(draft_max=max(1, min(k, _native.inspect_model(os.fspath(model)).mtp_draft_max)))
    return PromptLookup(num_pred_tokens=k, memory=0) if k else None


def files_of(drafters: Drafters, settings: Sequence[Decoding]) -> list[Path]:
    """The files that draft for these settings, each once."""
    parts = [part for setting in settings for part in require_drafters(drafters.of(setting))]
    paths = [part.file for part in parts if isinstance(part, OwnDrafter)]
    return [Path(path) for path in dict.fromkeys(paths) if path is not None]
