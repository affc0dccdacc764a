"""What the drafter words of settings stand for, and a target that is loaded so that all of them can draft for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyfly_cpp import _native
from pyfly_cpp.auto import choose_drafter
from pyfly_cpp.drafters import MTP, AnyDrafter, Drafter, DraftModel, Eagle3, PromptLookup, require_drafters
from pyfly_cpp.evaluation.settings import Setting, parse_drafter
from pyfly_cpp.files import require_gguf
from pyfly_cpp.llama import FlyLlama
from pyfly_cpp.models import resolve_model

AUTO = "auto"
"""The model's MTP head, else the draft model, else prompt lookup: as in `pyfly-cpp chat`."""


@dataclass(frozen=True)
class Drafters:
    """What the drafter words of settings stand for."""

    draft: DraftModel | None = None
    lookup: PromptLookup = PromptLookup()  # noqa: RUF009 - frozen
    mtp: MTP = MTP()  # noqa: RUF009 - frozen
    eagle3: Eagle3 | None = None
    default: AnyDrafter | None = None
    """Of a setting without a word; None: the draft model if there is one, else prompt lookup."""

    def words(self) -> list[str]:
        """The words that stand for something here, a tool of last resort last."""
        mtp = ["mtp"] if isinstance(self.default, MTP) or self.mtp.model_path is not None else []
        eagle3 = ["eagle3"] if self.eagle3 is not None else []
        return [*mtp, *eagle3, *(["draft"] if self.draft is not None else []), "lookup"]

    def of(self, setting: Setting) -> AnyDrafter | None:
        """What drafts for a setting; None for plain decoding.

        Raises:
            ValueError: the setting needs a file that nobody has named.
        """
        if setting.is_plain:
            return None
        if setting.drafter is None:
            return self.default or self.draft or self.lookup
        name, _, written = setting.drafter.partition(":")
        file = resolve_model(written) if written else None
        if name == "lookup":
            return self.lookup
        if name == "mtp":
            return MTP(file) if file else self.mtp
        if name == "eagle3":
            if not file and self.eagle3 is None:
                raise ValueError(f"the setting {str(setting)!r} needs an EAGLE-3 head; write eagle3:FILE.")
            return Eagle3(file) if file else self.eagle3
        draft = DraftModel(file) if file else self.draft
        if draft is None:
            raise ValueError(f"the setting {str(setting)!r} needs a draft model; give one with --draft.")
        return (self.lookup, draft) if name == "both" else draft


def choose_drafters(
    model: str | os.PathLike[str],
    draft: str | os.PathLike[str] | None = None,
    word: str = AUTO,
    preset: AnyDrafter | None = None,
) -> tuple[Drafters, str]:
    """What the words stand for, and a sentence without its full stop on why the default is what it is.

    Args:
        model: Path of the target.
        draft: Path of the draft model; of the head if `word` is `mtp` or `eagle3`.
        word: The default drafter, as in a setting, or `auto`.
        preset: A preset's drafter; the default if `word` is `auto`, with `draft` in place of its draft model's file.

    Raises:
        ValueError: the model is no usable GGUF file, or the word is unknown or needs a file that is not given.
    """
    require_gguf(os.fspath(model))
    chosen = choose_drafter(model)
    own_head = chosen.drafter if isinstance(chosen.drafter, MTP) else MTP()
    if word != AUTO:
        name, _, written = parse_drafter(word).partition(":")
        file: str | os.PathLike[str] | None = resolve_model(written) if written else None
        if file is None and name in ("mtp", "eagle3"):
            file, draft = draft, None
        if file is None and name == "eagle3":
            raise ValueError("the drafter eagle3 needs its head; write eagle3:FILE, or give it with --draft.")
        if file is not None and name == "draft":
            draft = file
        if draft is None and name in ("draft", "both"):
            raise ValueError(f"the drafter {name} needs a draft model; give one with --draft.")
        drafters = Drafters(
            draft=DraftModel(draft) if draft is not None else None,
            mtp=MTP(file) if name == "mtp" and file is not None else own_head,
            eagle3=Eagle3(file) if name == "eagle3" and file is not None else None,
        )
        return replace(drafters, default=drafters.of(Setting(drafter=name))), f"--drafter {word}"
    parts = require_drafters(preset)
    if parts and (draft is None or any(isinstance(part, DraftModel) for part in parts)):
        if draft is not None:
            parts = tuple(replace(part, model_path=draft) if isinstance(part, DraftModel) else part for part in parts)

        def of_kind(kind: type, otherwise: Any) -> Any:
            return next((part for part in parts if isinstance(part, kind)), otherwise)

        drafters = Drafters(
            of_kind(DraftModel, None), of_kind(PromptLookup, PromptLookup()), of_kind(MTP, own_head),
            of_kind(Eagle3, None), parts[0] if len(parts) == 1 else parts,
        )  # fmt: skip
        return drafters, "the preset says so"
    given = None if draft is None else DraftModel(draft)
    default, reason = choose_drafter(model, given)
    return Drafters(given, mtp=own_head, default=default), reason


def load_target(
    model: str | os.PathLike[str],
    drafters: Drafters,
    settings: Sequence[Setting],
    draft_max: int = 0,
    **arguments: Any,
) -> FlyLlama:
    """The target, with its own MTP head if a setting drafts with it, and with room to roll back as deep as any drafts.

    Args:
        draft_max: A K for which there shall be room, too.
        **arguments: Of `FlyLlama`.
    """
    wanted = [(require_drafters(drafters.of(setting)), setting.draft_max) for setting in settings]
    own_head = any(isinstance(d, MTP) and d.model_path is None for parts, _ in wanted for d in parts)
    k = max((k or max(getattr(d, "draft_max", 1) for d in parts) for parts, k in wanted if parts), default=0)
    k = max(k, draft_max)
    first: Drafter | None = PromptLookup(num_pred_tokens=k) if k else None
    if own_head:
        first = MTP(draft_max=max(1, min(k, _native.inspect_model(os.fspath(model)).mtp_draft_max)))
    return FlyLlama(model, drafter=first, **arguments)


def files_of(drafters: Drafters, settings: Sequence[Setting]) -> list[Path]:
    """The model files that draft for these settings, each once."""
    parts = [part for setting in settings for part in require_drafters(drafters.of(setting))]
    paths = [getattr(part, "model_path", None) for part in parts]
    return [Path(path) for path in dict.fromkeys(paths) if path is not None]
