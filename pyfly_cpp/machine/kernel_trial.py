"""The trial of our kernels on this machine, a program of its own: a llama.cpp that is laid out differently ends this
process and not the one that asks (`kernel_findings.py`).

`python -m pyfly_cpp.machine.kernel_trial` prints one JSON object a line: `{"right": [...]}`, the operations whose
results are right, then `{"slower": [...]}`, those of them that llama.cpp computes faster; or `{"why_not": ...}`, why
there is nothing to try. With operations as arguments it takes these for right.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence

import llama_cpp

from pyfly_cpp import _native
from pyfly_cpp.errors import NativeError
from pyfly_cpp.machine import extra_buffers, log
from pyfly_cpp.machine.kernel_findings import ATTENTION

_MOST_RATIOS = {1: 1.03, 4: 1.0, 16: 1.0}
"""Tokens in the batch of each trial, and how much of llama.cpp's time ours may seem to take: one token as long, within
the noise of such a short measurement."""
_OF_ATTENTION = {**_MOST_RATIOS, 64: 1.1}
"""Likewise of attention: a prompt, which llama.cpp computes in another way from 64 tokens on. There both do little but
multiply, and a tie must not cost the few tokens, which take a half to a quarter."""
_ALSO_RIGHT = 40
"""Tokens of a further batch whose results must be right: from some number on there are other products (AMX)."""
_N_OUT = 8192
"""Outputs of the matrix that is timed: two to eight megabytes, more than a core's own cache holds."""
_N_CELLS = 4096
"""Cells of the attention that is timed: more than a core's own cache holds. llama.cpp computes one row in another way
from 512 on."""
_MOST_ERROR = 2e-3
"""Right products have errors of half of it: activations are rounded to a byte."""
_LOOKS = 3
"""Trials of an operation that must all fail: one alone may have met a busy moment."""


def _compute(operation: int, n_rows: int, *, is_large: bool, is_ours: bool) -> _native.KernelTrial:
    """Computes something for n_rows rows, large for its time or small for its error, by our kernels or without. Times
    are of one thread: several wait for each other, and on a busy machine one of them always waits for a core."""
    n_threads, n_repeats = (1, 2) if is_large else (2, 1)
    if operation == ATTENTION:
        return _native.try_attention(_N_CELLS if is_large else 100, n_rows, n_threads, n_repeats, is_ours=is_ours)
    return _native.try_kernels(operation, _N_OUT if is_large else 64, n_rows, n_threads, n_repeats, is_ours=is_ours)


def _ratios_of(operation: int) -> Mapping[int, float]:
    return _OF_ATTENTION if operation == ATTENTION else _MOST_RATIOS


def is_right(operation: int) -> bool:
    """Whether our kernels compute an operation right."""
    try:
        errors = (
            _compute(operation, n, is_large=False, is_ours=True).error for n in (*_ratios_of(operation), _ALSO_RIGHT)
        )
        return all(error <= _MOST_ERROR for error in errors)
    except NativeError:
        return False


def is_slower(operation: int) -> bool:
    """Whether ours takes longer than llama.cpp's for one token, or no less time for several."""
    return not any(_looks_faster(operation) for _ in range(_LOOKS))


def _looks_faster(operation: int) -> bool:
    for n_rows, most in _ratios_of(operation).items():
        try:
            best = {True: math.inf, False: math.inf}
            for is_ours in (True, False) * 3:  # in turns, as both are slowed down by whatever else runs
                best[is_ours] = min(best[is_ours], _compute(operation, n_rows, is_large=True, is_ours=is_ours).us)
        except NativeError:
            return False
        if best[True] > most * best[False]:
            return False
    return True


def run(operations: Sequence[int]) -> None:
    """Runs the program."""
    try:
        extra_buffers.verdict()  # leaves out what crashes of llama.cpp's own
        _native.enable_kernels()
    except NativeError as error:
        _tell("why_not", str(error).rstrip("."))
        return
    with log.at_level(log.LLAMA_CPP, logging.ERROR):  # without its lines on the matrices that are tried
        right = [one for one in operations or (*_native.kernel_types(), ATTENTION) if operations or is_right(one)]
        _tell("right", right)
        # Of F32 only small matrices are packed, the routers of experts: they need no speed.
        _tell("slower", [one for one in right if one != llama_cpp.GGML_TYPE_F32 and is_slower(one)])


def _tell(what: str, value: object) -> None:
    print(json.dumps({what: value}), flush=True)


if __name__ == "__main__":
    run([int(word) for word in sys.argv[1:]])
