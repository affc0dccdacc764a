"""What a batch costs by its number of tokens: llama.cpp's kernels against ours.

    python benchmarks/kernels.py --model MODEL [--as Q4_K_M,Q6_K,...] [--rows 1,2,3,4,6,8,12,16,32] [--behind 16,8000]
        [--cache q8_0] [--repeats 7] [--threads N] [--gpu-layers N] [--changes] [--record FILE.json.gz]
    python benchmarks/kernels.py --attention 1024 [--repeats 7] [--threads N]

The same model is loaded twice, with kernels="stock" and "auto", both with flash attention. Both evaluate batches of the
same random tokens behind the same beginning, in turns, so that whatever else the machine does slows both alike. Times
are medians; the ratio is the median of the ratios of neighbours in time, with its range. --behind has a table for each
length of the beginning, in ascending order: our kernels read it, and the other side gets what they have left in the
cache. --cache is the type of K and V. The last lines of a table compare the logits of tokens that were evaluated alone
with those of the same tokens in batches.

--attention times attention alone, to so many cells: eight heads of 128 in two groups, the shortest of the repeats.

--changes times batches of one size in a row, and each behind a batch of one token, with our kernels alone: backends of
GPUs record batches that come again, and a draft that comes now and then pays for it.

With --gpu-layers N (-1: all) so many layers are on a GPU, for what a batch costs there; our kernels have the rest.

--as quantises the model to each of these types first, from whatever type it has: for times, not for texts.

Where there is a C compiler, the roofline stands beside it: a batch takes at least as long as its weights take to be
read at this machine's speed of memory, and as its products of bytes take at the speed of the dot instruction.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import llama_cpp
import numpy as np
from common import add_record, markdown, print_machine, record, spread

from pyfly_cpp import FlyLlama, _native
from pyfly_cpp.machine import kernels
from pyfly_cpp.machine.cache_types import CACHE_WORDS
from pyfly_cpp.machine.programs import quantize
from pyfly_cpp.machine.threads import physical_cores

HERE = Path(__file__).parent
MOST_BATCH = 512


class Side:
    """One of the two models."""

    def __init__(self, path: str, choice: str, given: argparse.Namespace, n_ctx: int) -> None:
        begin = time.perf_counter()
        self.llm = FlyLlama(
            path, kernels=choice, n_ctx=n_ctx, n_batch=MOST_BATCH, n_threads=given.threads,
            n_threads_batch=given.threads, n_gpu_layers=given.gpu_layers, flash_attn=True, verbose=False,
            type_k=CACHE_WORDS[given.cache], type_v=CACHE_WORDS[given.cache],
        )  # fmt: skip
        self.seconds_to_load = time.perf_counter() - begin
        self.batch = llama_cpp.llama_batch_init(MOST_BATCH, 0, 1)
        self.n_read = 0

    def evaluate(self, tokens: list[int], position: int) -> float:
        """Evaluates tokens at a position and forgets what stands behind it before; seconds."""
        context = self.llm.ctx
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), 0, position, -1)
        self.batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            self.batch.token[i], self.batch.pos[i] = token, position + i
            self.batch.logits[i] = len(tokens) <= 32 or i + 1 == len(tokens)  # a prompt asks for one row
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, 0
        begin = time.perf_counter()
        if llama_cpp.llama_decode(context, self.batch) != 0:
            raise SystemExit("llama.cpp could not evaluate a batch; lower --rows.")
        llama_cpp.llama_synchronize(context)
        return time.perf_counter() - begin

    def read(self, tokens: list[int]) -> None:
        """Goes on until the sequence is these tokens."""
        for i in range(self.n_read, len(tokens), MOST_BATCH):
            self.evaluate(tokens[i : i + MOST_BATCH], i)
        self.n_read = len(tokens)

    def take(self, other: Side) -> None:
        """What the other side has read, as it stands in its cache."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(other.llm.ctx), 0, other.n_read, -1)
        state = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(other.llm.ctx, 0))()
        llama_cpp.llama_state_seq_get_data(other.llm.ctx, state, len(state), 0)
        if llama_cpp.llama_state_seq_set_data(self.llm.ctx, state, len(state), 0) == 0:
            raise SystemExit("llama.cpp could not restore a cache; lower --behind.")
        self.n_read = other.n_read

    def logits(self, n: int) -> np.ndarray:
        """Of the last batch of n tokens, [n][vocabulary]."""
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.llm.ctx), shape=(n, self.llm.n_vocab())).copy()


def roofline(n_threads: int) -> dict[str, float]:
    """Gigabytes, and 10^9 products of bytes, a second; empty where there is no compiler for it."""
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/roofline"
        try:
            subprocess.run(["cc", "-O2", "-pthread", str(HERE / "roofline.c"), "-o", program], check=True)
            lines = subprocess.run([program, str(n_threads)], check=True, capture_output=True, text=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no roofline: {error}")
            return {}
    return {name: float(value) for name, value in (line.split() for line in lines.splitlines())}


def quantised(model: str, name: str, folder: str) -> str:
    """The model in another type."""
    path = f"{folder}/{name}.gguf"
    ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
    quantize(model, path, ftype, lambda: None, f"llama.cpp could not quantise {model} to {name}")
    return path


def print_attention(n_cells: int, n_threads: int, repeats: int) -> None:
    """Attention alone, by the trial that decides which is used."""
    print(
        "\n| tokens | llama.cpp, us | ours, us | error of llama.cpp's | of ours |\n| ---: | ---: | ---: | ---: | ---: |"
    )
    for n in (1, 2, 4, 16, 64, 256):
        best = {}
        for is_ours in (False, True) * repeats:
            trial = _native.try_attention(n_cells, n, n_threads, 2, is_ours=is_ours)
            best[is_ours] = min(best.get(is_ours, trial), trial, key=lambda t: t.us)
        stock, ours = best[False], best[True]
        print(f"| {n} | {stock.us:.0f} | {ours.us:.0f} | {stock.error:.0e} | {ours.error:.0e} |")


def lengths(text: str) -> list[int]:
    """Of beginnings, in ascending order."""
    return sorted(map(int, text.split(",")))


def rows_of(given: argparse.Namespace) -> list[int]:
    """The sizes of batches that are asked for."""
    return [int(n) for n in given.rows.split(",")]


def open_sides(path: str, choices: Sequence[str], given: argparse.Namespace) -> tuple[list[Side], list[int]]:
    """A model with each choice of kernels, and tokens for the longest beginning and the largest batch."""
    n = max(given.behind) + max(rows_of(given))
    sides = [Side(path, choice, given, n) for choice in choices]
    return sides, np.random.default_rng(1).integers(0, sides[0].llm.n_vocab(), n).tolist()


def print_changes(side: Side, tokens: list[int], name: str, given: argparse.Namespace, n_before: int) -> None:
    """Batches of one size in a row, and each between two of one token."""
    side.read(tokens[:n_before])
    behind = tokens[n_before:]

    def ms(sizes: Sequence[int]) -> list[float]:
        times = [[1e3 * side.evaluate(behind[:n], n_before) for n in sizes] for _ in range(given.repeats + 2)]
        return [median(column) for column in zip(*times[2:])]  # the first two warm up

    rows = []
    for n in rows_of(given):
        (again,) = ms([n])
        rows.append([str(n), *(f"{one:.2f}" for one in (again, *ms([n, 1])))])
    print(f"\n{name}, behind {n_before} tokens, milliseconds\n")
    print(markdown(["tokens", "the same again", "behind 1 token", "then 1 token"], rows))


def compare(
    sides: list[Side], tokens: list[int], name: str, given: argparse.Namespace, n_before: int, speeds: dict[str, float]
) -> dict[str, Any]:
    """Prints a table of a model: llama.cpp's kernels, then ours. Returns every time, seconds."""
    rows = rows_of(given)
    behind = tokens[n_before:]
    sides[1].read(tokens[:n_before])
    sides[0].take(sides[1])
    for side in sides:
        side.evaluate(behind[:16], n_before)
    llm = sides[0].llm
    times: dict[int, list[tuple[float, ...]]] = {n: [] for n in rows}
    for _ in range(given.repeats):
        for n in rows:
            times[n].append(tuple(side.evaluate(behind[:n], n_before) for side in sides))

    single = [median(pair[i] for pair in times[rows[0]]) for i in (0, 1)]
    loads = " and ".join(f"{side.seconds_to_load:.1f}" for side in sides)
    print(f"\n{name}, {given.cache} cache, behind {n_before} tokens; loaded in {loads} s")
    print(f"\n| tokens | stock, ms | ours, ms | stock / ours | stock, of {rows[0]} | ours, of {rows[0]} |")
    print("| ---: | ---: | ---: | --- | ---: | ---: |")
    for n in rows:
        stock, ours = (median(pair[i] for pair in times[n]) for i in (0, 1))
        ratio = spread([pair[0] / pair[1] for pair in times[n]])
        times_of_one = f"{stock / single[0]:.2f} | {ours / single[1]:.2f}"
        print(f"| {n} | {1e3 * stock:.1f} | {1e3 * ours:.1f} | {ratio} | {times_of_one} |")
    isa = "avx512vnni" if _native.kernels_isa() == "amx" else _native.kernels_isa()  # what few rows are multiplied with
    if isa in speeds:
        n_bytes = llama_cpp.llama_model_size(llm.model)
        n_weights = llama_cpp.llama_model_n_params(llm.model)
        print(
            f"\nroofline: {n_bytes / 1e9 / speeds['memory'] * 1e3:.1f} ms to read {n_bytes / 1e9:.2f} GB at "
            f"{speeds['memory']:.1f} GB/s; {n_weights / 1e9 / speeds[isa] * 1e3:.1f} ms a token for "
            f"{n_weights / 1e9:.2f} G products at {speeds[isa]:.0f} G/s ({isa})"
        )
    print_differences(sides, behind[: min(16, max(rows))], n_before)
    return {"model": name, "behind": n_before, "stock_and_ours": times}


def print_differences(sides: list[Side], tokens: list[int], position: int) -> None:
    """Alone against in batches."""
    for side, name in zip(sides, ("stock", "ours")):
        alone = []
        for i, token in enumerate(tokens):
            side.evaluate([token], position + i)
            alone.append(side.logits(1)[0])
        worst = 0.0
        for n in range(2, len(tokens) + 1):
            side.evaluate(tokens[:n], position)
            worst = max(worst, float(np.abs(side.logits(n) - np.array(alone[:n])).max()))
        print(f"{name}: logits of tokens alone and in batches of 2 to {len(tokens)} differ by at most {worst:.2g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model")
    what.add_argument("--attention", type=int, metavar="CELLS")
    parser.add_argument("--changes", action="store_true", help="what a change of the batch's size costs")
    parser.add_argument("--as", dest="types", default="", metavar="TYPES")
    parser.add_argument("--rows", default="1,2,3,4,6,8,12,16,32")
    parser.add_argument("--behind", default=[16], metavar="N,...", type=lengths)
    parser.add_argument("--cache", default="f16", choices=sorted(CACHE_WORDS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=physical_cores())
    add_record(parser)
    parser.add_argument("--gpu-layers", type=int, default=0, metavar="N", help="layers on the GPU, -1: all")
    given = parser.parse_args()
    machine = print_machine()
    print(f"kernels: {kernels.verdict().reason}; {given.threads} threads, {given.repeats} repeats")
    if given.attention:
        return print_attention(given.attention, given.threads, given.repeats)
    speeds = roofline(given.threads)
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in given.types.split(","):
            path = quantised(given.model, kind, folder) if kind else given.model
            name = kind or Path(path).name
            sides, tokens = open_sides(path, ("auto",) if given.changes else ("stock", "auto"), given)
            for n_before in given.behind:
                if given.changes:
                    print_changes(sides[0], tokens, name, given, n_before)
                else:
                    measured.append(compare(sides, tokens, name, given, n_before, speeds))
            for side in sides:
                side.llm.close()
    record(given.record, machine, measured)


if __name__ == "__main__":
    main()
