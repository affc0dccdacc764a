"""The folders of caches, and of pyfly-cpp's own files."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from pyfly_cpp.machine.files import OutputError


def user_cache() -> Path:
    """The folder in which programs keep what can be made again. It need not exist.

    Raises:
        RuntimeError: the user has no home folder, and no variable names a cache folder.
    """
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def cache_folder() -> Path:
    """The folder for files that can be made again: `pyfly-cpp` in `user_cache`, which may raise. It need not exist."""
    return user_cache() / "pyfly-cpp"


@functools.cache
def _warn_unwritable() -> None:
    """Warns, once in a process."""
    variable = {"win32": "LOCALAPPDATA", "darwin": "HOME"}.get(sys.platform, "XDG_CACHE_HOME")
    warnings.warn(
        f"what was measured cannot be kept in the cache folder, so it is measured again at every start; set {variable} "
        "to a folder that can be written.",
        RuntimeWarning,
        stacklevel=4,
    )


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """A block that writes to the cache folder: if that fails, warns once in a process, and continues."""
    try:
        yield
    except (OSError, RuntimeError, OutputError):
        _warn_unwritable()


def state_folder() -> Path:
    """The folder for files worth keeping: the history of the input, measurements of an interrupted benchmark. It need
    not exist.

    Raises:
        RuntimeError: the user has no home folder, and no variable names a folder.
    """
    if sys.platform == "win32":
        return cache_folder()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "pyfly-cpp"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "pyfly-cpp"


_KEPT: dict[str, tuple[Callable[[], Path], str, str]] = {
    "costs": (cache_folder, "costs", "measured costs of batches and drafts"),
    "kernels": (cache_folder, "kernels.json", "which kernels are right and fast on this machine"),
    "history": (state_folder, "chat_history", "what was typed in chat"),
    "bench": (state_folder, "bench", "measurements of interrupted benchmarks"),
}
"""What pyfly-cpp keeps besides models, by name: its folder, the name there of a file or folder, and a description."""


class Kept(NamedTuple):
    """Something that pyfly-cpp keeps besides models, and that is there."""

    name: str
    """One of "costs", "kernels", "history", "bench"."""
    what: str
    """A description for people."""
    size: int
    """Bytes."""
    path: Path
    """A file, or a folder of files."""


def kept_path(name: str) -> Path:
    """The file or folder of this name (`Kept.name`). It need not exist; may raise, as the function of its folder."""
    folder, inside, _ = _KEPT[name]
    return folder() / inside


def kept_here() -> list[Kept]:
    """What pyfly-cpp keeps on this machine besides models; empty if the user has no home folder."""
    found = []
    for name, (_, _, what) in _KEPT.items():
        with contextlib.suppress(OSError, RuntimeError):
            path = kept_path(name)
            if path.exists():
                files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
                size = sum(file.stat().st_size for file in files)
                if size:  # an empty folder stays when an interrupted benchmark has been finished
                    found.append(Kept(name, what, size, path))
    return found
