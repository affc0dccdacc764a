"""How long a model loads and how much memory it takes: llama.cpp's kernels against ours.

    python benchmarks/loading.py MODEL [--turns 3] [--threads N] [--record FILE.json.gz]

Each load is a process of its own, in turns, with the file mapped and with the file read, which should be in the
system's cache: the first turn is not counted. Memory is what the process has resident beyond what it had before, in
sizes of the file: after loading, and at most.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any

from common import add_record, add_threads, markdown, model_path, positive, print_machine, record, spread

from pyfly_cpp import FlyLlama
from pyfly_cpp.machine import kernels

SIDES = [(choice, mapped) for mapped in (True, False) for choice in ("stock", "auto")]
NAMES = {"stock": "llama.cpp's kernels", "auto": "ours"}


def memory() -> dict[str, int]:
    """Resident bytes of this process, now and at most."""
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return {name: int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")}


def load(path: str, choice: str, is_mapped: bool, threads: int) -> dict[str, float]:
    """Seconds, and bytes after loading and at most."""
    kernels.verdict()
    before = memory()["VmRSS"]
    begin = time.perf_counter()
    llm = FlyLlama(path, kernels=choice, use_mmap=is_mapped, n_ctx=512, n_threads=threads, verbose=False)
    seconds = time.perf_counter() - begin
    after = memory()
    llm.close()
    return {"seconds": seconds, "after": after["VmRSS"] - before, "most": after["VmHWM"] - before}


def in_process(path: str, choice: str, is_mapped: bool, threads: int) -> dict[str, float]:
    words = [sys.executable, __file__, path, "--threads", str(threads), "--one", choice]
    words += [] if is_mapped else ["--read"]
    out = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(out.splitlines()[-1]))


def measure(path: str, turns: int, threads: int) -> dict[str, Any]:
    """The file's bytes, the sides, and what each load of each side took."""
    loads: list[list[dict[str, Any]]] = [[] for _ in SIDES]
    for turn in range(turns + 1):
        for own, side in zip(loads, SIDES):
            got = in_process(path, *side, threads)
            if turn > 0:
                own.append(got)
    return {"file_bytes": os.path.getsize(path), "sides": [[*side] for side in SIDES], "loads": loads}


def table(measured: dict[str, Any]) -> str:
    """Of what `measure` gave."""
    rows, loads = [], measured["loads"]
    for i, ((choice, is_mapped), own) in enumerate(zip(measured["sides"], loads)):
        ratios = [mine["seconds"] / stock["seconds"] for mine, stock in zip(own, loads[i - i % 2])]
        rows.append(
            [
                f"{NAMES[choice]}, {'mapped' if is_mapped else 'read'}",
                f"{median(one['seconds'] for one in own):.2f}",
                spread(ratios) if i % 2 else "",
                *(f"{median(one[name] for one in own) / measured['file_bytes']:.2f}" for name in ("after", "most")),
            ]
        )
    return markdown(["side", "s", "of llama.cpp's", "memory after loading", "at most"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", type=model_path)
    parser.add_argument("--turns", type=positive, default=3)
    add_threads(parser)
    parser.add_argument("--one", choices=NAMES, help="load once, and print what was measured as JSON")
    parser.add_argument("--read", action="store_true", help="with --one: do not map the file")
    add_record(parser)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(load(given.model, given.one, not given.read, given.threads)))
        return
    machine = print_machine()
    measured = measure(given.model, given.turns, given.threads)
    n_bytes = measured["file_bytes"]
    print(f"\n{os.path.basename(given.model)}, {n_bytes / 2**30:.2f} GiB; memory in sizes of the file\n")
    print(table(measured))
    record(given.record, machine, measured)


if __name__ == "__main__":
    main()
