"""One text alone in two versions of pyfly-cpp: which one decodes faster.

    python benchmarks/versions.py --model MODEL [--draft DRAFT] --prompts FILE OLD NEW

OLD and NEW are checkouts with the extension built in place. Each version has a process and a model of its own; they
decode the same prompts greedily and take turns of a few tokens, so that what else the machine does slows both alike.
Who begins changes. What is compared is the time of a turn; prompts are not timed. The interval is the 95 % bootstrap
interval of the median over all pairs of turns. A version against itself shows the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from resumable import read_questions
from scipy.stats import bootstrap
from speed import print_machine

WORKER = """
import json, sys, time
from pyfly_cpp import DraftModel, FlyLlama, PromptLookup
options = json.loads(sys.argv[1])
settings = {"n_ctx": options["ctx"], "n_threads": options["threads"], "n_threads_batch": options["threads"]}
if options["draft"]:
    drafter = PromptLookup() if options["draft"] == "lookup" else DraftModel(options["draft"])
    settings.update(drafter=drafter, draft_max=options["draft_max"], adaptive=False)
llm = FlyLlama(options["model"], verbose=False, **settings)
print("ready", flush=True)
stream = iter(())
for line in sys.stdin:
    order = json.loads(line)
    if "prompt" in order:
        stream = llm.generate(llm.tokenize(order["prompt"].encode("utf-8")), temp=0.0)
        print(next(stream), flush=True)
        continue
    started = time.perf_counter()
    tokens = [token for _, token in zip(range(order["n"]), stream)]
    print(json.dumps([time.perf_counter() - started, tokens]), flush=True)
"""


class Version:
    """One checkout, in a process of its own."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder.resolve()), "PYFLY_COSTS": "0"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        if self._read() != "ready":
            raise SystemExit(f"{folder} did not start.")

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, **order: Any) -> Any:
        """The worker's answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = self._read()
        if not answer:
            raise SystemExit("a version has ended; its error stands above.")
        return json.loads(answer)


def main() -> None:
    """Measures and prints one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", help="GGUF of a draft model, or lookup (default: no drafter)")
    parser.add_argument("--draft-max", type=int, default=4, help="draft length (default 4)")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with prompt, question or turns")
    parser.add_argument("--limit", type=int, default=8, help="prompts (default 8)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer (default 128)")
    parser.add_argument("--turn", type=int, default=8, help="tokens of a turn (default 8)")
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    print_machine()
    options = {name: getattr(args, name) for name in ("model", "draft", "draft_max", "ctx", "threads")}
    versions = [Version(folder, options) for folder in (args.old, args.new)]
    ratios, n_different = [], 0
    for number, question in enumerate(read_questions(args.prompts)[: args.limit]):
        prompt = question.turns[0]
        first = [version.ask(prompt=prompt) for version in versions]
        n_different += first[0] != first[1]
        for turn in range(args.tokens // args.turn):
            order = [0, 1] if (turn + number) % 2 else [1, 0]
            took: dict[int, tuple[float, list[int]]] = {which: versions[which].ask(n=args.turn) for which in order}
            if min(len(tokens) for _, tokens in took.values()) < args.turn:
                break  # the context is full
            n_different += took[0][1] != took[1][1]
            ratios.append(took[0][0] / took[1][0])
    inside = bootstrap((np.array(ratios),), np.median, n_resamples=2000, rng=np.random.default_rng(0))
    low, high = inside.confidence_interval
    print(
        f"{Path(args.model).name}, draft {args.draft or 'none'}: new / old {median(ratios):.4f} "
        f"({low:.4f}..{high:.4f}), {len(ratios)} pairs of {args.turn} tokens; {n_different} pairs with other tokens"
    )


if __name__ == "__main__":
    main()
