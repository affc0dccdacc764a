"""The metadata of a GGUF file, as llama.cpp reads it without the weights."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp

from pyfly_cpp import _native
from pyfly_cpp.errors import ArgumentError
from pyfly_cpp.machine import log, memory

TARGET_KEY = "pyfly.target.fingerprint"
"""The key under which a head that pyfly-cpp has trained names its target, by its `fingerprint`."""


_ENDS = 1 << 22
"""Bytes at each end of a file that its fingerprint covers."""


@contextlib.contextmanager
def open_metadata(path: Path, **params: Any) -> Iterator[Any]:
    """The model as llama.cpp sees it without its weights: a llama_model, with what `params` sets.

    Raises:
        ValueError: llama.cpp cannot load it.
    """
    model_params = llama_cpp.llama_model_default_params()
    memory.leave_weights(model_params)
    for name, value in params.items():
        setattr(model_params, name, value)
    with _native.load_guard(), log.silenced(unless_verbose=True):
        model = llama_cpp.llama_model_load_from_file(os.fsencode(path), model_params)
    if not model:
        raise ArgumentError(
            f"llama-cpp-python {llama_cpp.__version__} cannot load {os.fspath(path)!r}{{log}}; {{verbose}} shows why."
        )
    try:
        yield model
    finally:
        llama_cpp.llama_model_free(model)


def metadata(model: Any, key: str) -> str | None:
    """A value of the GGUF file's metadata as text; `{arch}` in the key stands for its architecture."""
    if "{arch}" in key:
        key = key.format(arch=metadata(model, "general.architecture") or "")
    buffer = ctypes.create_string_buffer(256)
    n = llama_cpp.llama_model_meta_val_str(model, key.encode("utf-8"), buffer, len(buffer))
    return buffer.value.decode("utf-8", errors="replace") if n >= 0 else None


def quantisation(model: Any) -> str:
    """The type of most weights of a llama_model, as names of files have it: "Q4_K_M"."""
    described = ctypes.create_string_buffer(256)
    llama_cpp.llama_model_desc(model, described, len(described))
    return _as_in_names(" ".join(described.value.decode("utf-8", errors="replace").split()[2:]))


def _as_in_names(described: str) -> str:
    """`Q4_K_M` for llama.cpp's `Q4_K - Medium`, `IQ4_XS` for `IQ4_XS - 4.25 bpw`."""
    name, _, more = described.partition(" - ")
    size = {"Small": "_S", "Medium": "_M", "Large": "_L"}.get(more, "")
    return name if name.endswith("Q2_K") and size == "_M" else name + size


def is_whole_model(path: str | os.PathLike[str]) -> bool:
    """Whether the file is a whole model: not a head, and readable."""
    try:
        _native.inspect_model(os.fspath(path))
    except ValueError:
        return False
    return True


def fingerprint(path: Path) -> str:
    """An identity of a file's content in hexadecimal: a hash of its size, its first and its last 4 MiB."""
    n = path.stat().st_size
    digest = hashlib.sha256(str(n).encode())
    with path.open("rb") as file:
        digest.update(file.read(_ENDS))
        file.seek(max(0, n - _ENDS))
        digest.update(file.read(_ENDS))
    return digest.hexdigest()
