"""What busy neighbours cost: FlyLlama with a fixed thread count for each core ("before") and with n_threads="auto"
("after"), beside 0, 1 and 2 processes that compute, with llama_cpp.Llama as it comes for comparison.

    python benchmarks/neighbour.py --out neighbour.jsonl [--target TARGET.gguf --draft DRAFT.gguf]
    python benchmarks/neighbour.py --out waiting.jsonl --waiting --busy 0 1     # how OpenMP's threads wait instead

Every contender is a process of its own. They take turns, and whoever has no turn is stopped (SIGSTOP), neighbours too:
the threads of a process that has just decoded go on spinning for a while. A turn begins with unmeasured seconds, in
which auto finds its thread count. Results are appended as they come; the same command goes on where it was stopped. The
defaults take about 12 minutes on two cores. Needs a POSIX system.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
from resumable import Results, markdown, model_conditions
from speed import print_machine, spread

from pyfly_cpp import DraftModel, FlyLlama
from pyfly_cpp.models import embedded_model
from pyfly_cpp.threads import physical_cores

N_CTX = 1024
PROMPT = list(range(100, 132))
CONTENDERS = ("Llama", "before", "after", "draft before", "draft after")
COMPARED = (("after", "before"), ("after", "Llama"), ("draft after", "draft before"))
WAITING = {
    "": {},
    ", passive": {"OMP_WAIT_POLICY": "passive"},
    ", spin 1e3": {"GOMP_SPINCOUNT": "1000"},
    ", spin 1e4": {"GOMP_SPINCOUNT": "10000"},
    ", spin 1e5": {"GOMP_SPINCOUNT": "100000"},
}
"""What OpenMP (GCC's) is told; --waiting compares them. llama.cpp built without OpenMP does not look at it."""
WAITING_CONTENDERS = tuple(f"{who}{how}" for who in ("before", "after") for how in WAITING)
WAITING_COMPARED = tuple((f"{who}{how}", who) for who in ("before", "after") for how in WAITING if how)


# ---- A contender, in its own process ---------------------------------------------------------------------------------


def load(contender: str, target: str, draft: str, k: int) -> Any:
    """Plain or with a draft model; `before` with a thread for each core, `Llama` with the threads that it takes."""
    if contender == "Llama":
        return llama_cpp.Llama(target, n_ctx=N_CTX, verbose=False)
    threads: Any = "auto" if "after" in contender else physical_cores()
    drafter = DraftModel(draft, draft_max=k) if contender.startswith("draft") else None
    return FlyLlama(target, n_ctx=N_CTX, n_threads=threads, n_threads_batch=threads, drafter=drafter, verbose=False)


def tokens_per_second(llm: Any, n: int, seconds: float) -> float:
    """Of decoding n tokens greedily, or as many as come in so many seconds; without the prompt and the first token."""
    llm.reset()
    stream = llm.generate(PROMPT, temp=0.0)
    next(stream)
    started = time.perf_counter()
    done = 0
    for _ in stream:
        done += 1
        if done >= n or time.perf_counter() - started > seconds:
            break
    stream.close()
    return done / (time.perf_counter() - started)


def work(contender: str, args: argparse.Namespace) -> None:
    """For every line of stdin: settles down, measures, and answers with a line of JSON."""
    llm = load(contender, args.target, args.draft, args.k)
    print(json.dumps("ready"), flush=True)
    for _ in sys.stdin:
        until = time.monotonic() + args.settle
        while time.monotonic() < until:
            tokens_per_second(llm, args.tokens, until - time.monotonic())
        row: dict[str, Any] = {"speed": tokens_per_second(llm, args.tokens, args.seconds)}
        if "after" in contender:
            row["threads"] = llm.stats.as_dict()["threads"]
        print(json.dumps(row), flush=True)


# ---- The turns -------------------------------------------------------------------------------------------------------


class Process:
    """A child that runs only inside `with`."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
        self._child = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**ours, **(environment or {})},
        )

    def stop(self) -> None:
        self._child.send_signal(signal.SIGSTOP)

    def __enter__(self) -> Process:
        self._child.send_signal(signal.SIGCONT)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def read(self) -> Any:
        """What it says next."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit("a contender ended early; its message is above.")
        return json.loads(line)

    def ask(self) -> Any:
        """Gives it a turn."""
        assert self._child.stdin is not None
        self._child.stdin.write("go\n")
        self._child.stdin.flush()
        return self.read()

    def end(self) -> None:
        self._child.kill()
        self._child.communicate()


def turns(args: argparse.Namespace, results: Results) -> Iterator[tuple[int, int, str]]:
    """(repeat, busy neighbours, contender) of what is not there yet, the contenders in rotating order."""
    done = {(row["prompt"], row["busy"], row["contender"]) for row in results.rows}
    for repeat in range(args.repeats):
        for n_busy in args.busy:
            for i in range(len(args.contenders)):
                contender = args.contenders[(i + repeat) % len(args.contenders)]
                if (repeat, n_busy, contender) not in done:
                    yield repeat, n_busy, contender


def measure(args: argparse.Namespace, results: Results) -> None:
    """Runs what is not there yet."""
    options = [f"--{name}={getattr(args, name)}" for name in ("target", "draft", "k", "tokens", "settle", "seconds")]
    children: list[Process] = []
    try:
        neighbours = []
        for _ in range(max(args.busy)):
            children.append(Process("-c", "while True: pass"))
            children[-1].stop()
            neighbours.append(children[-1])
        contenders = {}
        for name in args.contenders:
            waiting = WAITING[name[len(name.split(",")[0]) :]]
            child = Process(__file__, "--out", str(args.out), "--contender", name, *options, environment=waiting)
            children.append(child)
            contenders[name] = children[-1]
            contenders[name].read()
            contenders[name].stop()
        print_machine()
        for repeat, n_busy, name in turns(args, results):
            for neighbour in neighbours[:n_busy]:
                neighbour.__enter__()
            with contenders[name] as contender:
                row = contender.ask()
            for neighbour in neighbours[:n_busy]:
                neighbour.stop()
            results.add({"prompt": repeat, "busy": n_busy, "contender": name, **row})
            print(f"repeat {repeat + 1}, {n_busy} busy, {name}: {row['speed']:.1f} t/s", file=sys.stderr, flush=True)
    finally:
        for child in children:
            child.end()


def table(results: Results) -> str:
    """Median tokens per second, and ratios within a repeat: median (range)."""
    speeds = {(row["busy"], row["contender"], row["prompt"]): row["speed"] for row in results.rows}
    is_waiting = WAITING_CONTENDERS[1] in {name for _, name, _ in speeds}
    names, compared = (WAITING_CONTENDERS, WAITING_COMPARED) if is_waiting else (CONTENDERS, COMPARED)
    rows = []
    for n_busy in sorted({row["busy"] for row in results.rows}):
        of = {
            name: {repeat: speed for (n, c, repeat), speed in speeds.items() if (n, c) == (n_busy, name)}
            for name in names
        }
        cells = [f"{statistics.median(values.values()):.1f}" if values else "-" for values in of.values()]
        for a, b in compared:
            ratios = [of[a][repeat] / of[b][repeat] for repeat in of[a] if of[b].get(repeat)]
            cells.append(spread(ratios) if ratios else "-")
        rows.append([f"{n_busy}", *cells])
    head = ["busy processes", *(f"{name}, t/s" for name in names), *(f"{a} / {b}" for a, b in compared)]
    return markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="results, JSONL; appended to")
    parser.add_argument("--target", default=embedded_model(), help="GGUF of the target (default: the demo model)")
    parser.add_argument("--draft", help="GGUF of the draft (default: the target itself, so that all is accepted)")
    parser.add_argument("--k", type=int, default=4, help="tokens drafted in a round (default 4)")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2], help="busy processes (default 0 1 2)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a measurement (default 128)")
    parser.add_argument("--seconds", type=float, default=6.0, help="a measurement ends after so many (default 6)")
    parser.add_argument("--settle", type=float, default=2.0, help="unmeasured seconds before it (default 2)")
    parser.add_argument("--repeats", type=int, default=8, help="measurements of each (default 8)")
    parser.add_argument("--table", action="store_true", help="print the table from --out; decode nothing")
    parser.add_argument("--waiting", action="store_true", help="compare how OpenMP's threads wait at a barrier")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.contenders = WAITING_CONTENDERS if args.waiting else CONTENDERS
    if args.table:
        print(table(Results.measured(args.out)))
        return
    if args.target is None:
        parser.error("the demo model is not installed; give --target")
    args.target = str(args.target)
    args.draft = args.draft or args.target
    if args.contender:
        work(args.contender, args)
        return
    conditions = {
        **model_conditions(args),
        **{name: getattr(args, name) for name in ("k", "tokens", "seconds", "settle")},
        "cores": physical_cores(),
        "contenders": list(args.contenders),
    }
    results = Results(args.out)
    with results.writing(conditions):
        measure(args, results)
    print(f"conditions: {results.conditions}")
    print(table(results))


if __name__ == "__main__":
    main()
