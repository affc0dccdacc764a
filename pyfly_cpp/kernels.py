"""Products of quantised weights that make several tokens in a batch nearly as cheap as one, on x86-64 CPUs.

For most types of weights llama.cpp's CPU backend has no batched products on x86: four tokens take about three times
as long as one. Ours (`csrc/kernels/`) unpack a weight once for all tokens of a batch. They run inside llama.cpp's own
graph, threads and memory: weights are packed for them while a model is loaded. A product is the same bits whatever the
batch.

"auto", the default, packs the types that this machine computes right, and faster than llama.cpp does. Both are tried
once for each machine and release, and kept in the cache folder. `FlyLlama(..., kernels="stock")` and
`PYFLY_KERNELS=stock` leave llama.cpp's own; `install()` gives plain `llama_cpp.Llama` objects ours, too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import llama_cpp

from pyfly_cpp import _native, extra_buffers
from pyfly_cpp.cache import cache_folder
from pyfly_cpp.errors import NativeError
from pyfly_cpp.files import OutputError, write_atomically
from pyfly_cpp.threads import physical_cores

VARIABLE = "PYFLY_KERNELS"
"""Environment variable for models that are loaded without `kernels=`: auto or stock."""

CHOICES = ("auto", "stock")

_ROWS = (1, 4, 16)
"""Tokens in the batch of each trial."""
_N_OUT = 8192
"""Outputs of the matrix that is timed: two to eight megabytes, more than a core's own cache holds."""
_MOST_ERROR = 2e-3
"""Right products have errors of half of it: activations are rounded to a byte."""
_LOOKS = 3
"""Trials of a type that must all say no: one alone may have met a busy moment."""
_SLOWER = 1.03
"""How much slower than llama.cpp's a product may seem for one token: the noise of such a short measurement."""


class Verdict(NamedTuple):
    """Which types are packed on this machine, and why."""

    types: tuple[int, ...]
    """`ggml_type`s, rising."""
    reason: str
    """Instruction set, or why there are none; without a full stop."""


def _install() -> str | None:
    """Why the kernels cannot be offered to llama.cpp; None: they are."""
    try:
        _native.install_kernels()
    except NativeError as error:
        return str(error).rstrip(".")
    return None


_WHY_NOT = _install()  # before the first model is loaded: llama.cpp reads its list of buffer types once


def require_choice(kernels: str | None) -> str:
    """What was asked for, "auto" or "stock"; None: what the environment says, else "auto". Raises ValueError for
    another word."""
    if kernels is not None:
        if kernels not in CHOICES:
            raise ValueError(f"kernels must be 'auto' or 'stock', not {kernels!r}.")
        return kernels
    wish = os.environ.get(VARIABLE) or "auto"
    if wish not in CHOICES:
        raise ValueError(f"{VARIABLE} is {wish!r}; set it to auto or stock, or not at all.")
    return wish


def types_for(kernels: str | None) -> int:
    """The types to pack, bit t for ggml type t. Raises ValueError as `require_choice` does."""
    return 0 if require_choice(kernels) == "stock" else _bits(verdict())


def install() -> Verdict:
    """Gives the kernels to every model that this process loads from now on, plain `llama_cpp.Llama` objects included;
    a `FlyLlama` keeps to its own `kernels=`."""
    found = verdict()
    _native.take_kernels_everywhere(_bits(found))
    return found


@functools.lru_cache(maxsize=1)
def verdict() -> Verdict:
    """What "auto" packs on this machine. The first call ever tries each type, which takes some seconds. Raises
    ValueError as `extra_buffers.verdict` does."""
    if _WHY_NOT is not None:
        return Verdict((), _WHY_NOT)
    others = extra_buffers.verdict()
    if not others.usable:  # models are loaded without any, and a trial of llama.cpp's own could end the process
        return Verdict((), others.reason)
    key = _key()
    types = _read().get(key)
    if types is None:
        with _quiet():
            types = [kind for kind in _native.kernel_types() if any(_is_better(kind) for _ in range(_LOOKS))]
        _keep(key, types)
    return Verdict(tuple(types), f"{len(types)} of {len(_native.kernel_types())} types, {_native.kernels_isa()}")


def describe() -> str:
    """For people: which kernels models get if they are loaded without `kernels=`. Tries nothing that is not wanted.
    Raises ValueError as `require_choice` does."""
    if require_choice(None) == "stock":
        return f"llama.cpp's own; {VARIABLE} is stock"
    found = verdict()
    return found.reason if found.types else f"llama.cpp's own; {found.reason}"


def _bits(found: Verdict) -> int:
    return sum(1 << kind for kind in found.types)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps llama.cpp's lines about the matrices that are tried from the terminal."""
    log = logging.getLogger("llama-cpp-python")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _is_better(kind: int) -> bool:
    """Whether the products of this type are right, not slower for one token, and faster for several."""
    n_threads = physical_cores()
    ratios = []
    for n_rows in _ROWS:
        try:
            if _native.try_kernels(kind, 64, n_rows, 2, 1, is_packed=True).error > _MOST_ERROR:
                return False
            best = {True: math.inf, False: math.inf}
            for is_packed in (True, False) * 3:  # in turns, as both are slowed down by whatever else runs
                trial = _native.try_kernels(kind, _N_OUT, n_rows, n_threads, 2, is_packed=is_packed)
                best[is_packed] = min(best[is_packed], trial.us)
        except NativeError:
            return False
        ratios.append(best[True] / best[False])
    return ratios[0] <= _SLOWER and max(ratios[1:]) < 1.0


# ---- What is kept ----------------------------------------------------------------------------------------------------


def _key() -> str:
    from pyfly_cpp import __version__

    parts = (__version__, llama_cpp.__version__, _native.kernels_isa(), physical_cores(), extra_buffers.cpu_model())
    return hashlib.sha256(repr(parts).encode() + llama_cpp.llama_print_system_info()).hexdigest()


def _read() -> dict[str, list[int]]:
    """Types by machine; empty where there is no readable file."""
    with contextlib.suppress(OSError, RuntimeError, ValueError, RecursionError, TypeError):
        saved: Any = json.loads((cache_folder() / "kernels.json").read_text(encoding="utf-8"))
        if isinstance(saved, dict):
            known = set(_native.kernel_types())
            return {key: types for key, types in saved.items() if isinstance(types, list) and known.issuperset(types)}
    return {}


def _keep(key: str, types: list[int]) -> None:
    """Where it cannot be kept, the next process tries again."""
    with contextlib.suppress(OSError, RuntimeError, OutputError):
        path = cache_folder() / "kernels.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({**_read(), key: types}, indent=2))
