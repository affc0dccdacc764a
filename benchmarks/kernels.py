"""What a batch costs by its number of tokens: llama.cpp's products of weights against ours.

    python benchmarks/kernels.py --model MODEL [--rows 1,2,3,4,6,8,12,16,32] [--repeats 7] [--threads N]

The same model is loaded twice, with kernels="stock" and "auto". Both evaluate batches of the same tokens behind the
same beginning, in turns, so that whatever else the machine does slows both alike. Times are medians; the ratio is the
median of the ratios of neighbours in time, with its range. The last lines compare the logits of tokens that were
evaluated alone with those of the same tokens in batches.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import llama_cpp
import numpy as np
from speed import print_machine

from pyfly_cpp import FlyLlama, kernels
from pyfly_cpp.threads import physical_cores

TEXT = b"def fibonacci(n):\n    a, b = 0, 1\n    for i in range(n):\n        a, b = b, a + b\n    return a\n\n\n"
N_BEFORE = 16
"""Tokens that every batch stands behind."""


class Side:
    """One of the two models."""

    def __init__(self, path: str, choice: str, n_threads: int, n_most: int) -> None:
        begin = time.perf_counter()
        self.llm = FlyLlama(
            path, kernels=choice, n_ctx=N_BEFORE + n_most, n_batch=max(n_most, 32), n_threads=n_threads,
            n_threads_batch=n_threads, flash_attn=True, verbose=False,
        )  # fmt: skip
        print(f"loaded with {choice} in {time.perf_counter() - begin:.1f} s")
        self.batch = llama_cpp.llama_batch_init(max(n_most, N_BEFORE), 0, 1)

    def evaluate(self, tokens: list[int], position: int) -> float:
        """Evaluates tokens at a position and forgets what stands behind it before; seconds."""
        context = self.llm.ctx
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), 0, position, -1)
        self.batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            self.batch.token[i], self.batch.pos[i], self.batch.logits[i] = token, position + i, 1
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, 0
        begin = time.perf_counter()
        if llama_cpp.llama_decode(context, self.batch) != 0:
            raise SystemExit("llama.cpp could not evaluate a batch; lower --rows.")
        llama_cpp.llama_synchronize(context)
        return time.perf_counter() - begin

    def logits(self, n: int) -> np.ndarray:
        """Of the last batch of n tokens, [n][vocabulary]."""
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.llm.ctx), shape=(n, self.llm.n_vocab())).copy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", default="1,2,3,4,6,8,12,16,32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=physical_cores())
    given = parser.parse_args()
    rows = [int(n) for n in given.rows.split(",")]
    print_machine()
    print(f"kernels: {kernels.verdict().reason}; {given.threads} threads, {given.repeats} repeats")
    sides = [Side(given.model, choice, given.threads, max(rows)) for choice in ("stock", "auto")]
    tokens = sides[0].llm.tokenize(TEXT * (1 + (N_BEFORE + max(rows)) // 16))[: N_BEFORE + max(rows)]
    before, behind = tokens[:N_BEFORE], tokens[N_BEFORE:]
    for side in sides:
        side.evaluate(before, 0)
        side.evaluate(behind, N_BEFORE)
    times: dict[int, list[tuple[float, ...]]] = {n: [] for n in rows}
    for _ in range(given.repeats):
        for n in rows:
            times[n].append(tuple(side.evaluate(behind[:n], N_BEFORE) for side in sides))

    single = [median(pair[i] for pair in times[rows[0]]) for i in (0, 1)]
    print(f"\n| tokens | stock, ms | ours, ms | stock / ours | stock, of {rows[0]} | ours, of {rows[0]} |")
    print("| ---: | ---: | ---: | --- | ---: | ---: |")
    for n in rows:
        stock, ours = (median(pair[i] for pair in times[n]) for i in (0, 1))
        ratios = [pair[0] / pair[1] for pair in times[n]]
        ratio = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        times_of_one = f"{stock / single[0]:.2f} | {ours / single[1]:.2f}"
        print(f"| {n} | {1e3 * stock:.1f} | {1e3 * ours:.1f} | {ratio} | {times_of_one} |")
    print()
    n_most = min(16, max(rows))
    for side, name in zip(sides, ("stock", "ours")):
        alone = []
        for i in range(n_most):
            side.evaluate(behind[i : i + 1], N_BEFORE + i)
            alone.append(side.logits(1)[0])
        worst = 0.0
        for n in range(2, n_most + 1):
            side.evaluate(behind[:n], N_BEFORE)
            worst = max(worst, float(np.abs(side.logits(n) - np.array(alone[:n])).max()))
        print(f"{name}: logits of tokens alone and in batches of 2 to {n_most} differ by at most {worst:.2g}")


if __name__ == "__main__":
    main()
