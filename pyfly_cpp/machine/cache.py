"""The folders of caches, and of pyfly-cpp's own files."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

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
