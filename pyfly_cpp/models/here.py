"""The models on this machine: the folders in which programs keep them, and the names that --model takes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pyfly_cpp.machine.cache import user_cache
from pyfly_cpp.machine.files import files_in
from pyfly_cpp.machine.memory import bytes_of_model
from pyfly_cpp.models import hub
from pyfly_cpp.models.named import EMBEDDED, embedded_model, models_folder, named_models
from pyfly_cpp.models.ollama import ollama_models


class Here(NamedTuple):
    """A model on this machine."""

    name: str
    """The word for --model."""
    size: int
    """Size in bytes, all parts of a split model together."""
    path: Path


def models_here() -> list[Here]:
    """The demo model if it is installed, then the GGUF models in the folders in which programs keep them
    (`places`). Looks at names alone; a file there may be damaged, or a head."""
    found = {}
    named = {path: name for name, path in named_models().items()}
    demo = embedded_model()
    if demo is not None:
        found[demo] = Here(EMBEDDED, bytes_of_model(demo), demo)
    for place in places():
        for path in files_in(place, "**/*.gguf"):
            if path not in found and not hub.goes_with_a_model(path.name) and hub.parts_of(path.name)[0] == path.name:
                name, size = named.get(path) or _name(place, path), bytes_of_model(path)
                if name is not None and size:  # and no link to nothing
                    found[path] = Here(name, size, path)
    for ollama, path in ollama_models().items():
        found[path] = Here(ollama, bytes_of_model(path), path)
    return list(found.values())


def _name(place: Path, path: Path) -> str | None:
    """The word for --model; None for what the hub's cache keeps of an older version of a repository."""
    folder, *rest = path.relative_to(place).parts
    if folder.startswith("models--") and len(rest) > 2 and rest[0] == "snapshots":
        newest = hub.snapshot(place / folder)
        if newest is not None:
            owner, _, repo = folder[len("models--") :].partition("--")
            is_newest = rest[1] == newest.name
            return str(hub.HubName(f"{owner}/{repo}", "/".join(rest[2:]))) if is_newest else None
    return str(path)


def places() -> list[Path]:
    """Folders in which programs keep GGUF files: ours, the hub's cache, llama.cpp's and LM Studio's. They need not
    exist."""
    wanted: tuple[Callable[[], Path], ...] = (
        models_folder,
        _of_hub,
        lambda: Path(os.environ.get("LLAMA_CACHE") or user_cache() / "llama.cpp"),
        lambda: Path.home() / ".lmstudio" / "models",
        lambda: Path.home() / ".cache" / "lm-studio" / "models",
    )
    found = []
    for place in wanted:
        with contextlib.suppress(RuntimeError):  # the user of a service may have no home folder
            found.append(place())
    return found


def _of_hub() -> Path:
    """The hub's cache, by the rules of huggingface_hub, which need not be installed."""
    given = os.environ.get
    cache = given("HF_HUB_CACHE") or given("HUGGINGFACE_HUB_CACHE")
    if not cache:
        home = given("HF_HOME") or Path(given("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
        cache = os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(cache)))
