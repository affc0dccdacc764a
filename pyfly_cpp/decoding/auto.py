"""`drafter="auto"`: which drafter a model asks for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pyfly_cpp import _native
from pyfly_cpp.decoding.companions import companions
from pyfly_cpp.decoding.drafters import (
    DRAFTERS,
    MTP,
    AnyDrafter,
    CrossVocabulary,
    Drafter,
    DraftModel,
    OwnDrafter,
    PromptLookup,
)
from pyfly_cpp.machine import log
from pyfly_cpp.machine.devices import default_gpus
from pyfly_cpp.machine.files import require_gguf
from pyfly_cpp.machine.memory import available, bytes_of_model
from pyfly_cpp.models.metadata import open_metadata
from pyfly_cpp.models.named import embedded_model

MOST_SHARE_OF_DEMO = 0.15
"""Of the model's bytes, for the demo model to draft as well as prompt lookup. Both are 1.17 times as fast as lookup
alone at a share of 0.09, and no faster at 0.18 (docs/design/governor.md)."""

_N_CTX_OF_DEMO = 2048  # tokens of each text that it sees; its cache takes 47 MB for them


@dataclass(frozen=True)
class DemoDraft(CrossVocabulary):
    """The demo model, chosen automatically."""

    is_optional = True

    @classmethod
    def make(cls, file: str | os.PathLike[str] | None = None, **fields: Any) -> CrossVocabulary:
        return super().make(file, **{"n_ctx": _N_CTX_OF_DEMO, **fields})


@dataclass(frozen=True)
class LookupAsWell(PromptLookup):
    """Prompt lookup, chosen automatically for repetitions, which a drafter that fits the model copies more slowly."""

    is_optional = True


class AutoDrafter(NamedTuple):
    """A drafter, and why it was chosen."""

    drafter: AnyDrafter
    reason: str
    """A sentence without its full stop."""


def own_head(model_path: str | os.PathLike[str]) -> MTP | None:
    """The MTP head in the model's own file, if llama.cpp can run it. Raises ValueError for no usable GGUF model."""
    return _head(_native.inspect_model(os.fspath(model_path)))


def _head(info: _native.ModelInfo) -> MTP | None:
    return MTP() if info.mtp_draft_max > 0 else None


def drafter_of_file(model_path: str | os.PathLike[str], file: str | os.PathLike[str]) -> OwnDrafter:
    """The drafter that a file is for a model: a draft model, or the head that its header describes. Reads no weights.

    Raises:
        ValueError, PyflyError: it is neither, or the head of another model.
    """
    if os.path.isfile(file):  # opening it tells why not
        require_gguf(os.fspath(file), "draft model")
        if not _is_whole(file):
            with open_metadata(Path(model_path)) as model, log.silenced(unless_verbose=True):
                kind = DRAFTERS[_native.companion_word(model, os.fspath(file))]
            made: OwnDrafter = kind.make(file)
            return made
    return DraftModel(file)


def _is_whole(file: str | os.PathLike[str]) -> bool:
    try:
        _native.inspect_model(os.fspath(file))
    except ValueError:
        return False
    return True


def choose_drafter(
    model_path: str | os.PathLike[str], draft: Drafter | str | os.PathLike[str] | None = None
) -> AutoDrafter:
    """The drafter for a model: its own MTP head, else the draft that was given, else the best of the files on this
    machine that could draft for it (`companions`), and prompt lookup as well; else prompt lookup and, on a machine
    without a GPU, the demo model if it is far smaller. What comes as well is optional (`OwnDrafter.is_optional`).

    Reads headers of GGUF files, not the models.

    Args:
        model_path: Path of the target's GGUF file.
        draft: A drafter, or the path of a draft model or head, for the case that the model has no head.

    Raises:
        ValueError: the file is no usable GGUF model.
    """
    info = _native.inspect_model(os.fspath(model_path))
    head = _head(info)
    if head is not None:
        return AutoDrafter(head, "the model has an MTP head")
    why = "has no MTP head that llama.cpp can run" if info.n_nextn > 0 else "has no MTP head"
    if draft is not None:
        given = drafter_of_file(model_path, draft) if isinstance(draft, (str, os.PathLike)) else draft
        return AutoDrafter(_with_lookup(given), f"the model {why}, and a draft was given")
    found = next(companions(model_path), None)
    if found is not None:
        where = "next to it" if found.path.parent == Path(model_path).parent else "on this machine"
        return AutoDrafter(
            _with_lookup(found.drafter),
            f"the model {why}, and {found.path.name} {where} fits it at {found.share:.0%} of its size",
        )
    reason, demo = f"the model {why}, and no file on this machine fits it as a draft", _demo_draft(model_path)
    if demo is None:
        return AutoDrafter(PromptLookup(), reason)
    return AutoDrafter((PromptLookup(), demo), f"{reason}; the demo model is far smaller")


def _with_lookup(drafter: Drafter) -> AnyDrafter:
    """The drafter, and prompt lookup as well if it is a draft model or a head. Callables may look up themselves, and
    nothing was measured beside a model's own head."""
    is_other = isinstance(drafter, OwnDrafter) and not isinstance(drafter, (PromptLookup, MTP))
    return (LookupAsWell(), drafter) if is_other else drafter


def _demo_draft(model_path: str | os.PathLike[str]) -> CrossVocabulary | None:
    """The demo model for a model of another family. What it is worth with a GPU was not measured."""
    demo = embedded_model()
    if demo is None or default_gpus():
        return None
    size, n_target = bytes_of_model(demo), bytes_of_model(model_path)
    free = available()
    if size > MOST_SHARE_OF_DEMO * n_target or (free is not None and n_target + 3 * size > free):
        return None
    return DemoDraft.make(demo)
