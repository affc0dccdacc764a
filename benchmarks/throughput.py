"""Throughput of several requests together: against one at a time, against what the costs of this very run allow, and
against llama.cpp's own server.

    python benchmarks/throughput.py --target MODEL --prompts FILE... [--draft DRAFT] [--parallel 1,8,16]
    python benchmarks/throughput.py ... --server PATH/TO/llama-server
                                        [--server-args "-md DRAFT --spec-type draft-simple --spec-draft-n-max 3"]

All ways take turns on the same prompts (who begins changes), greedy, in the model's chat format; prompt lookup without
a memory, which would hold the answers of the turn before. "decode" is tokens per
second of the steps' time without the prompts' share (each evaluation's time is shared out by tokens); "wall" counts
everything. What the costs allow is n C(1) / C(n), with C(n) the time of a batch of n rows, measured before and after
each turn of plain decoding; "as filled" counts the batches that the turn really had, of which the last have fewer
requests than there is room for. Both are of batches in one piece: from 64 rows on decoding may go in parts, and beat
them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from common import markdown, print_machine, spread
from over_http import add_arguments, collect, llama_server, mixed_texts

from pyfly_cpp import DraftModel, FlyBatch, FlyLlama, PromptLookup
from pyfly_cpp.measure.generator import Generator

Turn = Callable[[Sequence[list[int]], int], tuple[list[int], float, float]]
"""Serves prompts, n at once: (tokens of each answer, seconds of decoding or nan, seconds)."""


def rows_of_steps(lengths: Sequence[int], n: int) -> list[int]:
    """How many requests each step has, where requests of these lengths take n places in turn, a token in every step."""
    waiting, running = list(lengths)[::-1], []
    steps = []
    while waiting or running:
        while waiting and len(running) < n:
            running.append(waiting.pop())
        steps.append(len(running))
        running = [left - 1 for left in running if left > 1]
    return steps


class Ours:
    """A FlyBatch that drafts in one way."""

    def __init__(self, args: argparse.Namespace, way: str) -> None:
        drafter, k, adaptive, flash_attn = None, None, None, None
        kind, _, how = way.partition(":")
        if kind == "plain":
            flash_attn = False if how == "no-flash" else None
        else:
            drafter = PromptLookup(memory=0) if kind == "lookup" else DraftModel(args.draft)
            adaptive = how == "governed"
            k = None if adaptive else int(how)
        self.batch = FlyBatch(
            args.target, args.most, n_ctx=args.ctx, n_batch=512, n_chunk=args.chunk, verbose=False, drafter=drafter,
            draft_max=k, adaptive=adaptive, flash_attn=flash_attn, n_threads=args.threads,
            n_threads_batch=args.threads,
        )  # fmt: skip
        self.tokens = args.tokens

    def costs(self) -> dict[int, float]:
        """C(n) in seconds."""
        native = self.batch.model.decoder.batch
        return {n: us / 1e6 for n, us in self.batch.between_steps(native.measure, when_idle=True).result().rows}

    def serve(self, prompts: Sequence[list[int]], n: int) -> tuple[list[int], float, float]:
        """A `Turn`."""

        def one(prompt: list[int]) -> int:
            done = self.batch.submit(prompt, max_tokens=self.tokens, temperature=0.0).result()
            return int(done["usage"]["completion_tokens"]) + (done["choices"][0]["finish_reason"] == "stop")  # its end

        self.batch.reset_stats()
        started = time.perf_counter()
        with ThreadPoolExecutor(n) as pool:
            lengths = list(pool.map(one, prompts))
        seconds = time.perf_counter() - started
        stats = self.batch.stats
        return lengths, stats.seconds_verify + stats.seconds_draft + stats.seconds_gate, seconds


class Server:
    """llama.cpp's server, with as many slots."""

    def __init__(self, url: str, tokens: int) -> None:
        self.url, self.tokens = url, tokens

    def serve(self, prompts: Sequence[list[int]], n: int) -> tuple[list[int], float, float]:
        """A `Turn`; its decoding cannot be told from its prompts."""

        def one(prompt: list[int]) -> int:
            body = {"prompt": prompt, "n_predict": self.tokens, "temperature": 0.0, "cache_prompt": False}
            request = urllib.request.Request(
                f"{self.url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=3600) as response:
                return int(json.load(response)["tokens_predicted"])

        started = time.perf_counter()
        with ThreadPoolExecutor(n) as pool:
            lengths = list(pool.map(one, prompts))
        return lengths, float("nan"), time.perf_counter() - started


def turns(args: argparse.Namespace, prompts: Sequence[list[int]]) -> Iterator[dict[str, Any]]:
    """Every way takes its turn on a share of the prompts, at every n, `repeats` times."""
    ours = {way: Ours(args, way) for way in args.ways}
    ways: dict[str, Turn] = {way: one.serve for way, one in ours.items()}
    with contextlib.ExitStack() as stack:
        if args.server:
            url = stack.enter_context(llama_server(args, args.most))
            ways["llama-server"] = Server(url, args.tokens).serve
        for way, serve in ways.items():
            serve(prompts[:1], 1)  # warms up
            print(f"{way}: ready", file=sys.stderr)
        for turn in range(args.repeats):
            share = prompts[turn * len(prompts) // args.repeats : (turn + 1) * len(prompts) // args.repeats]
            for n in args.parallel:
                names = list(ways)
                for way in [*names[turn % len(names) :], *names[: turn % len(names)]]:
                    if way == "llama-server" and n not in args.server_parallel:
                        continue
                    before = ours["plain"].costs() if way == "plain" else {}
                    lengths, decoding, wall = ways[way](share, n)
                    tokens = sum(lengths)
                    row = {"turn": turn, "n": n, "way": way, "decode": tokens / decoding, "wall": tokens / wall,
                           "tokens": tokens}  # fmt: skip
                    if way == "plain":
                        after = ours["plain"].costs()
                        costs = {size: before[size] + after[size] for size in before.keys() & after.keys()}
                        sizes = sorted(costs)
                        cost = [costs[size] for size in sizes]
                        row["allowed"] = n * costs[1] / float(np.interp(n, sizes, cost))
                        steps = np.interp(rows_of_steps(lengths, n), sizes, cost)
                        row["as_filled"] = tokens * costs[1] / float(steps.sum())
                    yield row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians over the turns, and the range of their ratios."""

    def of(way: str, n: int) -> list[dict[str, Any]]:
        return [row for row in rows if row["way"] == way and row["n"] == n]

    def ratios(way: str, n: int, base: tuple[str, int], key: str) -> str:
        found = [a[key] / b[key] for a, b in zip(of(way, n), of(*base))]
        return "" if any(map(math.isnan, found)) else spread(found)

    lines = []
    for n in sorted({row["n"] for row in rows}):
        for way in dict.fromkeys(row["way"] for row in rows if row["n"] == n):
            mine = of(way, n)
            decode = statistics.median(row["decode"] for row in mine)
            share, filled = (statistics.median(row[key] for row in of("plain", n)) for key in ("allowed", "as_filled"))
            alone = ratios(way, n, (way, min(row["n"] for row in rows)), "decode")
            lines.append([
                str(n), way, "" if math.isnan(decode) else f"{decode:.1f}", alone, f"{share:.2f}",
                f"{filled:.2f}", ratios(way, n, ("plain", n), "decode"),
                f"{statistics.median(row['wall'] for row in mine):.1f}", ratios(way, n, ("llama-server", n), "wall"),
            ])  # fmt: skip
    head = ["at once", "way", "decode t/s", "x alone", "costs allow", "as filled", "x plain", "wall t/s",
            "x llama-server"]  # fmt: skip
    return markdown(head, lines)


def measure(words: Sequence[str]) -> tuple[argparse.Namespace, list[dict[str, Any]]]:
    """What was asked for, by arguments of this script, and every turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, tokens=160)
    parser.add_argument("--draft", help="draft model, for ways draft:K and draft:governed")
    parser.add_argument("--parallel", default="1,8,16", help="requests at a time")
    parser.add_argument(
        "--ways",
        default="plain",
        help="plain, which is needed, plain:no-flash, lookup:K, draft:K, lookup:governed, draft:governed",
    )
    parser.add_argument("--repeats", type=int, default=2, help="turns; each takes its share of the prompts")
    parser.add_argument("--chunk", type=int, default=None, help="prompt tokens in a step while others run")
    parser.add_argument("--server", help="llama-server of llama.cpp")
    parser.add_argument("--server-parallel", help="requests at a time for llama-server (default: those of --parallel)")
    args = parser.parse_args(words)
    args.server_parallel = [int(n) for n in (args.server_parallel or args.parallel).split(",")]
    args.parallel = [int(n) for n in args.parallel.split(",")]
    args.most = max(args.parallel)
    args.ways = args.ways.split(",")
    llm = FlyLlama(args.target, n_ctx=2048, verbose=False)
    generator = Generator(llm)
    prompts = [list(generator.render([{"role": "user", "content": text}]).tokens) for text in mixed_texts(args)]
    llm.close()
    if args.repeats > len(prompts):
        parser.error(f"--repeats is at most the number of prompts, {len(prompts)}.")
    return args, collect(turns(args, prompts), args.out)


def main() -> None:
    """Measures and prints a table."""
    print_machine()
    args, rows = measure(sys.argv[1:])
    print(f"{Path(args.target).name}, {args.threads} threads")
    print(table(rows))


if __name__ == "__main__":
    main()
