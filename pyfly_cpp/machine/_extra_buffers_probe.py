"""Multiplies with weights in one of llama.cpp's extra buffer types: `_extra_buffers_probe.py LIBRARY BUFFER_TYPE`.

LIBRARY is the file that holds ggml's CPU backend, BUFFER_TYPE the name of the type, such as AMX. Prints one word:

- right: every quantised type that llama.cpp would place there gives the product that it gives in the plain buffer
- wrong: one of them does not
- absent: the backend offers no such buffer type here, or places nothing there

A backend whose kernels crash ends this process before it has printed anything. It runs by itself, in an interpreter
without packages, because it must start fast and because it may crash.
"""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

_TYPES = (2, 3, 8, 12, 13, 14, 23)
"""ggml_type of Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K and IQ4_XS: those that have AMX kernels."""
_F32 = 0
_N_IN, _N_OUT = 512, 64
"""Two blocks of 256 weights to a row, two pairs of tiles to a column."""
_BATCHES = (1, 34)
"""Single tokens have a kernel of their own; 34 fill a pair of tiles and begin the next."""
_MAX_ERROR = 0.005
"""Largest error of a right product, relative, root mean square. Right kernels differ by 1e-4 and less, in rounding."""

_SIGNATURES = {
    "ggml_backend_cpu_init": "p",
    "ggml_backend_cpu_reg": "p",
    "ggml_backend_cpu_set_n_threads": "-pi",
    "ggml_backend_reg_dev_get": "ppz",
    "ggml_backend_reg_get_proc_address": "pps",
    "ggml_backend_dev_buffer_type": "pp",
    "ggml_backend_dev_supports_op": "bpp",
    "ggml_backend_buft_name": "sp",
    "ggml_backend_alloc_ctx_tensors_from_buft": "ppp",
    "ggml_backend_tensor_set": "-ppzz",
    "ggml_backend_tensor_get": "-ppzz",
    "ggml_backend_graph_compute": "ipp",
    "ggml_backend_buffer_free": "-p",
    "ggml_free": "-p",
    "ggml_graph_overhead": "z",
    "ggml_tensor_overhead": "z",
    "ggml_new_tensor_2d": "ppill",
    "ggml_mul_mat": "pppp",
    "ggml_new_graph": "pp",
    "ggml_build_forward_expand": "-pp",
    "ggml_nbytes": "zp",
    "ggml_quantize_chunk": "zipplllp",
}
"""Result and arguments of ggml's functions: p pointer, s text, i int, l int64_t, z size_t, b bool, - nothing."""

_C_TYPES = {
    "p": ctypes.c_void_p,
    "s": ctypes.c_char_p,
    "i": ctypes.c_int,
    "l": ctypes.c_int64,
    "z": ctypes.c_size_t,
    "b": ctypes.c_bool,
    "-": None,
}


class _InitParams(ctypes.Structure):
    """ggml_init_params of ggml.h."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def load(path: str) -> Any:
    """ggml, with the signatures of what is used of it. Raises OSError, AttributeError."""
    ggml = ctypes.CDLL(path)
    for name, signature in _SIGNATURES.items():
        function = getattr(ggml, name)
        function.restype, *function.argtypes = [_C_TYPES[letter] for letter in signature]
    ggml.ggml_init.restype = ctypes.c_void_p
    ggml.ggml_init.argtypes = [_InitParams]
    return ggml


def find_buffer_type(ggml: Any, name: str) -> int | None:
    """The CPU's extra buffer type of this name."""
    registry = ggml.ggml_backend_cpu_reg()
    address = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return None
    prototype = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
    buffer_types = prototype(address)(ggml.ggml_backend_reg_dev_get(registry, 0))
    of_that_name = (b for b in takewhile(bool, buffer_types) if ggml.ggml_backend_buft_name(b).decode() == name)
    return next(of_that_name, None)


class Multiplier:
    """Products of weights [_N_OUT, _N_IN] of one type and a batch of rows [_N_IN]."""

    def __init__(self, ggml: Any) -> None:
        self._ggml = ggml
        self._device = ggml.ggml_backend_reg_dev_get(ggml.ggml_backend_cpu_reg(), 0)
        self._backend = ggml.ggml_backend_cpu_init()
        ggml.ggml_backend_cpu_set_n_threads(self._backend, 1)
        self.plain = ggml.ggml_backend_dev_buffer_type(self._device)

    def product(self, buffer_type: int, kind: int, weights: array[float], rows: array[float]) -> array[float] | None:
        """rows @ weights.T, float32 [n_rows * _N_OUT], with the weights quantised to the ggml_type `kind` in a buffer
        of `buffer_type`; None where llama.cpp would not place such weights there."""
        ggml = self._ggml
        n_rows = len(rows) // _N_IN
        holder, maths = self._context(), self._context()
        w = ggml.ggml_new_tensor_2d(holder, kind, _N_IN, _N_OUT)
        x = ggml.ggml_new_tensor_2d(maths, _F32, _N_IN, n_rows)
        y = ggml.ggml_mul_mat(maths, w, x)
        w_buffer = ggml.ggml_backend_alloc_ctx_tensors_from_buft(holder, buffer_type)
        out = None
        if w_buffer and ggml.ggml_backend_dev_supports_op(self._device, y):
            xy_buffer = ggml.ggml_backend_alloc_ctx_tensors_from_buft(maths, self.plain)
            quantised = ctypes.create_string_buffer(ggml.ggml_nbytes(w))
            ggml.ggml_quantize_chunk(kind, _pointer(weights), quantised, 0, _N_OUT, _N_IN, None)
            ggml.ggml_backend_tensor_set(w, quantised, 0, len(quantised))
            ggml.ggml_backend_tensor_set(x, _pointer(rows), 0, 4 * len(rows))
            graph = ggml.ggml_new_graph(maths)
            ggml.ggml_build_forward_expand(graph, y)
            if ggml.ggml_backend_graph_compute(self._backend, graph) != 0:
                raise RuntimeError("ggml could not compute a product")
            out = array("f", bytes(4 * n_rows * _N_OUT))
            ggml.ggml_backend_tensor_get(y, _pointer(out), 0, 4 * len(out))
            ggml.ggml_backend_buffer_free(xy_buffer)
        ggml.ggml_backend_buffer_free(w_buffer)
        ggml.ggml_free(maths)
        ggml.ggml_free(holder)
        return out

    def _context(self) -> int:
        size = 8 * self._ggml.ggml_tensor_overhead() + self._ggml.ggml_graph_overhead()
        context: int = self._ggml.ggml_init(_InitParams(size, None, True))
        return context


def _pointer(values: array[float]) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.buffer_info()[0])


def same(product: Sequence[float], expected: Sequence[float]) -> bool:
    """Whether two products are equal but for rounding. False where one has a NaN."""
    error = sum((a - b) ** 2 for a, b in zip(product, expected))
    return bool(error <= _MAX_ERROR**2 * sum(b * b for b in expected))


def probe(ggml: Any, buffer_type: int) -> str:
    """right, wrong or absent, as above."""
    multiplier = Multiplier(ggml)
    uniform = random.Random(114098).uniform
    weights, *batches = (array("f", [uniform(-1.0, 1.0) for _ in range(n * _N_IN)]) for n in (_N_OUT, *_BATCHES))
    outcome = "absent"
    for kind in _TYPES:
        for rows in batches:
            product = multiplier.product(buffer_type, kind, weights, rows)
            if product is None:
                break
            expected = multiplier.product(multiplier.plain, kind, weights, rows)
            assert expected is not None
            if not same(product, expected):
                return "wrong"
            outcome = "right"
    return outcome


def main(path: str, name: str) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: a crash is an answer, no core file is wanted
    ggml = load(path)
    buffer_type = find_buffer_type(ggml, name)
    print("absent" if buffer_type is None else probe(ggml, buffer_type))


if __name__ == "__main__":
    main(*sys.argv[1:])
