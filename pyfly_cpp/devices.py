"""The devices that llama.cpp computes on."""

from __future__ import annotations

import ctypes
from typing import Any

_KINDS = ("CPU", "GPU", "integrated GPU", "accelerator", "meta")
"""ggml_backend_dev_type of ggml-backend.h."""


def devices() -> list[dict[str, Any]]:
    """The devices of ggml's backends; empty where its libraries cannot be asked."""
    try:
        ggml, base = _libraries()
    except (OSError, ImportError, AttributeError):
        return []
    found = []
    for i in range(ggml.ggml_backend_dev_count()):
        device = ctypes.c_void_p(ggml.ggml_backend_dev_get(i))
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        base.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        kind = base.ggml_backend_dev_type(device)
        registry = ctypes.c_void_p(base.ggml_backend_dev_backend_reg(device))
        found.append(
            {
                "backend": base.ggml_backend_reg_name(registry).decode("utf-8", errors="replace"),
                "name": base.ggml_backend_dev_name(device).decode("utf-8", errors="replace"),
                "description": base.ggml_backend_dev_description(device).decode("utf-8", errors="replace"),
                "kind": _KINDS[kind] if 0 <= kind < len(_KINDS) else str(kind),
                "memory_free": free.value,
                "memory_total": total.value,
            }
        )
    return found


def _libraries() -> tuple[Any, Any]:
    """ggml and ggml-base, as llama_cpp loaded them."""
    from llama_cpp import _ggml
    from llama_cpp._ctypes_extensions import load_shared_library

    ggml = _ggml.libggml
    base = load_shared_library("ggml-base", _ggml.libggml_base_path)
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    size = ctypes.POINTER(ctypes.c_size_t)
    base.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, size, size]
    base.ggml_backend_dev_memory.restype = None
    base.ggml_backend_dev_backend_reg.restype = ctypes.c_void_p
    for name in ("ggml_backend_dev_name", "ggml_backend_dev_description", "ggml_backend_reg_name"):
        getattr(base, name).restype = ctypes.c_char_p
    return ggml, base
