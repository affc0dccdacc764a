"""`drafter="auto"`: which drafter a model asks for."""

from __future__ import annotations

import os
from typing import NamedTuple

from pyfly_cpp import _native
from pyfly_cpp.drafters import MTP, Drafter, DraftModel, PromptLookup


class AutoDrafter(NamedTuple):
    """A drafter, and why it was chosen."""

    drafter: Drafter
    reason: str
    """A sentence without its full stop."""


def choose_drafter(
    model_path: str | os.PathLike[str], draft: Drafter | str | os.PathLike[str] | None = None
) -> AutoDrafter:
    """The drafter for a model: its own MTP head, else the draft that was given, else prompt lookup.

    Reads the header of the GGUF file, not the model.

    Args:
        model_path: Path of the target's GGUF file.
        draft: A drafter, or the path of a draft model, for the case that the model has no head.

    Raises:
        ValueError: the file is no usable GGUF model.
    """
    info = _native.inspect_model(os.fspath(model_path))
    if info.mtp_draft_max > 0:
        return AutoDrafter(MTP(), "the model carries an MTP head")
    why = "carries no MTP head that llama.cpp can run" if info.n_nextn > 0 else "carries no MTP head"
    if draft is not None:
        given = DraftModel(draft) if isinstance(draft, (str, os.PathLike)) else draft
        return AutoDrafter(given, f"the model {why}, and a draft was given")
    return AutoDrafter(PromptLookup(), f"the model {why}, and no draft was given")
