"""The folders of pyfly-cpp's own files."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """The folder for files that can be made again: `pyfly-cpp` in the user's cache folder. It need not exist.

    Raises:
        RuntimeError: the user has no home folder, and no variable names a cache folder.
    """
    if sys.platform == "win32":
        cache = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        cache = Path.home() / "Library" / "Caches"
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "pyfly-cpp"


def state_folder() -> Path:
    """The folder for files worth keeping: the history of the input, measurements of an interrupted benchmark. It need
    not exist.

    Raises:
        RuntimeError: the user has no home folder, and no variable names a folder.
    """
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "pyfly-cpp"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "pyfly-cpp"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "pyfly-cpp"
