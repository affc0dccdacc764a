"""Where pyfly-cpp keeps what can be made again."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """`pyfly-cpp` in the user's cache folder. It need not exist.

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
