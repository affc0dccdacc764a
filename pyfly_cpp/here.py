"""The models on this machine, by the names that --model takes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pyfly_cpp import hub
from pyfly_cpp.companions import file_size, places
from pyfly_cpp.models import EMBEDDED, embedded_model, named_models


class Here(NamedTuple):
    """A model on this machine."""

    name: str
    """What --model takes."""
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
    return list(found.values())


def _name(place: Path, name: Path) -> str:
    folder, *rest = name.parts
    if folder.startswith("models--") and len(rest) > 2 and rest[0] == "snapshots":  # the hub's cache
        owner, _, repo = folder[len("models--") :].partition("--")
        return str(hub.HubName(f"{owner}/{repo}", "/".join(rest[2:])))
    return str(place / name)
