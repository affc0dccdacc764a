"""Products of packed weights, and attention: offering them to llama.cpp, and trying them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pyfly_cpp._native.boundary import check
from pyfly_cpp._native.library import ffi, lib


class KernelTrial(NamedTuple):
    """The result of one operation."""

    error: float
    """Largest difference from the right result, as a share of the sum of magnitudes."""
    us: float
    """The shortest of the times, microseconds."""


def kernels_isa() -> str:
    """Instruction set of the products on this machine: "amx", "avx512vnni", "avxvnni" or "avx2"; on ARM "i8mm" or
    "dotprod"; or "none"."""
    return str(ffi.string(lib.pyfly_kernels_isa()).decode())


def kernel_types() -> list[int]:
    """The `ggml_type`s that there are products for, rising; empty if there is no instruction set for them."""
    bits = lib.pyfly_kernels_types()
    return [n for n in range(64) if bits >> n & 1]


def install_kernels() -> None:
    """Makes room for them in llama.cpp's CPU backend. Raises NativeError with why that is impossible."""
    check(lib.pyfly_kernels_install)


def enable_kernels() -> None:
    """Lets llama.cpp's CPU backend call them. Raises NativeError with why that is impossible. A llama.cpp whose layout
    is not known may end the process."""
    check(lib.pyfly_kernels_enable)


def ggml_build() -> str:
    """Version and commit of the ggml that is loaded."""
    return str(ffi.string(lib.pyfly_ggml_build()).decode("utf-8", errors="replace"))


def leave_out(buffer_type: str) -> None:
    """Models that are loaded from now on are not offered llama.cpp's extra buffer type of this name ("AMX"). Raises
    NativeError if the kernels are not installed."""
    check(lib.pyfly_kernels_leave_out, buffer_type.encode())


KERNELS_ATTENTION = int(lib.PYFLY_KERNELS_ATTENTION)
"""Beside the bits of types: attention to caches in F16 is ours, too, if its queries are products of packed weights."""
KERNELS_LOCKED = int(lib.PYFLY_KERNELS_LOCKED)
"""Beside the bits of types: packed weights are kept from being swapped out."""


@contextlib.contextmanager
def kernels_taken(
    what: int, n_threads: int = 0, when_unlocked: Callable[[int], object] = lambda _: None
) -> Iterator[None]:
    """Models that are loaded inside, on this thread, get what these bits stand for: bit t packs weights of ggml type t;
    and the two above. At most n_threads threads pack weights; 0: as many as there are processors. If the system refuses
    to lock weights, `when_unlocked` is called at the end with their bytes."""
    taking = lib.pyfly_kernels_take(what, n_threads)
    try:
        yield
    finally:
        n_unlocked = lib.pyfly_kernels_restore(taking)
    if n_unlocked > 0:
        when_unlocked(n_unlocked)


def take_kernels_everywhere(what: int) -> None:
    """The same for all other models of this process, from now on."""
    lib.pyfly_kernels_take_everywhere(what)


def try_kernels(kind: int, n_out: int, n_rows: int, n_threads: int, n_repeats: int, *, is_ours: bool) -> KernelTrial:
    """Multiplies a matrix of ggml type `kind`, 512 x n_out (a multiple of 64), with n_rows rows, by these products or
    as llama.cpp does without them. Raises ValueError for a number out of range, NativeError if ggml refuses."""
    out = ffi.new("pyfly_kernels_trial *")
    check(lib.pyfly_kernels_try, kind, n_out, n_rows, n_threads, n_repeats, int(is_ours), out)
    return KernelTrial(out.error, out.us)


def try_attention(n_cells: int, n_rows: int, n_threads: int, n_repeats: int, *, is_ours: bool) -> KernelTrial:
    """Attention of the last n_rows of n_cells tokens to those before them (eight heads of 128, in two groups), by ours
    or by llama.cpp's. Raises ValueError for a number out of range, NativeError if ggml refuses."""
    out = ffi.new("pyfly_kernels_trial *")
    check(lib.pyfly_kernels_try_attention, n_cells, n_rows, n_threads, n_repeats, int(is_ours), out)
    return KernelTrial(out.error, out.us)


def batches_with_other_bits(kind: int, n_out: int, n_threads: int, *, is_ours: bool) -> tuple[int, ...]:
    """The numbers of rows, of 1 to 32, for which such a product has another bit than that of each row alone. Raises as
    `try_kernels`."""
    out = ffi.new("uint32_t *")
    check(lib.pyfly_kernels_compare, kind, n_out, n_threads, int(is_ours), out)
    return tuple(n for n in range(1, 33) if out[0] >> (n - 1) & 1)
