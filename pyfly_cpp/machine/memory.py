"""How much memory there is, and how much a context would take."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import llama_cpp

from pyfly_cpp import _native
from pyfly_cpp.machine import groups, log
from pyfly_cpp.machine.files import files_of_model, require_gguf
from pyfly_cpp.machine.releases import CACHE_TYPES

_MOST_AUTOMATIC = 8
"""The largest automatic number of requests: more gain little on most processors."""

_SHARE = 0.25
"""The share of the free memory that their caches may take then."""

_MOST_SIMULATED = 2**18
"""Most cells of the context that is simulated, because llama.cpp fills a list of all of them. The size of a larger one
is extrapolated from this one and one of half its size."""


def simulated_context(path: str, model_params: Any, context_params: Any, n_requests: int, n_ctx: int) -> int | None:
    """Bytes of this computer's memory that a context of n_requests and n_ctx tokens would take in addition to the
    weights, or None if llama.cpp does not report it. Reads the file's header.

    Args:
        path: The GGUF file.
        model_params: llama_model_params it is loaded with.
        context_params: llama_context_params, except for the sizes.
        n_requests: Sequences.
        n_ctx: Cells that they share; 0: as many as the model was trained with.
    """
    dry_model, dry_context = _copy(model_params), _copy(context_params)
    leave_weights(dry_model)
    dry_model.progress_callback = llama_cpp.llama_progress_callback()
    dry_context.n_seq_max = n_requests
    with contextlib.ExitStack() as stack:
        stack.enter_context(log.silenced())  # what is to be said is said of the real one
        model = llama_cpp.llama_model_load_from_file(path.encode(), dry_model)
        if not model:
            return None
        stack.callback(llama_cpp.llama_model_free, model)
        n_ctx = n_ctx or llama_cpp.llama_model_n_ctx_train(model)
        if n_ctx <= _MOST_SIMULATED:
            return _simulated(model, dry_context, n_ctx)
        half = _MOST_SIMULATED // 2
        less, more = (_simulated(model, dry_context, n) for n in (half, 2 * half))
        return None if less is None or more is None else more + (more - less) * (n_ctx - 2 * half) // half


def context_of(path: str, arguments: Mapping[str, Any], n_requests: int) -> int | None:
    """`simulated_context` of a model on the CPU, with these arguments of `llama_cpp.Llama`; values that it would refuse
    are left out."""
    model, context = llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()
    model.n_gpu_layers, context.kv_unified = 0, True
    for name in ("n_ctx", "n_batch", "n_ubatch", "type_k", "type_v", "swa_full"):
        value = arguments.get(name)
        if isinstance(value, int) and value >= 0 and (not name.startswith("type_") or value in CACHE_TYPES):
            setattr(context, name, value)
    return simulated_context(path, model, context, n_requests, context.n_ctx)


def _simulated(model: Any, params: Any, n_ctx: int) -> int | None:
    params.n_ctx = n_ctx
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        return None
    try:
        return _native.context_memory(context).host or None
    finally:
        llama_cpp.llama_free(context)


def leave_weights(model_params: Any) -> None:
    """Makes these llama_model_params load a file's header alone."""
    model_params.no_alloc = True
    model_params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE


def _copy(struct: Any) -> Any:
    return type(struct).from_buffer_copy(struct)


def bytes_of_model(path: str | os.PathLike[str]) -> int:
    """The size of a GGUF file with all its parts; 0 if there is none."""
    return sum(part.stat().st_size for part in files_of_model(path))


def available() -> int | None:
    """Bytes of memory that this process can still have, at most: what the machine has free, or less if a container or
    service has a limit. None if the system does not report it."""
    limits = [_free_of_system(), groups.free_memory()]
    return min((n for n in limits if n is not None), default=None)


def _free_of_system() -> int | None:
    if sys.platform.startswith("linux"):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def in_words(n_bytes: int) -> str:
    """A number of bytes in words: "1.1 GB", "0.3 MB", "1.5 kB"."""
    if n_bytes >= 1e9:
        return f"{n_bytes / 1e9:.1f} GB"
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 1e5 else f"{n_bytes / 1e3:.1f} kB"


def choose_parallel(model: str, n_ctx: int) -> int:
    """How many requests of n_ctx tokens to run at a time: as many as fit in a quarter of the memory that is free beside
    the weights, 1..8. Raises ValueError if the model is no usable GGUF file."""
    require_gguf(model)
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    context = llama_cpp.llama_context_default_params()
    context.kv_unified = True
    one, two = (simulated_context(model, params, context, n, n * n_ctx) for n in (1, 2))
    free = available()
    if one is None or two is None or free is None:
        return 1
    if not llama_cpp.llama_supports_gpu_offload():
        free -= bytes_of_model(model)  # a copy of them by our kernels, or pages of the file that are to stay
    return max(1, min(_MOST_AUTOMATIC, int(_SHARE * free) // max(1, two - one)))
