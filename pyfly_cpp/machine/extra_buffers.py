"""Whether llama.cpp's extra buffer types can be used: the weights it repacks for the CPU's own instructions.

The one for Intel's AMX is left out of what models of this process are offered, as our kernels (`kernels.py`) are
faster: 1.4 to 1.9 times with up to 16 tokens, 1.3 times with 512 (benchmarks/results/kernels.md). And in a llama.cpp
compiled by a GCC with bug 114098, such as Debian 12's 12.2, it ends the process: the compiler drops stores to the tile
configuration. If llama.cpp's list cannot be changed, models are loaded with `llama_model_params.use_extra_bufts =
False`, which leaves out all of them.
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from typing import Any, NamedTuple

import llama_cpp

from pyfly_cpp import _native
from pyfly_cpp.errors import NativeError

VARIABLE = "PYFLY_EXTRA_BUFFERS"
"""Environment variable that decides instead: 1 to use all extra buffer types, AMX included, 0 to use none."""


class BufferVerdict(NamedTuple):
    """Whether the extra buffer types can be used, and why."""

    usable: bool
    reason: str
    """A sentence without its full stop."""
    remedy: str | None = None
    """A remedy as a sentence; None if they can be used or are not wanted."""


@functools.lru_cache(maxsize=1)
def usable() -> bool:
    """Whether models may be loaded with `use_extra_bufts`. Warns, once in a process, if they should but cannot.

    Raises:
        ValueError: PYFLY_EXTRA_BUFFERS is neither 0 nor 1.
    """
    found = verdict()
    if found.remedy is not None:
        warnings.warn(
            f"{found.reason}, so models are loaded without repacked weights, which makes batches slower; "
            f"{found.remedy}.",
            RuntimeWarning,
            stacklevel=2,
        )
    return found.usable


@functools.lru_cache(maxsize=1)
def verdict() -> BufferVerdict:
    """The decision of `usable` and its reason. Leaves out AMX from now on. Raises ValueError as `usable` does."""
    wish = os.environ.get(VARIABLE, "")
    if wish not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE} is {wish!r}; set it to 0 or 1, or not at all.")
    if wish:
        return BufferVerdict(wish == "1", f"{VARIABLE} is {wish}")
    if not _library_has_amx():
        return BufferVerdict(True, "llama.cpp was compiled without AMX")
    if "amx_int8" not in cpu_fields().get("flags", "").split():
        return BufferVerdict(True, "this CPU has no AMX")
    try:
        _native.leave_out("AMX")
    except NativeError:
        return BufferVerdict(
            False,
            "llama.cpp's AMX kernels, which crash in some builds (GCC bug 114098), cannot be left out here",
            f"set {VARIABLE}=1 if they are known to work",
        )
    return BufferVerdict(
        True, "all but llama.cpp's AMX, which is slower than our kernels and crashes in some builds (GCC bug 114098)"
    )


def guard_llama_cpp() -> None:
    """Makes plain `llama_cpp.Llama` objects of this process follow the verdict too: for comparisons with them."""
    default_params = llama_cpp.llama_cpp.llama_model_default_params
    if usable() or not default_params().use_extra_bufts:
        return

    @functools.wraps(default_params)
    def without_extra_buffers() -> Any:
        params = default_params()
        params.use_extra_bufts = False
        return params

    for module in (llama_cpp, llama_cpp.llama_cpp):
        module.llama_model_default_params = without_extra_buffers


# ---- The machine -----------------------------------------------------------------------------------------------------


def _library_has_amx() -> bool:
    return b"AMX_INT8 = 1" in llama_cpp.llama_print_system_info()


def cpu_fields() -> dict[str, str]:
    """What Linux reports of the first CPU; elsewhere nothing: llama.cpp uses AMX under Windows too, but is not compiled
    by GCC there."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            first = file.read(1 << 14).partition("\n\n")[0]
    except OSError:
        return {}
    return dict(re.findall(r"^([^\t:]+)\t*: (.*)$", first, re.MULTILINE))


def cpu_model() -> str:
    """The name of the processor, for ARM the numbers of its maker and kind, or an empty text if the system does not
    tell."""
    cpu = cpu_fields()
    numbers = (cpu[name] for name in ("CPU implementer", "CPU part") if name in cpu)
    return cpu.get("model name", "").strip() or " ".join(numbers)
