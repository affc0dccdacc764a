"""A target that is loaded so that the drafters of all settings can draft for it, and what decodes with it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyfly_cpp import _native
from pyfly_cpp.decoding import Decoding
from pyfly_cpp.decoding.drafters import MTP, Drafter, OwnDrafter, PromptLookup, has_own_head
from pyfly_cpp.decoding.drafters.lookup_texts import text_files
from pyfly_cpp.decoding.resolve import Resolved, draft_max_of
from pyfly_cpp.llama.fly_batch import FlyBatch
from pyfly_cpp.llama.fly_llama import FlyLlama
from pyfly_cpp.measure.generator import Generator
from pyfly_cpp.measure.parallel import ParallelGenerator


def load_generator(
    model: str | os.PathLike[str],
    drafters: Resolved,
    settings: Sequence[Decoding],
    n_parallel: int | None = None,
    **arguments: Any,
) -> Generator:
    """Loads a target, with its own MTP head if a setting drafts with it, and with room to roll back as deep as any
    drafts; and, to see that they fit, all that drafts.

    Args:
        n_parallel: Requests at a time, on a `ParallelGenerator`; None: one after the other.
        **arguments: Of `FlyLlama`.

    Raises:
        ValueError, PyflyError: as of `FlyLlama`, `FlyBatch` and `Generator.require`.
    """
    is_governed = any(setting.adaptive and setting.drafter is None for setting in settings)
    drafters = drafters.kept(is_governed, n_parallel or 1)
    first = _first_drafter(model, drafters, settings)
    arguments = {"drafter": first, "adaptive": False, **arguments}
    generator: Generator
    if n_parallel is None:
        generator = Generator(FlyLlama(model, **arguments), drafters)
    else:
        generator = ParallelGenerator(FlyBatch(model, n_parallel, **arguments), drafters)
    generator.require(settings)
    return generator


def _first_drafter(model: str | os.PathLike[str], drafters: Resolved, settings: Sequence[Decoding]) -> Drafter | None:
    """Arguments to load a target with, so that it has its head if one is needed, and room to roll back."""
    wanted = [(drafters.of(setting).drafters, setting.draft_max) for setting in settings]
    own_head = any(has_own_head(parts) for parts, _ in wanted if parts)
    k = max((draft_max_of(part, k or None) for parts, k in wanted for part in parts), default=0)
    if own_head:
        return MTP(draft_max=max(1, min(k, _native.inspect_model(os.fspath(model)).mtp_draft_max)))
    return PromptLookup(num_pred_tokens=k, memory=0) if k else None


def files_of(drafters: Resolved, settings: Sequence[Decoding]) -> list[Path]:
    """The files that draft for these settings, each once."""
    parts = [part for setting in settings for part in drafters.of(setting).drafters]
    paths = [part.file for part in parts if isinstance(part, OwnDrafter)]
    return [Path(path) for path in dict.fromkeys(paths) if path is not None]


def texts_of(drafters: Resolved, settings: Sequence[Decoding]) -> list[Path]:
    """The files that prompt lookup searches for these settings besides the request, as far as they can be read."""
    parts = [part for setting in settings for part in drafters.of(setting).drafters]
    named = [text for part in parts if isinstance(part, PromptLookup) for text in part.texts]
    return [file for file, _ in text_files(named) if os.access(file, os.R_OK)]
