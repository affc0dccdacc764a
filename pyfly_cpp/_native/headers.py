"""The headers of llama.cpp that come with llama-cpp-python: what the extension is compiled against.

The build loads this file by its path (csrc/build_support/llama_cpp_python.py), so it imports only what Python comes
with.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

NAMES = ("llama.h", "ggml.h", "ggml-alloc.h", "ggml-backend.h", "ggml-cpu.h", "gguf.h")
"""The headers that csrc/ includes."""


def include_folder(package: Path) -> Path | None:
    """The folder with llama.h and ggml.h.

    Args:
        package: Folder of the package `llama_cpp`.

    Returns:
        The folder; None if llama-cpp-python came without headers.
    """
    for folder in (package.parent / "include", package / "include"):
        if (folder / "llama.h").is_file():
            return folder
    return None


def digest(folder: Path) -> str:
    """SHA-256 of the headers, in hexadecimal. Two builds of one release differ in it if their llama.cpp declares
    something else, such as a structure with one more field. Line ends do not count.

    Raises:
        OSError: a header is missing, or cannot be read.
    """
    content = hashlib.sha256()
    for name in NAMES:
        content.update((folder / name).read_bytes().replace(b"\r\n", b"\n"))
    return content.hexdigest()
