"""Models that Ollama has pulled: GGUF files without such a name, which its manifests name."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from pyfly_cpp.machine.files import files_in

PREFIX = "ollama:"
"""Prefix of Ollama's names in --model."""

_LIBRARY = "registry.ollama.ai/library/"
_MODEL = "application/vnd.ollama.image.model"


def ollama_models() -> dict[str, Path]:
    """The model files of Ollama on this machine, by their names with `PREFIX`: `ollama:llama3.2:1b`."""
    found: dict[str, Path] = {}
    for store in _stores():
        for manifest in files_in(store, "manifests/**/*"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # somebody else's file
                layers = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
                digest = {layer["mediaType"]: layer["digest"] for layer in layers}[_MODEL]
                blob = store / "blobs" / digest.replace(":", "-")
                if blob.is_file():
                    found.setdefault(_name(manifest.relative_to(store / "manifests")), blob)
    return found


def shown_name(path: Path) -> str:
    """A file's name for people: Ollama's own for one of its files."""
    names = ollama_models() if path.name.startswith("sha256-") else {}
    return next((name.removeprefix(PREFIX) for name, blob in names.items() if blob == path), path.name)


def _name(path: Path) -> str:
    return f"{PREFIX}{path.parent.as_posix().removeprefix(_LIBRARY)}:{path.name}"


def _stores() -> Iterator[Path]:
    if os.environ.get("OLLAMA_MODELS"):
        yield Path(os.environ["OLLAMA_MODELS"])
        return
    with contextlib.suppress(RuntimeError):  # no home folder
        yield Path.home() / ".ollama" / "models"
    yield Path("/usr/share/ollama/.ollama/models")
