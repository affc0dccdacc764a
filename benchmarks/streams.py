"""What a cache of its own for every text (llama.cpp's streams, kv_unified=False) would save over the common one, and
what batches of fewer rows save.

    python benchmarks/streams.py --target MODEL [--texts 16] [--fill 300] [--rows 1 4 9]

Every text holds `fill` tokens; timed are batches in which each has the same number of rows, medians of five. In a
common cache every row goes through the cells of all texts. Flash attention of llama.cpp's CPU backend passes over
masked cells one by one in small batches; from 64 rows on it works in tiles of 64 rows, and passes over what none of
them needs, so that a tile of rows of many texts computes all of theirs. FlyBatch uses the common cache: with streams,
texts with different numbers of rows fall into several batches, and a beginning cannot be shared unless all of a cache
is copied.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import llama_cpp
from speed import print_machine

from pyfly_cpp.threads import physical_cores

Row = tuple[int, int, int, bool]
"""Token, position, sequence, whether its logits are wanted."""


UNTILED = 63
"""Rows of the largest batch that flash attention does not work on in tiles."""


def ratio(seconds: Sequence[tuple[float, ...]], i: int, j: int) -> str:
    """Of two columns: median and range."""
    ratios = sorted(row[i] / row[j] for row in seconds)
    return f"x {statistics.median(ratios):.2f}, {ratios[0]:.2f}..{ratios[-1]:.2f}"


class Context:
    """A context for so many texts, each with `fill` tokens in it."""

    def __init__(self, model: llama_cpp.llama_model_p, n_texts: int, fill: int, n_more: int, unified: bool) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_texts * -(-(fill + n_more) // 256) * 256
        params.n_threads = params.n_threads_batch = physical_cores()
        params.n_batch, params.n_ubatch, params.n_seq_max = 2048, 512, n_texts
        params.kv_unified, params.flash_attn_type = unified, llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._ctx = llama_cpp.llama_init_from_model(model, params)
        if not self._ctx:
            raise SystemExit("llama.cpp cannot make the context; take fewer texts.")
        self._batch = llama_cpp.llama_batch_init(max(fill, n_texts * n_more), 0, 1)
        self._n_texts, self._fill = n_texts, fill
        for text in range(n_texts):
            if fill:
                self.decode([(100 + (7 * i + text) % 3000, i, text, False) for i in range(fill)])

    def decode(self, rows: Sequence[Row]) -> float:
        """Evaluates them; returns the seconds."""
        self._batch.n_tokens = len(rows)
        for i, (token, position, text, wanted) in enumerate(rows):
            self._batch.token[i], self._batch.pos[i], self._batch.logits[i] = token, position, wanted
            self._batch.n_seq_id[i], self._batch.seq_id[i][0] = 1, text
        started = time.perf_counter()
        if llama_cpp.llama_decode(self._ctx, self._batch) != 0:
            raise SystemExit("llama.cpp cannot evaluate a batch.")
        llama_cpp.llama_synchronize(self._ctx)
        return time.perf_counter() - started

    def time(self, n_rows: int, n_most: int = 2048) -> float:
        """Seconds of n rows of each text, which are forgotten again; in batches of at most so many rows."""
        n_texts = max(n_most // n_rows, 1)
        seconds = 0.0
        for first in range(0, self._n_texts, n_texts):
            texts = range(first, min(first + n_texts, self._n_texts))
            seconds += self.decode([(500 + j, self._fill + j, text, True) for text in texts for j in range(n_rows)])
        for text in range(self._n_texts):
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._ctx), text, self._fill, -1)
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="GGUF")
    parser.add_argument("--texts", type=int, default=16, help="default 16")
    parser.add_argument("--fill", type=int, default=300, help="tokens that each text holds (default 300)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 9], help="of each text, in a batch")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print_machine()
    model = llama_cpp.llama_model_load_from_file(args.target.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {args.target}.")
    common, own = (Context(model, args.texts, args.fill, max(args.rows), unified) for unified in (True, False))
    for n in args.rows:
        seconds = [(common.time(n), common.time(n, UNTILED), own.time(n)) for _ in range(args.repeats)]
        a, b, c = (1000 * statistics.median(column) for column in zip(*seconds))
        print(
            f"{args.texts} texts of {args.fill} tokens, {n} rows each: common cache {a:.0f} ms, in parts of at most "
            f"{UNTILED} rows {b:.0f} ms ({ratio(seconds, 0, 1)}), own cache {c:.0f} ms ({ratio(seconds, 0, 2)})",
            flush=True,
        )


if __name__ == "__main__":
    main()
