"""Governed drafts in a batch against the plain batch, by kind of text and number of texts at once.

    python benchmarks/batches.py run --target MODEL [--draft DRAFT] --out RESULTS.jsonl
        --prompts code=humaneval.jsonl math=gsm8k_test.jsonl translation=spec_bench.jsonl:translation
                  summary=spec_bench.jsonl:summarization story=creative_writing_prompts.jsonl
    python benchmarks/batches.py table RESULTS.jsonl [MORE.jsonl ...]

Every way to decode is a FlyBatch with a model of its own. They serve the same prompts greedily, in the model's chat
format, and take turns of some steps each, so that what else the machine does slows all of them alike. A second plain
batch takes part: the ratio of the two is the noise. A cell (kind, number of texts) ends for a way when a text has ended
that no other can follow, so that the batch is always full. Speed is that of decoding: tokens over the time of the
steps, without the prompts' share of it. A run that is stopped goes on with the next cell.
"""

from __future__ import annotations

import argparse
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from lockstep import take_turns
from resumable import Results, markdown, model_conditions, read_questions
from speed import print_machine

from pyfly_cpp import DraftModel, FlyBatch, FlyLlama, PromptLookup
from pyfly_cpp.batch.handles import Handle
from pyfly_cpp.evaluation.generation import Generator
from pyfly_cpp.machine.threads import physical_cores


class Way:
    """One way to decode: a batch that runs only when it is its turn."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        kind, _, fixed = name.partition(":")
        drafters = {
            "lookup": [PromptLookup()], "draft": [DraftModel(args.draft)],
            "both": [PromptLookup(), DraftModel(args.draft)],
        }  # fmt: skip
        self.name = name
        self.n_tokens = args.tokens
        self.batch = FlyBatch(
            args.target, args.most, n_ctx=args.ctx, verbose=False, drafter=drafters.get(kind), n_threads=args.threads,
            n_threads_batch=args.threads, **({"draft_max": int(fixed), "adaptive": False} if fixed.isdigit() else {}),
        )  # fmt: skip
        self._lock = threading.Lock()
        self._pause()

    def _pause(self) -> None:
        """The thread that steps waits between two steps."""
        self._may_go, stopped = threading.Event(), threading.Event()
        may_go, crew = self._may_go, self.batch._crew

        def wait() -> None:
            self._now = crew._stats()
            stopped.set()
            may_go.wait()

        self._waiting = threading.Thread(target=crew.stepper.call, args=(wait,), daemon=True)
        self._waiting.start()
        stopped.wait()

    def _resume(self) -> None:
        self._may_go.set()
        self._waiting.join()

    def start(self, prompts: Sequence[list[int]], n: int) -> None:
        """Hands in the prompts; nothing is evaluated before its turn."""
        self._resume()
        self.batch.reset_stats()
        self._pause()
        self._prompts = list(prompts)
        self._running: set[Handle] = set()
        self.is_full = True
        self.stats = self._now
        for _ in range(n):
            self._submit()

    def _submit(self) -> None:
        with self._lock:
            if not self._prompts:
                self.is_full = False
            if not self.is_full:
                return
            handle = self.batch.submit(self._prompts.pop(0), max_tokens=self.n_tokens, temperature=0.0)
            self._running.add(handle)

        def follow(_: object) -> None:
            self._running.discard(handle)
            self._submit()

        handle._job.future.add_done_callback(follow)

    def turn(self, seconds: float) -> bool:
        """Steps for so long, and ends the step. Returns whether the batch is still full."""
        self._resume()
        time.sleep(seconds)
        self._pause()
        if self.is_full:
            self.stats = self._now
        return self.is_full

    def end(self) -> dict[str, Any]:
        """Cancels what runs. Returns what was measured while the batch was full."""
        running = list(self._running)
        self._resume()
        for handle in running:
            handle.cancel()
        wait([handle._job.future for handle in running])
        self._pause()
        stats = self.stats
        return {
            "way": self.name, "tokens": stats.committed, "seconds": stats.seconds_decode, "rounds": stats.rounds,
            "drafted": stats.drafted, "matched": stats.matched,
        }  # fmt: skip

    def close(self) -> None:
        """Frees the model."""
        self._resume()
        self.batch.close()


def measure(ways: Sequence[Way], prompts: Sequence[list[int]], n: int, turn: float) -> list[dict[str, Any]]:
    """All ways serve the same prompts, n at once."""
    for way in ways:
        way.start(prompts, n)
    take_turns(ways, turn)
    return [way.end() for way in ways]


def questions_of(source: str, n: int) -> list[str]:
    """The first n of FILE or FILE:CATEGORY."""
    file, _, category = source.partition(":")
    rows = [row for row in read_questions(Path(file)) if not category or row.category == category]
    return [row.turns[0] for row in rows[:n]]


def run(args: argparse.Namespace) -> None:
    """Measures; one JSON line for each cell."""
    print_machine()
    numbers = [int(n) for n in args.parallel.split(",")]
    args.most = max(numbers)
    results = Results(Path(args.out))
    done = {row["prompt"] for row in results.rows}
    llm = FlyLlama(args.target, n_ctx=args.ctx, verbose=False)
    generator = Generator(llm)
    prompts = {}
    for source in args.prompts:
        kind, _, where = source.partition("=")
        asked = [[{"role": "user", "content": text}] for text in questions_of(where, 200)]
        rendered = [list(generator.render(messages).tokens) for messages in asked]
        prompts[kind] = [tokens for tokens in rendered if len(tokens) <= args.longest]
        if len(prompts[kind]) <= args.most:
            raise SystemExit(f"{where} has too few prompts of at most {args.longest} tokens; raise --longest.")
    llm.close()
    ways = [Way(name, args) for name in ("plain", "plain:again", *args.ways.split(","))]
    conditions = {**model_conditions(args), "tokens": args.tokens, "longest": args.longest, "ways": args.ways}
    with results.writing(conditions):
        for n in numbers:
            for kind, of_kind in prompts.items():
                name = f"{kind} x {n}"
                if name in done:
                    continue
                records = measure(ways, of_kind[: n + args.more], n, args.turn)
                results.add({"prompt": name, "kind": kind, "n": n, "records": records})
                print(f"{name}: {summary(records)}", flush=True)
    for way in ways:
        way.close()


def ratios(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Speed of each way over that of the plain batch, which is the mean of the two that ran beside it."""
    speeds = {record["way"]: record["tokens"] / record["seconds"] for record in records}
    plain = math.sqrt(speeds["plain"] * speeds["plain:again"])
    return {
        "noise": speeds["plain:again"] / speeds["plain"],
        **{way: speed / plain for way, speed in speeds.items() if not way.startswith("plain")},
    }


def summary(records: Sequence[dict[str, Any]]) -> str:
    """One cell."""
    plain = records[0]["tokens"] / records[0]["seconds"]
    return f"plain {plain:.1f} t/s; " + ", ".join(f"{way} {value:.2f}" for way, value in ratios(records).items())


def table(args: argparse.Namespace) -> None:
    """Prints the cells as Markdown."""
    lines = []
    for file in args.results:
        results = Results.measured(Path(file))
        target = results.conditions["target"].split()[0]
        ways = list(ratios(results.rows[0]["records"]))
        kinds = list(dict.fromkeys(row["kind"] for row in results.rows))
        for way in ways:
            for n in dict.fromkeys(row["n"] for row in results.rows):
                cells = {row["kind"]: ratios(row["records"])[way] for row in results.rows if row["n"] == n}
                shown = [f"{cells[kind]:.2f}" if kind in cells else "" for kind in kinds]
                lines.append([target, way, str(n), *shown, f"{geometric_mean(cells.values()):.3f}"])
    print(markdown(["target", "way", "at once", *kinds, "geometric mean"], lines))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("run", help="measure one target")
    measuring.add_argument("--target", required=True, help="GGUF of the target")
    measuring.add_argument("--draft", help="GGUF of the draft, for the ways draft and both")
    measuring.add_argument("--prompts", nargs="+", required=True, metavar="KIND=FILE[:CATEGORY]")
    measuring.add_argument("--out", required=True, help="results, JSONL; what is in it is not measured again")
    measuring.add_argument("--ways", default="lookup,draft,both", help="governed; lookup:4 drafts always 4")
    measuring.add_argument("--parallel", default="2,4,8", help="texts at once (default 2,4,8)")
    measuring.add_argument("--more", type=int, default=2, help="prompts beside the first ones (default 2)")
    measuring.add_argument("--tokens", type=int, default=64, help="most tokens of an answer (default 64)")
    measuring.add_argument("--longest", type=int, default=400, help="longest prompt, tokens (default 400)")
    measuring.add_argument("--ctx", type=int, default=512, help="tokens of one text (default 512)")
    measuring.add_argument("--turn", type=float, default=0.5, help="seconds of a turn (default 0.5)")
    measuring.add_argument("--threads", type=int, default=physical_cores())
    measuring.set_defaults(run=run)
    show = commands.add_parser("table", help="print results as Markdown")
    show.add_argument("results", nargs="+")
    show.set_defaults(run=table)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
