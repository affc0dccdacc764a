"""The models on this machine: the folders in which programs keep them, and the names that --model takes."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pyfly_cpp.models import hub
from pyfly_cpp.models.named import EMBEDDED, embedded_model, models_folder, named_models
from pyfly_cpp.models.ollama import ollama_models

SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
"""A part of a split model: its number, and how many there are."""


class Here(NamedTuple):
    """A model on this machine."""

    name: str
    """The word for --model."""
    size: int
    """Bytes, all parts of a split model together."""
    path: Path


def models_here() -> list[Here]:
    """The demo model if it is installed, then the GGUF models in the folders in which programs keep them
    (`places`). Looks at names alone; a file there may be damaged, or a head."""
    found = {}
    named = {path: name for name, path in named_models().items()}
    demo = embedded_model()
    if demo is not None:
        found[demo] = Here(EMBEDDED, file_size(demo), demo)
    for place in places():
        for path in sorted(place.rglob("*.gguf")):
            name = path.relative_to(place)
            try:
                if (
                    path not in found
                    and not hub.goes_with_a_model(path.name)
                    and hub.parts_of(path.name)[0] == path.name
                ):
                    found[path] = Here(named.get(path) or _name(place, name), file_size(path), path)
            except OSError:  # a link to nothing
                continue
    for ollama, path in ollama_models().items():
        found[path] = Here(ollama, file_size(path), path)
    return list(found.values())


def _name(place: Path, name: Path) -> str:
    folder, *rest = name.parts
    if folder.startswith("models--") and len(rest) > 2 and rest[0] == "snapshots":  # the hub's cache
        owner, _, repo = folder[len("models--") :].partition("--")
        return str(hub.HubName(f"{owner}/{repo}", "/".join(rest[2:])))
    return str(place / name)


def places() -> list[Path]:
    """Folders in which programs keep GGUF files: ours, the hub's cache, llama.cpp's and LM Studio's. They need not
    exist."""
    wanted: tuple[Callable[[], Path], ...] = (
        models_folder,
        lambda: Path(os.environ.get("HF_HUB_CACHE") or _of_hub() / "hub").expanduser(),
        lambda: Path(os.environ.get("LLAMA_CACHE") or _of_llama_cpp()),
        lambda: Path.home() / ".lmstudio" / "models",
        lambda: Path.home() / ".cache" / "lm-studio" / "models",
    )
    found = []
    for place in wanted:
        with contextlib.suppress(RuntimeError):  # the user of a service may have no home folder
            found.append(place())
    return found


def _of_hub() -> Path:
    return Path(os.environ.get("HF_HOME") or _user_cache() / "huggingface")


def _of_llama_cpp() -> Path:
    return (Path.home() / "Library" / "Caches" if sys.platform == "darwin" else _user_cache()) / "llama.cpp"


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def file_size(path: Path) -> int:
    """Bytes of a model, all parts of a split one together."""
    found = SHARD.search(path.name)
    if found is None:
        return path.stat().st_size
    stem = path.name[: found.start()]
    return sum(part.stat().st_size for part in path.parent.glob(f"{stem}-*-of-{found.group(2)}.gguf"))
