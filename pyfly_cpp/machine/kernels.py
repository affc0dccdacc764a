"""Products of quantised weights that make several tokens in a batch nearly as cheap as one, on CPUs: x86-64 and, never
timed, 64-bit ARM.

For most types of weights llama.cpp's CPU backend has no batched products on x86: four tokens take about three times
as long as one. Ours (`csrc/kernels/`) unpack a weight once for all tokens of a batch. They run inside llama.cpp's own
graph, threads and memory: weights are packed for them while a model is loaded. Attention is also ours if flash
attention is on, the cache is in F16, BF16, Q8_0 or Q4_0, and the queries are such products. A result is the same bits
whatever the batch.

"auto", the default, packs the types that this machine computes right, unless llama.cpp is faster
(`kernel_findings.py`). `FlyLlama(..., kernels="stock")` and `PYFLY_KERNELS=stock` leave llama.cpp's own; `install()`
also gives plain `llama_cpp.Llama` objects ours.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import llama_cpp

from pyfly_cpp import _native
from pyfly_cpp.errors import NativeError
from pyfly_cpp.machine import extra_buffers, kernel_findings, memory
from pyfly_cpp.machine.releases import CACHE_TYPES, WITHOUT_FLASH_ATTENTION

VARIABLE = "PYFLY_KERNELS"
"""Environment variable for models that are loaded without `kernels=`: auto or stock."""

CHOICES = ("auto", "stock")

_ATTENDED = ("F16", "BF16", "Q8_0", "Q4_0")
"""Types of caches that our attention reads (`csrc/llama/cell_order.h`)."""

_TIGHT = 4
"""With so many times the weights free, no context is looked at: that takes tenths of a second, and few have three times
as much."""

_FEW = 4
"""Most types that `describe` names one by one."""


class KernelVerdict(NamedTuple):
    """Which types are packed on this machine, and why."""

    types: tuple[int, ...]
    """`ggml_type`s in ascending order."""
    attention: bool
    """Whether attention is also ours."""
    reason: str
    """The instruction set, or the reason why no type is packed; without a full stop."""

    @property
    def bits(self) -> int:
        """The same as a number, for loading a model: bit t for ggml type t, and one for attention
        (`_native.kernels_taken`)."""
        return sum(1 << kind for kind in self.types) | (_native.KERNELS_ATTENTION if self.attention else 0)

    def attends(self, info: _native.ModelInfo) -> bool:
        """Whether all attention of such a model is ours if it is on the CPU and flash attention is on: its queries are
        products of packed weights. llama.cpp's rounds by the number of threads."""
        is_packed = info.query_types & ~sum(1 << kind for kind in self.types) == 0
        return self.attention and is_packed and info.architecture not in WITHOUT_FLASH_ATTENTION


def _install() -> str | None:
    """Offers the kernels to llama.cpp. Returns the reason if that is impossible, else None."""
    try:
        _native.install_kernels()
    except NativeError as error:
        return str(error).rstrip(".")
    return None


_WHY_NOT = _install()  # before the first model is loaded: llama.cpp reads its list of buffer types once


def require_choice(kernels: str | None) -> str:
    """The choice, "auto" or "stock"; None: the environment's choice, else "auto". Raises ValueError for
    another word."""
    if kernels is not None:
        if kernels not in CHOICES:
            raise ValueError(f"kernels must be 'auto' or 'stock', not {kernels!r}.")
        return kernels
    wish = os.environ.get(VARIABLE) or "auto"
    if wish not in CHOICES:
        raise ValueError(f"{VARIABLE} is {wish!r}; set it to auto or stock, or not at all.")
    return wish


def take(kernels: str | None, model_path: str, arguments: Mapping[str, Any], n_requests: int = 1) -> KernelVerdict:
    """The types to pack of a model that is loaded with this choice and these arguments of `llama_cpp.Llama`; none for
    "stock". Nothing is packed if there is too little memory for the context (of n_requests) and packed weights, which
    need as much as the file has bytes: llama.cpp can leave them in the file. Warns of it unless layers are on a GPU,
    for which our kernels do nothing. Raises ValueError as `require_choice` does."""
    if require_choice(kernels) == "stock":
        return KernelVerdict((), False, "stock")
    found = verdict()
    n_free = memory.available()
    if not found.types or n_free is None:
        return found
    n_weights, n_context = memory.bytes_of_model(model_path), 0
    if n_weights <= n_free < _TIGHT * n_weights and _is_on_cpu(arguments):
        n_context = memory.context_of(model_path, arguments, n_requests) or 0
    if n_weights + n_context <= n_free:
        return found
    if _is_on_cpu(arguments):
        context = f", its context needs {memory.in_words(n_context)}" if n_context else ""
        warnings.warn(
            f"{model_path!r} has {memory.in_words(n_weights)}{context}, and {memory.in_words(n_free)} of memory are "
            "free, so it is loaded without our kernels, which need a copy of it; take a smaller "
            f"{'context' if context else 'file'} for cheaper batches.",
            RuntimeWarning,
            stacklevel=2,
        )
    return KernelVerdict((), False, "too little memory")


def is_for_attention(arguments: Mapping[str, Any]) -> bool:
    """Whether our attention can serve a model with these arguments of `llama_cpp.Llama`: on the CPU, with a cache whose
    types it reads."""
    types = [arguments.get(name) for name in ("type_k", "type_v")]
    are_read = all(kind is None or CACHE_TYPES.get(kind) in _ATTENDED for kind in types)
    return _is_on_cpu(arguments) and are_read


def _is_on_cpu(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("n_gpu_layers", 0) == 0 or not llama_cpp.llama_supports_gpu_offload()


def install() -> KernelVerdict:
    """Gives the kernels to every model that this process loads from now on, plain `llama_cpp.Llama` objects included;
    a `FlyLlama` keeps to its own `kernels=`."""
    found = verdict()
    _native.take_kernels_everywhere(found.bits)
    return found


_FINDING = threading.Lock()


def verdict() -> KernelVerdict:
    """The types that "auto" packs on this machine. The first call ever tries each type, which takes some seconds.
    Raises ValueError as `extra_buffers.verdict` does."""
    with _FINDING:
        return _verdict()


def is_untried() -> bool:
    """Whether `verdict` would try the kernels now. Raises ValueError as it does."""
    can_try = _WHY_NOT is None and _verdict.cache_info().currsize == 0 and extra_buffers.verdict().usable
    return can_try and kernel_findings.is_untried()


@functools.lru_cache(maxsize=1)
def _verdict() -> KernelVerdict:
    if _WHY_NOT is not None:
        return KernelVerdict((), False, _WHY_NOT)
    others = extra_buffers.verdict()
    if not others.usable:  # models are loaded without any, and a trial of llama.cpp's own could end the process
        return KernelVerdict((), False, others.reason)
    found = kernel_findings.find()
    if found.why_not:
        return KernelVerdict((), False, found.why_not)
    types = tuple(sorted(found.used - {kernel_findings.ATTENTION}))
    is_attention = kernel_findings.ATTENTION in found.used
    reason = f"ours for {_counted(types)}{' and' if is_attention else ', not for'} attention ({_native.kernels_isa()})"
    return KernelVerdict(types, is_attention, reason)


def _counted(types: Sequence[int]) -> str:
    """The number of these weight types, in words, with the names of the others if they are few."""
    known = _native.kernel_types()
    numbers = {name: getattr(llama_cpp, name) for name in dir(llama_cpp) if name.startswith("GGML_TYPE_")}
    # llama_cpp has no name for BF16.
    names = {**CACHE_TYPES, **{number: name.removeprefix("GGML_TYPE_") for name, number in numbers.items()}}
    others = [names.get(kind, str(kind)) for kind in known if kind not in types]
    named = f" (not {', '.join(others)})" if 0 < len(others) <= _FEW else ""
    return f"{len(types)} of {len(known)} weight types{named}"


def describe() -> str:
    """The kernels of models that are loaded without `kernels=`, in words. Tries nothing that is not wanted.
    Raises ValueError as `require_choice` does."""
    if require_choice(None) == "stock":
        return f"llama.cpp's own; {VARIABLE} is stock"
    found = verdict()
    return found.reason if found.types else f"llama.cpp's own; {found.reason}"
