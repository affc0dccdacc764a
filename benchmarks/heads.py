"""MTP and EAGLE-3 heads against llama.cpp's own drivers, on the same files and prompts.

    python benchmarks/heads.py [--mtp MODEL] [--target TARGET --eagle3 HEAD] [--tool llama-speculative-simple]

Greedy, `Exact()`; every prompt is decoded by both in turn. Without arguments the models of models/tiny are used, with
the prompts of tests/data, which they were not trained on. Speeds are total tokens over total seconds of decoding, the
prompt excluded; on an idle machine. README.md says how to build the tool. --memory measures resident sizes instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
from speed import print_machine, tool_buffers

from pyfly_cpp import MTP, Eagle3, FlyLlama

ROOT = Path(__file__).parents[1]
TINY = ROOT / "models" / "tiny"
N_CTX = 1024


class Totals:
    """What one side did over all prompts."""

    def __init__(self) -> None:
        self.drafted = self.accepted = self.tokens = self.rounds = 0
        self.seconds = 0.0

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    def __str__(self) -> str:
        per_round = f"{self.tokens / self.rounds:.2f}" if self.rounds else "-"
        drafted = f"{self.accepted / self.drafted:9.1%}" if self.drafted else f"{'-':>9}"
        return f"{self.drafted:8} {self.accepted:9} {drafted} {per_round:>10} {self.speed:10.1f}"


def decode(llm: FlyLlama, prompt: str, n_tokens: int, totals: Totals) -> None:
    """One generation from an empty context, up to the end of the text."""
    llm.reset()
    llm.reset_stats()
    tokens = llm.tokenize(prompt.encode("utf-8"), add_bos=False, special=True)
    vocab = llama_cpp.llama_model_get_vocab(llm.model)
    started = time.perf_counter()
    stream = llm.generate(tokens, temp=0.0)
    for token in itertools.islice(stream, n_tokens):
        if llama_cpp.llama_vocab_is_eog(vocab, token):
            break
    seconds = time.perf_counter() - started
    stream.close()
    stats = llm.stats
    totals.drafted += stats.drafted
    totals.accepted += stats.matched
    totals.tokens += stats.committed
    totals.rounds += stats.rounds
    totals.seconds += seconds - stats.seconds_prefill


def run_tool(command: Sequence[str], prompt: str, totals: Totals) -> bool:
    """The same by llama.cpp's tool; False where it does not report."""
    done = subprocess.run([*command, "-p", prompt], capture_output=True, text=True, errors="replace")
    text = done.stderr + done.stdout
    decoded = re.search(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds", text)
    drafted, accepted = re.search(r"n_drafted = (\d+)", text), re.search(r"n_accept  = (\d+)", text)
    if not (decoded and drafted and accepted):
        return False
    totals.tokens += int(decoded[1])
    totals.seconds += float(decoded[2])
    totals.drafted += int(drafted[1])
    totals.accepted += int(accepted[1])
    totals.rounds += int(decoded[1]) - int(accepted[1])
    return True


def measure(
    name: str, target: str, drafter: MTP | Eagle3, tool: Sequence[str] | None, args: argparse.Namespace
) -> None:
    """One table row for each side."""
    settings = {"n_ctx": N_CTX, "n_threads": args.threads, "n_threads_batch": args.threads, "verbose": False}
    settings["n_gpu_layers"] = args.gpu_layers
    plain, fly = FlyLlama(target, **settings), FlyLlama(target, drafter=drafter, **settings)
    rows = {"plain": Totals(), "pyfly": Totals(), "llama.cpp": Totals()}
    prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text(encoding="utf-8").splitlines()][: args.n]
    n_silent = 0
    for prompt in prompts:
        decode(plain, prompt, args.tokens, rows["plain"])
        decode(fly, prompt, args.tokens, rows["pyfly"])
        if tool is not None:
            n_silent += not run_tool(tool, prompt, rows["llama.cpp"])
    print(f"{name}, {Path(target).name}, {len(prompts)} prompts x {args.tokens} tokens, K={args.k}:")
    print(f"  {'':10} {'drafted':>8} {'accepted':>9} {'of them':>9} {'per round':>10} {'tokens/s':>10}")
    for side, totals in rows.items():
        if totals.tokens:
            print(f"  {side:10} {totals}")
    print(f"  pyfly / plain: {rows['pyfly'].speed / rows['plain'].speed:.2f}", end="")
    if rows["llama.cpp"].tokens:
        print(f"; pyfly / llama.cpp: {rows['pyfly'].speed / rows['llama.cpp'].speed:.2f}", end="")
    print(f"; {n_silent} runs of the tool did not report" if n_silent else "")
    plain.close()
    fly.close()


CHILD = """
import sys
from pyfly_cpp import MTP, Eagle3, FlyLlama
target, kind, path = sys.argv[1:]
drafter = {"none": lambda: None, "mtp": MTP, "eagle3": lambda: Eagle3(path)}[kind]()
llm = FlyLlama(target, drafter=drafter, n_ctx=1024, n_batch=64, n_threads=1, n_threads_batch=1, verbose=False)
stream = llm.generate(list(range(100, 164)), temp=0.0)
for _ in range(64): next(stream)
stream.close()
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")))
"""


def measure_memory(args: argparse.Namespace) -> None:
    """Resident size after a generation, in processes of their own (Linux), beside the sizes of the files."""

    def resident(target: str, kind: str, path: str = "") -> float:
        command = [sys.executable, "-c", CHILD, target, kind, path]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]) / 1024

    print("resident size after 64 + 64 tokens, n_ctx 1024, n_batch 64:")
    for name, target, kind, path in (("MTP", args.mtp, "mtp", ""), ("EAGLE-3", args.target, "eagle3", args.eagle3)):
        size = Path(target).stat().st_size / 2**20
        plain, headed = resident(target, "none"), resident(target, kind, path)
        own = f", head's file {Path(path).stat().st_size / 2**20:.1f} MiB" if path else ""
        print(f"  {name}: model {size:.1f} MiB{own}; without {plain:.1f} MiB, with the head {headed - plain:+.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mtp", default=str(TINY / "tiny-qwen35-mtp-f16.gguf"), help="model with an MTP head")
    parser.add_argument("--target", default=str(TINY / "tiny-llama-target-f16.gguf"), help="target of the EAGLE-3 head")
    parser.add_argument("--eagle3", default=str(TINY / "tiny-llama-eagle3-f16.gguf"), help="EAGLE-3 head")
    parser.add_argument("--tool", help="llama.cpp's llama-speculative-simple")
    parser.add_argument("--prompts", type=Path, default=ROOT / "tests" / "data" / "half_documents.jsonl")
    parser.add_argument("--n", type=int, default=30, help="prompts (default 30)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens for each prompt (default 96)")
    parser.add_argument("--k", type=int, default=3, help="tokens drafted in a round (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="threads (default 1, best for the tiny models)")
    parser.add_argument("--gpu-layers", type=int, default=0, help="layers on the GPU, -1 for all (default 0)")
    parser.add_argument("--memory", action="store_true", help="measure memory, not speed")
    args = parser.parse_args()
    print_machine()
    if args.memory:
        measure_memory(args)
        return
    n_layers = "999" if args.gpu_layers < 0 else str(args.gpu_layers)
    common = [
        "--spec-draft-n-max", str(args.k), "--temp", "0", "-n", str(args.tokens), "-c", str(N_CTX),
        "-t", str(args.threads), "-tb", str(args.threads), "-ngl", n_layers, *tool_buffers(),
    ]  # fmt: skip
    mtp = ["-m", args.mtp, "--spec-type", "draft-mtp", *common]
    measure("MTP", args.mtp, MTP(draft_max=args.k), [args.tool, *mtp] if args.tool else None, args)
    eagle3 = ["-m", args.target, "-md", args.eagle3, "--spec-type", "draft-eagle3", *common]
    drafter = Eagle3(args.eagle3, draft_max=args.k)
    measure("EAGLE-3", args.target, drafter, [args.tool, *eagle3] if args.tool else None, args)


if __name__ == "__main__":
    main()
