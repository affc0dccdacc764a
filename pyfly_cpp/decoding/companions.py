"""Companions: the files on this machine that could draft for a model.

A draft model needs the vocabulary of its target, and should be much smaller. Nothing here reads weights. Which of the
fitting files drafts best, and whether any saves time, only decoding shows: the governor watches that.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pyfly_cpp import _native
from pyfly_cpp.decoding.drafters import DRAFTERS, OwnDrafter
from pyfly_cpp.errors import PyflyError
from pyfly_cpp.machine import log
from pyfly_cpp.machine.files import files_in
from pyfly_cpp.machine.memory import available, bytes_of_model
from pyfly_cpp.models.here import places
from pyfly_cpp.models.hub import parts_of
from pyfly_cpp.models.metadata import TARGET_KEY, fingerprint, metadata, open_metadata
from pyfly_cpp.models.named import embedded_model
from pyfly_cpp.models.ollama import ollama_models

MOST_SHARE = 0.5
"""A draft model of more than this share of its target's bytes is left out: a token that it drafts costs about as much
as half of one that the target decodes."""

BEST_SHARE = 0.1
"""The share that is looked for: a rule of thumb, not measured here (published pairs are 32B with 1.5B, 8B with 1B)."""

_MOST_FILES = 64  # that are looked into for one model


class Companion(NamedTuple):
    """A file that could draft for a model."""

    path: Path
    drafter: OwnDrafter
    """Configured with it."""
    size: int
    """Bytes, all parts of a split model together."""
    share: float
    """Size as a share of the target's."""


def companions(model_path: str | os.PathLike[str]) -> Iterator[Companion]:
    """The companions of a model, the most promising first: heads that lie next to it, then draft models, the one whose
    share is nearest to BEST_SHARE first. Looks next to the model and in `places`, and at the demo model for a target of
    its architecture: comparing vocabularies takes up to half a second.

    Raises:
        ValueError: the model is no usable GGUF file.
    """
    target = Path(model_path)
    candidates = _candidates(target, _native.inspect_model(str(target)).architecture)
    if not candidates:
        return
    with open_metadata(target) as model:
        beside = {one.path: _companion(model, one) for one in candidates if one.path.parent == target.parent}
        heads = [found for found in beside.values() if found is not None and found.drafter.is_head]
        own = {found.path: _made_for(found.path) for found in heads}
        print_of_target = fingerprint(target) if any(own.values()) else ""
        # One that was trained here for this very file, then those that do not say.
        yield from (found for found in heads if own[found.path] and own[found.path] == print_of_target)
        yield from (found for found in heads if not own[found.path])
        for one in candidates:
            found = beside[one.path] if one.path in beside else _companion(model, one)
            if found is not None and not found.drafter.is_head:  # a head from elsewhere may be of another model
                yield found


class _Candidate(NamedTuple):
    """Another model file of a promising size."""

    distance: float
    """The ratio by which its share differs from BEST_SHARE: >= 0."""
    path: Path
    size: int
    share: float


def _candidates(target: Path, architecture: str) -> list[_Candidate]:
    """Other models that are small enough, the most promising first: at most `_MOST_FILES`, of which as many as there
    are lie next to the target."""
    n_target, free = bytes_of_model(target), available()
    most = min(MOST_SHARE * n_target, math.inf if free is None else free / 2)  # the target needs memory, too
    seen = {os.path.realpath(target)}
    found = []
    for path in _files(target.parent, architecture):
        if parts_of(path.name)[0] != path.name or os.path.realpath(path) in seen:
            continue
        seen.add(os.path.realpath(path))
        size = bytes_of_model(path)  # 0 of a link to nothing
        if 0 < size <= most:
            share = size / n_target
            found.append(_Candidate(abs(math.log(share / BEST_SHARE)), path, size, share))
    found.sort(key=lambda one: (one.path.parent != target.parent, one))
    return sorted(found[:_MOST_FILES])


def _companion(target: Any, one: _Candidate) -> Companion | None:
    try:
        with log.silenced(unless_verbose=True):
            kind = DRAFTERS[_native.companion_word(target, str(one.path))]
    except (ValueError, PyflyError, OSError):  # it does not fit, or is damaged
        return None
    return Companion(one.path, kind.make(one.path), one.size, one.share)


def _made_for(head: Path) -> str | None:
    """The fingerprint of the model that a head was trained for; None if its file does not name it."""
    with open_metadata(head) as model:
        return metadata(model, TARGET_KEY)


def _files(own: Path, architecture: str) -> Iterator[Path]:
    yield from files_in(own, "*.gguf")
    for place in places():
        yield from files_in(place, "**/*.gguf")
    yield from ollama_models().values()
    demo = embedded_model()
    if demo is not None and _architecture(demo) == architecture:
        yield demo


def _architecture(model: Path) -> str | None:
    try:
        return _native.inspect_model(str(model)).architecture
    except (ValueError, PyflyError):  # it is damaged
        return None
