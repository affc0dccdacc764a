"""How long the texts that run wait for their next token while a long prompt joins them.

    python benchmarks/joining.py --target MODEL [--running 4] [--prompt 3000] [--chunk 128]

The longest and the median time between two tokens of a running text, before the prompt joins and while it is evaluated,
beside the time of one chunk: a step evaluates one, so that a token is late by one chunk at most.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path
from statistics import median

from speed import print_machine

from pyfly_cpp import FlyBatch
from pyfly_cpp.handles import Handle
from pyfly_cpp.threads import physical_cores


def main() -> None:
    """Measures and prints one line for each phase."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--running", type=int, default=4, help="texts that run (default 4)")
    parser.add_argument("--prompt", type=int, default=3000, help="tokens of the prompt that joins (default 3000)")
    parser.add_argument("--chunk", type=int, default=128, help="n_chunk of the FlyBatch (default 128)")
    parser.add_argument("--before", type=float, default=5.0, help="seconds before it joins (default 5)")
    parser.add_argument("--threads", type=int, default=physical_cores())
    args = parser.parse_args()
    print_machine()
    n_ctx = args.prompt + 512
    with FlyBatch(
        args.target, args.running + 1, n_ctx=n_ctx, n_chunk=args.chunk, verbose=False, n_threads=args.threads,
        n_threads_batch=args.threads,
    ) as batch:  # fmt: skip
        gaps: list[tuple[float, float]] = []  # (when it came, seconds since the text's token before)
        handles = [batch.submit(f"Story {i}: once upon", max_tokens=2048, stream=True) for i in range(args.running)]

        def read(handle: Handle) -> None:
            last = None
            with contextlib.suppress(CancelledError):
                for _ in handle:
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append((now, now - last))
                    last = now

        readers = [threading.Thread(target=read, args=(handle,), daemon=True) for handle in handles]
        for reader in readers:
            reader.start()
        time.sleep(args.before)
        steps: list[tuple[float, int]] = []  # when so many tokens of the prompt were evaluated
        prompt = [i % 1000 + 300 for i in range(args.prompt)]
        joined = time.perf_counter()
        batch.submit(
            prompt, max_tokens=1, on_prefill=lambda done, _: steps.append((time.perf_counter(), done))
        ).result()
        ended = time.perf_counter()
        for handle in handles:
            handle.cancel()
    before = [gap for when, gap in gaps if when < joined]
    during = [gap for when, gap in gaps if joined <= when - gap and when <= ended]
    times = [joined, *(when for when, _ in steps)]
    chunks = [b - a for a, b in zip(times, times[1:])]
    name = Path(args.target).name
    print(f"{name}: {args.running} texts run, {args.prompt} tokens join in chunks of {args.chunk}")
    print(f"before: {median(before):.3f} s between tokens, longest {max(before):.3f} s")
    print(f"during: {median(during):.3f} s between tokens, longest {max(during):.3f} s")
    print(f"steps with a chunk: {len(chunks)}, {median(chunks):.3f} s, longest {max(chunks):.3f} s")


if __name__ == "__main__":
    main()
