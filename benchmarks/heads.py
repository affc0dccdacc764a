"""Heads against llama.cpp's own drivers, on the same files and prompts.

    python benchmarks/heads.py [--mtp MODEL] [--target TARGET --eagle3 HEAD ...] [--tool llama-speculative-simple]

Greedy, `Exact()`; every prompt is decoded by both in turn. Without arguments the models of models/tiny are used, with
the prompts of tests/data, which they were not trained on. Speeds are total tokens over total seconds of decoding, the
prompt excluded, also what a head reads of it, and the last step counted whole, as the tool counts them; on an idle
machine. README.md says how to build the tool.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
from common import print_machine

from pyfly_cpp import MTP, FlyLlama
from pyfly_cpp.decoding.drafters import DRAFTERS, Drafter
from pyfly_cpp.machine import extra_buffers

ROOT = Path(__file__).parents[1]
TINY = ROOT / "models" / "tiny"
N_CTX = 1024
FILES = {"EAGLE-3": "eagle3", "DFlash": "dflash", "DSpark": "dspark"}
"""Heads in files of their own: the words of their drafters, options and types in llama.cpp."""


class Totals:
    """What one side did over all prompts."""

    def __init__(self) -> None:
        self.drafted = self.accepted = self.tokens = self.steps = 0
        self.seconds = 0.0

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    def __str__(self) -> str:
        per_step = f"{self.tokens / self.steps:.2f}" if self.steps else "-"
        drafted = f"{self.accepted / self.drafted:9.1%}" if self.drafted else f"{'-':>9}"
        return f"{self.drafted:8} {self.accepted:9} {drafted} {per_step:>10} {self.speed:10.1f}"


def decode(llm: FlyLlama, prompt: str, n_tokens: int, totals: Totals) -> None:
    """One generation from an empty context, up to the end of the text."""
    llm.reset()
    llm.reset_stats()
    tokens = llm.tokenize(prompt.encode("utf-8"), add_bos=False, special=True)
    vocab = llama_cpp.llama_model_get_vocab(llm.model)
    stream = llm.generate(tokens, temp=0.0)
    # Two steps are the prompt's: one gives its first token, before the other one the head reads it, which the tool
    # does before its clock starts.
    if any(llama_cpp.llama_vocab_is_eog(vocab, next(stream)) for _ in range(2)):
        return  # nothing was decoded
    before = llm.stats
    started = time.perf_counter()
    for token in itertools.islice(stream, max(n_tokens - 2, 0)):
        if llama_cpp.llama_vocab_is_eog(vocab, token):
            break
    totals.seconds += time.perf_counter() - started
    stats = llm.stats  # before the stream is closed, which takes back what was not given out
    stream.close()
    totals.drafted += stats.drafted - before.drafted
    totals.accepted += stats.matched - before.matched
    totals.steps += stats.rounds - before.rounds
    totals.tokens += stats.rounds - before.rounds + stats.matched - before.matched


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
    totals.steps += int(decoded[1]) - int(accepted[1])
    return True


def measure(name: str, target: str, drafter: Drafter, tool: Sequence[str] | None, args: argparse.Namespace) -> None:
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
    print(f"  {'':10} {'drafted':>8} {'accepted':>9} {'of them':>9} {'per step':>10} {'tokens/s':>10}")
    for side, totals in rows.items():
        if totals.tokens:
            print(f"  {side:10} {totals}")
    print(f"  pyfly / plain: {rows['pyfly'].speed / rows['plain'].speed:.2f}", end="")
    if rows["llama.cpp"].tokens:
        print(f"; pyfly / llama.cpp: {rows['pyfly'].speed / rows['llama.cpp'].speed:.2f}", end="")
    print(f"; {n_silent} runs of the tool did not report" if n_silent else "")
    plain.close()
    fly.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mtp", default=str(TINY / "tiny-qwen35-mtp-f16.gguf"), help="model with an MTP head")
    parser.add_argument("--target", default=str(TINY / "tiny-llama-target-f16.gguf"), help="target of the other heads")
    parser.add_argument("--eagle3", default=str(TINY / "tiny-llama-eagle3-f16.gguf"), help="EAGLE-3 head")
    parser.add_argument("--dflash", default=str(TINY / "tiny-llama-dflash-f16.gguf"), help="DFlash head")
    parser.add_argument("--dspark", default=str(TINY / "tiny-llama-dspark-f16.gguf"), help="DSpark head")
    parser.add_argument("--tool", help="llama.cpp's llama-speculative-simple")
    parser.add_argument("--prompts", type=Path, default=ROOT / "tests" / "data" / "half_documents.jsonl")
    parser.add_argument("--n", type=int, default=30, help="prompts (default 30)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens for each prompt (default 96)")
    parser.add_argument("--k", type=int, default=3, help="tokens drafted in a step (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="threads (default 1, best for the tiny models)")
    parser.add_argument("--gpu-layers", type=int, default=0, help="layers on the GPU, -1 for all (default 0)")
    args = parser.parse_args()
    print_machine()
    n_layers = "999" if args.gpu_layers < 0 else str(args.gpu_layers)
    common = [
        "--spec-draft-n-max", str(args.k), "--temp", "0", "-n", str(args.tokens), "-c", str(N_CTX),
        "-t", str(args.threads), "-tb", str(args.threads), "-ngl", n_layers,
        *([] if extra_buffers.usable() else ["--no-repack"]),
    ]  # fmt: skip
    mtp = ["-m", args.mtp, "--spec-type", "draft-mtp", *common]
    measure("MTP", args.mtp, MTP(draft_max=args.k), [args.tool, *mtp] if args.tool else None, args)
    for name, kind in FILES.items():
        path = getattr(args, kind)
        command = ["-m", args.target, "-md", path, "--spec-type", f"draft-{kind}", *common]
        drafter = DRAFTERS[kind].make(path, draft_max=args.k)
        measure(name, args.target, drafter, [args.tool, *command] if args.tool else None, args)


if __name__ == "__main__":
    main()
