"""A model that evaluates batches when it is asked: `python evaluator.py CHOICE`, lines of JSON in and out
(`kernels.py`).

CHOICE is that of kernels: stock or auto. The first line has the arguments of `FlyLlama`; its answer has the seconds to
load, sizes, and why batches may have other bits. Each other line is a method of `Evaluator` with its arguments.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import llama_cpp
import numpy as np

from pyfly_cpp import FlyLlama
from pyfly_cpp.errors import NativeError
from pyfly_cpp.measure.proving import compare_with_alone

MOST_BATCH = 512
"""Tokens of a batch; longer beginnings are read in several."""
_UNKNOWN_STATE = "The cache of this model cannot be filled; leave out --fill."


def repeated(state: bytes, n_cells: int, n: int) -> bytes:
    """The state of a sequence (llama_kv_cache::state_write of llama.cpp, V not transposed) with n cells, at positions 0
    to n - 1, that hold what its first n_cells cells hold, again and again."""
    at, out = 16, [state[:12], struct.pack("<I", n)]  # magic, sequence, streams; cells
    if state[4:16] != struct.pack("<iII", 0, 1, n_cells):
        raise SystemExit(_UNKNOWN_STATE)
    out += [struct.pack("<iIi", position, 1, 0) for position in range(n)]  # its sequences: one, 0
    at += 12 * n_cells
    is_transposed, n_layers = struct.unpack_from("<II", state, at)
    out.append(state[at : at + 8])
    at += 8
    for _ in range(0 if is_transposed else 2 * n_layers):  # keys, then values
        (n_bytes,) = struct.unpack_from("<Q", state, at + 4)  # of a cell, behind the type
        out.append(state[at : at + 12])
        cells = state[at + 12 : at + 12 + n_bytes * n_cells]
        out += [cells] * (n // n_cells) + [cells[: n_bytes * (n % n_cells)]]
        at += 12 + n_bytes * n_cells
    if at != len(state):
        raise SystemExit(_UNKNOWN_STATE)
    return b"".join(out)


class Evaluator:
    """Evaluates batches of the same random tokens in every process."""

    def __init__(self, choice: str, options: dict[str, Any]) -> None:
        begin = time.perf_counter()
        self._llm = FlyLlama(kernels=choice, n_batch=MOST_BATCH, flash_attn=True, verbose=False, **options)
        model = self._llm.model
        self.about = {
            "seconds_to_load": time.perf_counter() - begin,
            "n_bytes": llama_cpp.llama_model_size(model),
            "n_weights": llama_cpp.llama_model_n_params(model),
        }
        with contextlib.suppress(NativeError):  # a release that does not show it
            self.about["inexact"] = self._llm.inexact
        self._batch = llama_cpp.llama_batch_init(MOST_BATCH, 0, 1)
        self._tokens = np.random.default_rng(1).integers(0, self._llm.n_vocab(), options["n_ctx"]).tolist()
        self._n_read = 0

    def read(self, n: int, fill: bool = False) -> None:
        """Goes on until the sequence is the first n tokens. `fill`: what a first batch has left in the cache stands
        there again and again instead, which takes no time. A batch behind it takes as long as behind tokens that were
        read: no step of attention depends on what a cell holds."""
        n_read = min(n, MOST_BATCH) if fill else n
        for i in range(self._n_read, n_read, MOST_BATCH):
            self._evaluate(self._tokens[i : min(i + MOST_BATCH, n_read)], i)
        self._n_read = n_read
        if n > n_read:
            self._take(repeated(self._state(), n_read, n), n)

    def save(self, path: str) -> None:
        """Writes what it has read, as it stands in its cache."""
        Path(path).write_bytes(self._state())

    def restore(self, path: str, n: int) -> None:
        """Takes what another one has read: n tokens."""
        self._take(Path(path).read_bytes(), n)

    def _state(self) -> bytes:
        self._forget(self._n_read)
        state = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(self._llm.ctx, 0))()
        llama_cpp.llama_state_seq_get_data(self._llm.ctx, state, len(state), 0)
        return bytes(state)

    def _take(self, data: bytes, n: int) -> None:
        state = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        if llama_cpp.llama_state_seq_set_data(self._llm.ctx, state, len(state), 0) == 0:
            raise SystemExit("llama.cpp could not restore a cache; lower --behind.")
        self._n_read = n

    def seconds(self, n: int) -> float:
        """The time that a batch of n tokens behind what it has read takes, in seconds."""
        return self._evaluate(self._tokens[self._n_read : self._n_read + n], self._n_read)

    def difference(self, n: int) -> float:
        """The most by which logits of n tokens differ, evaluated alone and in batches of 2 to n."""

        def evaluate(sizes: Sequence[int]) -> np.ndarray:
            rows = []
            for begin, size in zip(itertools.accumulate(sizes, initial=self._n_read), sizes):
                self._evaluate(self._tokens[begin : begin + size], begin)
                rows.append(self._logits(size))
            return np.concatenate(rows)

        return compare_with_alone(evaluate, n).largest

    def changes(self, n: int, repeats: int) -> list[float]:
        """Median seconds of a batch of n tokens behind one of its size, of one behind a batch of one token, and of
        that."""

        def medians(sizes: Sequence[int]) -> list[float]:
            times = [[self.seconds(size) for size in sizes] for _ in range(repeats + 2)]
            return [median(column) for column in zip(*times[2:])]  # the first two warm up

        return [*medians([n]), *medians([n, 1])]

    def _forget(self, position: int) -> None:
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._llm.ctx), 0, position, -1)

    def _evaluate(self, tokens: list[int], position: int) -> float:
        """Evaluates tokens at a position and forgets what stands behind it before; seconds."""
        self._forget(position)
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position + i
            batch.logits[i] = len(tokens) <= 32 or i + 1 == len(tokens)  # a prompt asks for one row
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        begin = time.perf_counter()
        if llama_cpp.llama_decode(self._llm.ctx, batch) != 0:
            raise SystemExit("llama.cpp could not evaluate a batch; lower --rows.")
        llama_cpp.llama_synchronize(self._llm.ctx)
        return time.perf_counter() - begin

    def _logits(self, n: int) -> np.ndarray:
        """Logits of the last batch of n tokens, [n][vocabulary]."""
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._llm.ctx), shape=(n, self._llm.n_vocab())).copy()


def main(choice: str) -> None:
    one = Evaluator(choice, json.loads(sys.stdin.readline()))
    print(json.dumps(one.about), flush=True)
    for line in sys.stdin:
        (method, arguments), *_ = json.loads(line).items()
        print(json.dumps(getattr(one, method)(**arguments)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
