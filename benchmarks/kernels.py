"""What a batch costs by its number of tokens: llama.cpp's kernels against ours.

    python benchmarks/kernels.py --model MODEL [--as Q4_K_M,Q6_K,...] [--rows 1,2,3,4,6,8,12,16,32] [--behind 16,8000]
        [--cache q8_0] [--fill] [--repeats 7] [--threads N] [--gpu-layers N] [--changes] [--apart]
        [--record FILE.json.gz]
    python benchmarks/kernels.py --attention 1024 [--repeats 7] [--threads N]

The same model is loaded twice, with kernels="stock" and "auto", both with flash attention, each in a process of its own
(`evaluator.py`). Both evaluate batches of the same random tokens behind the same beginning, in turns, so that whatever
else the machine does slows both alike. Times are medians; the ratio is the median of the ratios of neighbours in time,
with its range. --behind has a table for each length of the beginning, in ascending order: our kernels read it, and the
other side gets what they have left in the cache. With --fill only 512 tokens are read, and the cache has them as often
as they fit: for long beginnings of large models. --cache is the type of K and V. The last lines of a table compare the
logits of tokens that were evaluated alone with those of the same tokens in batches. --apart loads one after the other,
for models that do not fit in memory twice; each then reads the beginning itself.

--attention times attention alone, to so many cells: eight heads of 128 in two groups, the shortest of the repeats.

--changes times batches of one size in a row, and each behind a batch of one token, with our kernels alone: backends of
GPUs record batches that come again, and a draft that comes now and then pays for it.

With --gpu-layers N (-1: all) so many layers are on a GPU, for what a batch costs there; our kernels have the rest.

--as quantises the model to each of these types first, from whatever type it has: for times, not for texts.

Where there is a C compiler, the roofline stands beside it: a batch takes at least as long as its weights take to be
read at this machine's speed of memory, and as its products of bytes take at the speed of the dot instruction. Memory's
speed changes with what others do, so it is measured before each repeat, for the first number of tokens.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import evaluator
import llama_cpp
from child import Child
from common import add_record, add_threads, markdown, model_path, positive, print_machine, record, spread

from pyfly_cpp import _native
from pyfly_cpp.machine import kernels
from pyfly_cpp.machine.cache_types import CACHE_WORDS
from pyfly_cpp.machine.programs import quantize

HERE = Path(__file__).parent
CHOICES = ("stock", "auto")
"""The two sides, in the order of all times: llama.cpp's kernels, then ours."""

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32)

Costs = dict[str, Any]
"""Of a model behind a beginning: `model`, `behind`, `cache`, `about` (evaluator.Evaluator.about) and `differences` of
both sides, and `stock_and_ours`: seconds by the number of tokens, a pair for each repeat. With a roofline, `memory`:
gigabytes a second that could be read before each repeat."""


class Side(Child):
    """A model with one choice of kernels."""

    def __init__(self, choice: str, model: str, n_ctx: int, threads: int, cache: str, gpu_layers: int) -> None:
        kind = CACHE_WORDS[cache]
        options = {"n_threads": threads, "n_threads_batch": threads, "n_gpu_layers": gpu_layers}
        super().__init__(
            evaluator.__file__, [choice],
            {"model_path": model, "n_ctx": n_ctx, "type_k": kind, "type_v": kind, **options},
        )  # fmt: skip

    def do(self, method: str, **arguments: Any) -> Any:
        """A method of `evaluator.Evaluator`."""
        return self.ask({method: arguments})


def measure(
    model: str, *, rows: Sequence[int] = ROWS, behind: Sequence[int] = (16,), repeats: int, threads: int,
    cache: str = "f16", gpu_layers: int = 0, apart: bool = False, fill: bool = False,
    speed_of_memory: Callable[[], float] | None = None,
) -> list[Costs]:  # fmt: skip
    """The costs behind each beginning, in ascending order, of a model with both choices of kernels. `memory` is
    measured if both are loaded at once."""
    lengths = sorted(behind)
    how = (model, lengths[-1] + max(rows), threads, cache, gpu_layers)
    out: list[Costs] = [{"model": Path(model).name, "behind": n, "cache": cache} for n in lengths]
    if apart:
        alone = []
        for choice in CHOICES:
            with Side(choice, *how) as side:
                alone.append([_alone(side, n, rows, repeats, fill) for n in lengths])
        for i, costs in enumerate(out):
            both = [side[i] for side in alone]
            pairs = {n: list(zip(*(one["times"][n] for one in both))) for n in rows}
            costs.update({name: [one[name] for one in both] for name in ("about", "differences")}, stock_and_ours=pairs)
        return out
    with Side("stock", *how) as stock, Side("auto", *how) as ours, tempfile.TemporaryDirectory() as folder:
        sides = (stock, ours)
        for n_before, costs in zip(lengths, out):
            ours.do("read", n=n_before, fill=fill)
            if n_before > 0:
                ours.do("save", path=f"{folder}/state")
                stock.do("restore", path=f"{folder}/state", n=n_before)
            for side in sides:
                side.do("seconds", n=min(16, max(rows)))
            times: dict[int, list[tuple[float, ...]]] = {n: [] for n in rows}
            for _ in range(repeats):
                if speed_of_memory:
                    costs.setdefault("memory", []).append(speed_of_memory())
                for n in rows:
                    times[n].append(tuple(side.do("seconds", n=n) for side in sides))
            costs.update(about=[side.ready for side in sides], stock_and_ours=times,
                         differences=[side.do("difference", n=min(16, max(rows))) for side in sides])  # fmt: skip
    return out


def _alone(side: Side, n_before: int, rows: Sequence[int], repeats: int, fill: bool) -> dict[str, Any]:
    """One side's part of `Costs`."""
    side.do("read", n=n_before, fill=fill)
    side.do("seconds", n=min(16, max(rows)))
    times: dict[int, list[float]] = {n: [] for n in rows}
    for _ in range(repeats):
        for n in rows:
            times[n].append(side.do("seconds", n=n))
    return {"about": side.ready, "times": times, "differences": side.do("difference", n=min(16, max(rows)))}


def seconds_of(costs: Costs, i: int) -> dict[int, float]:
    """Median seconds of a side (0: llama.cpp's kernels) by the number of tokens, of costs that may come from a
    record."""
    return {int(n): median(pair[i] for pair in pairs) for n, pairs in costs["stock_and_ours"].items()}


def table(costs: Costs) -> str:
    """Of a model behind a beginning."""
    (stock, ours), lines = (seconds_of(costs, i) for i in (0, 1)), []
    first = next(iter(stock))
    for n, pairs in costs["stock_and_ours"].items():
        n = int(n)
        lines.append([
            str(n), f"{1e3 * stock[n]:.1f}", f"{1e3 * ours[n]:.1f}", spread([pair[0] / pair[1] for pair in pairs]),
            f"{stock[n] / stock[first]:.2f}", f"{ours[n] / ours[first]:.2f}",
        ])  # fmt: skip
    return markdown(
        ["tokens", "stock, ms", "ours, ms", "stock / ours", f"stock, of {first}", f"ours, of {first}"], lines
    )


class Roofline:
    """The speeds of `roofline.c`."""

    def __init__(self, n_threads: int, folder: str) -> None:
        """Compiles it in this folder. Raises OSError or CalledProcessError: there is no compiler, or the processor is
        none that it knows."""
        self._call = [f"{folder}/roofline", str(n_threads)]
        subprocess.run(["cc", "-O2", "-pthread", str(HERE / "roofline.c"), "-o", self._call[0]], check=True)
        self.speeds = self._measure()
        """Gigabytes (`memory`), and 10^9 products of bytes by instruction set, a second."""

    def memory(self) -> float:
        """Gigabytes a second, now."""
        return self._measure("memory")["memory"]

    def _measure(self, *only: str) -> dict[str, float]:
        lines = subprocess.run([*self._call, *only], check=True, capture_output=True, text=True).stdout
        return {name: float(value) for name, value in (line.split() for line in lines.splitlines())}


def make_roofline(n_threads: int, folder: str) -> Roofline | None:
    """None, and it prints why, if there can be none here."""
    try:
        return Roofline(n_threads, folder)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no roofline: {error}")
        return None


def roofline(n_threads: int) -> dict[str, float]:
    """`Roofline.speeds`; empty if there can be none here."""
    with tempfile.TemporaryDirectory() as folder:
        made = make_roofline(n_threads, folder)
        return made.speeds if made else {}


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


def sizes(text: str) -> list[int]:
    """Separated by commas, for argparse."""
    return [positive(n) for n in text.split(",")]


def lengths(text: str) -> list[int]:
    """As `sizes`, and 0."""
    return [0 if n.strip() == "0" else positive(n) for n in text.split(",")]


def print_changes(path: str, name: str, given: argparse.Namespace) -> None:
    """Batches of one size in a row, and each between two of one token, behind each beginning."""
    n_ctx = max(given.behind) + max(given.rows)
    with Side("auto", path, n_ctx, given.threads, given.cache, given.gpu_layers) as side:
        for n_before in sorted(given.behind):
            side.do("read", n=n_before, fill=given.fill)
            rows = [
                [str(n), *(f"{1e3 * one:.2f}" for one in side.do("changes", n=n, repeats=given.repeats))]
                for n in given.rows
            ]
            print(f"\n{name}, behind {n_before} tokens, milliseconds\n")
            print(markdown(["tokens", "the same again", "behind 1 token", "then 1 token"], rows))


def print_costs(costs: Costs, name: str, speeds: dict[str, float]) -> None:
    """A table, and below it the roofline and the differences."""
    loads = " and ".join(f"{about['seconds_to_load']:.1f}" for about in costs["about"])
    print(f"\n{name}, {costs['cache']} cache, behind {costs['behind']} tokens; loaded in {loads} s\n")
    print(table(costs))
    isa = "avx512vnni" if _native.kernels_isa() == "amx" else _native.kernels_isa()  # what few rows are multiplied with
    if isa in speeds:
        n_bytes, n_weights = costs["about"][0]["n_bytes"], costs["about"][0]["n_weights"]
        print(
            f"\nroofline: {n_bytes / 1e9 / speeds['memory'] * 1e3:.1f} ms to read {n_bytes / 1e9:.2f} GB at "
            f"{speeds['memory']:.1f} GB/s; {n_weights / 1e9 / speeds[isa] * 1e3:.1f} ms a token for "
            f"{n_weights / 1e9:.2f} G products at {speeds[isa]:.0f} G/s ({isa})"
        )
    if costs.get("memory"):
        n, pairs = next(iter(costs["stock_and_ours"].items()))
        read = [costs["about"][0]["n_bytes"] / 1e9 / speed for speed in costs["memory"]]
        shares = [spread([least / pair[i] for least, pair in zip(read, pairs)]) for i in (0, 1)]
        print(f"of the speed of memory at that moment, {n} tokens: stock {shares[0]}, ours {shares[1]}")
    for name, worst, about in zip(("stock", "ours"), costs["differences"], costs["about"]):
        why = "; ".join(about.get("inexact", ()))
        print(f"{name}: logits of tokens alone and in batches differ by at most {worst:.2g}{why and f' ({why})'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", type=model_path)
    what.add_argument("--attention", type=int, metavar="CELLS")
    parser.add_argument("--changes", action="store_true", help="what a change of the batch's size costs")
    parser.add_argument("--as", dest="types", default="", metavar="TYPES")
    parser.add_argument("--rows", default=list(ROWS), type=sizes, metavar="N,...")
    parser.add_argument("--behind", default=[16], metavar="N,...", type=lengths)
    parser.add_argument("--apart", action="store_true", help="load one after the other")
    parser.add_argument("--cache", default="f16", choices=sorted(CACHE_WORDS))
    parser.add_argument("--fill", action="store_true", help="read 512 tokens, and repeat what the cache has of them")
    parser.add_argument("--repeats", type=positive, default=7)
    add_threads(parser)
    add_record(parser)
    parser.add_argument("--gpu-layers", type=int, default=0, metavar="N", help="layers on the GPU, -1: all")
    given = parser.parse_args()
    machine = print_machine()
    print(f"kernels: {kernels.verdict().reason}; {given.threads} threads, {given.repeats} repeats")
    if given.attention:
        return print_attention(given.attention, given.threads, given.repeats)
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        limits = make_roofline(given.threads, folder)
        speeds = limits.speeds if limits else {}
        for kind in given.types.split(","):
            path = quantised(given.model, kind, folder) if kind else given.model
            name = kind or Path(path).name
            if given.changes:
                print_changes(path, name, given)
                continue
            for costs in measure(
                path, rows=given.rows, behind=given.behind, repeats=given.repeats, threads=given.threads,
                cache=given.cache, gpu_layers=given.gpu_layers, apart=given.apart,
                fill=given.fill, speed_of_memory=limits and limits.memory,
            ):  # fmt: skip
                print_costs(costs, name, speeds)
                measured.append({**costs, "model": name})
    record(given.record, {**machine, "roofline": speeds}, measured)


if __name__ == "__main__":
    main()
