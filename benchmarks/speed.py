"""Speed and memory of pyfly-cpp against llama-cpp-python and llama.cpp, as ratios measured interleaved in one run.

    python benchmarks/speed.py rows [--target MODEL --draft DRAFT]
    python benchmarks/speed.py plain  --target MODEL.gguf
    python benchmarks/speed.py draft  --target TARGET.gguf --draft DRAFT.gguf [--tool llama-speculative-simple]
    python benchmarks/speed.py memory --target MODEL.gguf [--draft DRAFT.gguf]

Every table is preceded by the machine it was measured on. Run it on an idle machine: ggml's threads spin, and one busy
neighbour makes them many times slower. README.md beside this file says how to get the models and to build the tool.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from pyfly_cpp import DraftModel, FlyLlama, Fuzzy, Margin, Window, verify
from pyfly_cpp._native.library import ffi, lib
from pyfly_cpp.decoding.gates import Gate
from pyfly_cpp.decoding.gates.fuzzy import KINDS
from pyfly_cpp.evaluation.machine import describe_machine, disturbance
from pyfly_cpp.machine import extra_buffers
from pyfly_cpp.machine.threads import physical_cores

HERE = Path(__file__).parent
CHATML = "<|im_start|>user\nComplete this Python function.\n```python\n{}```<|im_end|>\n<|im_start|>assistant\n"


def code_prompts(n: int) -> list[str]:
    """The first n prompts of prompts_code.jsonl in ChatML."""
    rows = (HERE / "prompts_code.jsonl").read_text(encoding="utf-8").splitlines()
    return [CHATML.format(json.loads(row)["prompt"]) for row in rows[:n]]


def print_machine() -> None:
    """What the numbers below depend on."""
    machine = describe_machine()
    print(
        f"machine: {machine['cpu']}, {machine['physical_cores']} physical cores, {platform.system()}; load before the "
        f"run {machine['load_before']}\n"
        f"software: pyfly-cpp {machine['pyfly_cpp']} ({machine['simd']}), llama-cpp-python "
        f"{machine['llama_cpp_python']}, Python {machine['python']}"
    )
    if (why := disturbance(machine)) is not None:
        print(f"NOT IDLE: {why} The speeds below are not to be believed.")


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.3f} ({min(values):.3f}..{max(values):.3f})"


# ---- (c) rows --------------------------------------------------------------------------------------------------------


Rows = np.ndarray[Any, np.dtype[np.float32]]
N_ROWS = 8


def made_up_rows(n_vocab: int) -> tuple[Rows, Rows]:
    """N_ROWS of a target and of its draft, flatter than models' rows are."""
    rng = np.random.default_rng(0)
    target = (rng.normal(size=(N_ROWS, n_vocab)) * 3).astype(np.float32)
    return target, target + rng.normal(size=target.shape).astype(np.float32)


def rows_of_models(target: str, draft: str) -> tuple[Rows, Rows]:
    """N_ROWS of both models, at places of prompts_code.jsonl where they would write different tokens."""
    found: list[tuple[Rows, Rows]] = []
    models = [
        llama_cpp.Llama(path, n_ctx=1024, n_threads=physical_cores(), logits_all=True, verbose=False)
        for path in (target, draft)
    ]
    for prompt in code_prompts(20):
        rows = []
        for llm in models:
            llm.reset()
            llm.eval(llm.tokenize(prompt.encode("utf-8"), add_bos=False, special=True)[:1024])
            rows.append(np.array(llm.scores[: llm.n_tokens]))
        differ = np.flatnonzero(rows[0].argmax(axis=1) != rows[1].argmax(axis=1))[:2]
        found += [(rows[0][i], rows[1][i]) for i in differ]
        if len(found) >= N_ROWS:
            break
    return np.stack([p for p, _ in found[:N_ROWS]]), np.stack([q for _, q in found[:N_ROWS]])


def measure_rows(rows: Rows, draft_logits: Rows, n_rounds: int) -> None:
    """argmax, full statistics and divergences of one row, in units of a memcpy of it; rows rotate so that caches see
    what decoding sees (a row just written by the backend). A divergence is what it adds to verification."""
    n_vocab = rows.shape[1]
    pointers = [ffi.cast("float *", ffi.from_buffer(row)) for row in rows]
    target = np.empty(n_vocab, dtype=np.float32)
    stats, error = ffi.new("pyfly_row_stats *"), ffi.new("pyfly_error *")

    def copy(i: int) -> None:
        ctypes.memmove(target.ctypes.data, rows[i].ctypes.data, n_vocab * 4)

    def argmax(i: int) -> None:
        lib.pyfly_row_argmax(pointers[i], n_vocab)

    def full(i: int) -> None:
        lib.pyfly_row_statistics(pointers[i], n_vocab, 3, stats, error)

    logits = np.stack([*rows, rows[0]])
    draft = logits[:-1].argmin(axis=1)  # mismatches

    def judge(gate: Gate) -> float:
        started = time.perf_counter()
        for i in range(len(rows)):  # a round ends with the first that is rejected
            verify(logits[i : i + 2], draft[i : i + 1], gate, Window(0), draft_logits=draft_logits[i : i + 1])
        return (time.perf_counter() - started) / len(rows)

    seconds: dict[str, list[float]] = {"memcpy": [], "argmax": [], "statistics": []}
    for _ in range(n_rounds):
        for name, work in (("memcpy", copy), ("argmax", argmax), ("statistics", full)):
            started = time.perf_counter()
            for i in range(len(rows)):
                work(i)
            seconds[name].append((time.perf_counter() - started) / len(rows))
        nothing = judge(Margin(0.0))
        for top in (None, 50):
            for kind in KINDS:
                name = kind if top is None else f"{kind}, top {top}"
                seconds.setdefault(name, []).append(judge(Fuzzy(kind, 0.1, top)) - nothing)
    copies = seconds["memcpy"]
    print(f"one row of {n_vocab} float32 logits, {n_rounds} interleaved rounds of {len(rows)} rows:")
    for name, values in seconds.items():
        ratio = statistics.median(v / c for v, c in zip(values, copies))
        print(f"  {name:17} {statistics.median(values) * 1e6:7.1f} us   {ratio:5.2f} x memcpy")


# ---- (a) and (b) decoding --------------------------------------------------------------------------------------------


def decode_speed(stream: Iterator[int], n: int, is_end: Callable[[int], bool]) -> tuple[float, list[int]]:
    """Tokens per second of decoding, prompt excluded: from when the first token (or the first round's) is there until
    n tokens are, or the text ends. Returns it with the tokens."""
    tokens, arrivals = [], []
    for token in stream:
        arrivals.append(time.perf_counter())
        tokens.append(token)
        if len(tokens) >= n or is_end(token):
            break
    # The tokens of one round arrive together; those of the first came with the prompt.
    n_first = sum(1 for t in arrivals if t - arrivals[0] < 1e-3)
    return (len(tokens) - n_first) / (arrivals[-1] - arrivals[0]), tokens


def generate(llm: Any, prompt: str, n: int) -> tuple[float, list[int]]:
    """One greedy generation from an empty context."""
    llm.reset()
    tokens = llm.tokenize(prompt.encode("utf-8"), add_bos=False, special=True)
    stream = llm.generate(tokens, temp=0.0)
    try:
        return decode_speed(stream, n, lambda token: llama_cpp.llama_vocab_is_eog(llm._model.vocab, token))
    finally:
        stream.close()


def plain_llama(path: str, n_ctx: int) -> Any:
    """llama_cpp.Llama with the threads that FlyLlama takes."""
    n = physical_cores()
    return llama_cpp.Llama(path, n_ctx=n_ctx, n_threads=n, n_threads_batch=n, verbose=False)


def measure_plain(target: str, n_prompts: int, n_tokens: int, n_repeats: int) -> None:
    """(a) FlyLlama without a drafter against llama_cpp.Llama."""
    base, fly = plain_llama(target, 1024), FlyLlama(target, n_ctx=1024, verbose=False)
    ratios: list[float] = []
    tokens, seconds = {"base": 0, "fly": 0}, {"base": 0.0, "fly": 0.0}
    for repeat in range(n_repeats):
        for i, prompt in enumerate(code_prompts(n_prompts)):
            speed = {}
            pair = [("base", base), ("fly", fly)]
            for name, llm in pair if (repeat + i) % 2 else reversed(pair):
                speed[name], out = generate(llm, prompt, n_tokens)
                tokens[name] += len(out)
                seconds[name] += len(out) / speed[name]
            ratios.append(speed["fly"] / speed["base"])
    total = (tokens["fly"] / seconds["fly"]) / (tokens["base"] / seconds["base"])
    stats = fly.stats
    own = stats.seconds_gate + stats.seconds_python
    print(f"(a) no drafter, {Path(target).name}, {len(ratios)} pairs of {n_tokens} tokens, greedy:")
    print(
        f"  llama_cpp.Llama {tokens['base'] / seconds['base']:.2f} t/s, "
        f"FlyLlama {tokens['fly'] / seconds['fly']:.2f} t/s"
    )
    print(f"  FlyLlama / Llama: {total:.3f} total; per pair median {spread(ratios)}")
    print(
        f"(d) pyfly's own work: {own / stats.seconds_decode:.3%} of decoding "
        f"({own / stats.rounds * 1e6:.0f} us a round)"
    )


class Costs:
    """Seconds of a batch of n tokens with n rows, by the base class's own calls, at a given depth of the context."""

    def __init__(self, path: str, n_past: int) -> None:
        self.llm = plain_llama(path, 1024)
        self.llm.eval(list(range(100, 100 + n_past)))

    def batch(self, n: int, all_rows: bool, repeats: int = 3) -> float:
        """Fastest of a few."""
        llm, out = self.llm, []
        for _ in range(repeats):
            llm._batch.set_batch(list(range(300, 300 + n)), llm.n_tokens, all_rows)
            started = time.perf_counter()
            llm._ctx.decode(llm._batch)
            llama_cpp.llama_synchronize(llm.ctx)
            out.append(time.perf_counter() - started)
            llm._ctx.kv_cache_seq_rm(-1, llm.n_tokens, -1)
        return statistics.median(out)


def tool_buffers() -> list[str]:
    """Arguments with which llama.cpp's tool keeps the weights as the models here do."""
    return [] if extra_buffers.usable() else ["--no-repack"]


def run_tool(
    tool: str,
    target: str,
    draft: str,
    prompt: str,
    n_tokens: int,
    kind: str = "draft-simple",
    settings: tuple[str, ...] = (),
) -> tuple[int, float] | None:
    """Tokens and seconds of decoding that llama.cpp's llama-speculative-simple reports; None if it reports none."""
    n = str(physical_cores())
    command = [
        tool, "-m", target, "-md", draft, "--spec-type", kind, *settings, "--temp", "0",
        "-n", str(n_tokens), "-t", n, "-tb", n, "-c", "1536", "-p", prompt,
        *tool_buffers(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    match = re.search(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds", done.stderr + done.stdout)
    return (int(match[1]), float(match[2])) if match else None


def measure_draft(
    target: str, draft: str, tool: str | None, k: int, p_min: float, n_prompts: int, n_tokens: int
) -> None:
    """(b) F16 target and cheap draft, Exact(): against plain, llama.cpp's draft-simple and what costs allow."""
    base = plain_llama(target, 1024)
    fly = FlyLlama(target, n_ctx=1024, verbose=False, drafter=DraftModel(draft, draft_max=k, p_min=p_min, n_ctx=1024))
    print(
        f"(b) {Path(target).name} + {Path(draft).name}, Exact(), K={k}, p_min={p_min}, greedy, "
        f"{n_prompts} code prompts x {n_tokens} tokens"
    )
    print("  prompt    plain   pyfly    tool   x plain  x tool  accepted  per round  of possible")
    totals: dict[str, list[float]] = {
        "plain": [],
        "pyfly": [],
        "tool": [],
        "possible": [],
        "gate": [],
        "decode": [],
        "n": [],
    }
    for i, prompt in enumerate(code_prompts(n_prompts)):
        fly.reset_stats()
        plain, expected = generate(base, prompt, n_tokens)
        speed, tokens = generate(fly, prompt, n_tokens)
        stats = fly.stats
        k_settings = ("--spec-draft-n-max", str(k), "--spec-draft-p-min", str(p_min))
        reported = run_tool(tool, target, draft, prompt, n_tokens, settings=k_settings) if tool else None
        other = reported[0] / reported[1] if reported else None
        # What the rounds should cost: each is a target batch of K+1 rows and K draft steps, the first of which takes
        # two tokens where the round before was accepted whole. Costs are measured right here, around this very prompt.
        # With p_min the batches are of many sizes, and the sum is not made up.
        draft_costs, target_costs = Costs(draft, 200), Costs(target, 200)
        one, two = draft_costs.batch(1, False), draft_costs.batch(2, False)
        rows = target_costs.batch(k + 1, True)
        draft_costs.llm.close(), target_costs.llm.close()
        n_full = stats.accepted_at_depth[k - 1] if len(stats.accepted_at_depth) >= k else 0
        n_rounds = stats.rounds - 1  # the first one holds the prompt
        ideal = n_rounds * rows + (stats.drafted - k) * one + n_full * (two - one)
        spent = stats.seconds_verify + stats.seconds_gate + stats.seconds_python
        spent += stats.seconds_draft * (stats.drafted - k) / stats.drafted
        ideal = ideal if p_min == 0 else float("nan")
        row = [plain, speed, other or float("nan"), speed / plain, speed / other if other else float("nan")]
        print(
            f"  {i:6} {row[0]:8.2f}{row[1]:8.2f}{row[2]:8.2f}{row[3]:10.2f}{row[4]:8.2f}"
            f"{stats.acceptance:10.1%}{stats.mean_accepted:11.2f}{ideal / spent:13.1%}"
            + ("" if tokens[: len(expected)] == expected[: len(tokens)] else "   (text differs from plain)"),
            flush=True,
        )
        for name, value in (("plain", 1 / plain), ("pyfly", 1 / speed), ("tool", 1 / other if other else float("nan")),
                            ("possible", ideal / spent), ("gate", stats.seconds_gate + stats.seconds_python),
                            ("decode", stats.seconds_decode), ("n", n_rounds + 1)):  # fmt: skip
            totals[name].append(value)
    sums = {name: sum(values) for name, values in totals.items()}
    with_tool = [(p, t) for p, t in zip(totals["pyfly"], totals["tool"]) if t == t]
    print(
        f"  total: {sums['plain'] / sums['pyfly']:.2f} x plain (seconds a token, mean of the prompts), per prompt "
        f"{spread([a / b for a, b in zip(totals['plain'], totals['pyfly'])])}"
    )
    if with_tool:
        print(
            f"         {sum(t for _, t in with_tool) / sum(p for p, _ in with_tool):.2f} x llama.cpp draft-simple, "
            f"per prompt "
            f"{spread([t / p for p, t in with_tool])}, {len(with_tool)} of {n_prompts} runs of the tool reported"
        )
    print(f"         {statistics.median(totals['possible']):.1%} of what the measured costs allow (median)")
    print(
        f"(d) pyfly's own work: {sums['gate'] / sums['decode']:.3%} of decoding, "
        f"{sums['gate'] / sums['n'] * 1e6:.0f} us a round"
    )


# ---- (e) memory ------------------------------------------------------------------------------------------------------

CHILD = """
import sys, llama_cpp
from pyfly_cpp import DraftModel, FlyLlama, extra_buffers
extra_buffers.guard_llama_cpp()
kind, target, draft, n_threads = sys.argv[1:]
settings = dict(n_ctx=1024, n_threads=int(n_threads), n_threads_batch=int(n_threads), verbose=False)
if kind == "llama": llm = llama_cpp.Llama(target, **settings)
elif kind == "fly": llm = FlyLlama(target, **settings)
else: llm = FlyLlama(target, drafter=DraftModel(draft), **settings)
stream = llm.generate(list(range(100, 164)), temp=0.0)
for _ in range(64): next(stream)
stream.close()
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")))
"""


def measure_memory(target: str, draft: str | None) -> None:
    """(e) Resident size after a generation, in processes of their own (Linux)."""

    def resident(kind: str, model: str) -> float:
        command = [sys.executable, "-c", CHILD, kind, model, draft or "", str(physical_cores())]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return int(out.split()[-1]) / 1024

    base, fly = resident("llama", target), resident("fly", target)
    print(f"(e) resident size after 64 + 64 tokens, n_ctx 1024, {Path(target).name}:")
    print(f"  llama_cpp.Llama {base:.0f} MiB, FlyLlama {fly:.0f} MiB: {fly / base:.3f} x")
    if draft:
        alone, both = resident("llama", draft), resident("draft", target)
        print(
            f"  with {Path(draft).name}: {both:.0f} MiB, {both / (base + alone):.3f} x the sum of two llama_cpp.Llama "
            f"({base:.0f} + {alone:.0f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rows", "plain", "draft", "memory"])
    parser.add_argument("--target", help="GGUF of the target")
    parser.add_argument("--draft", help="GGUF of the draft")
    parser.add_argument("--tool", help="llama.cpp's llama-speculative-simple, built from the sdist of llama-cpp-python")
    parser.add_argument("--k", type=int, default=8, help="tokens drafted in a round (default 8)")
    parser.add_argument("--p-min", type=float, default=0.0, help="the draft stops under this probability (default 0)")
    parser.add_argument("--prompts", type=int, default=6, help="code prompts, at most 20 (default 6)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens for each prompt (default 128)")
    parser.add_argument("--repeats", type=int, default=1, help="repeats of `plain` (default 1)")
    parser.add_argument("--vocab", type=int, default=151936, help="row length of `rows` (default 151936)")
    args = parser.parse_args()
    if args.what != "rows" and not args.target:
        parser.error("--target is needed")
    if args.what == "draft" and not args.draft:
        parser.error("--draft is needed")
    print_machine()
    extra_buffers.guard_llama_cpp()
    if args.what == "rows":
        rows, draft_rows = (
            rows_of_models(args.target, args.draft) if args.target and args.draft else made_up_rows(args.vocab)
        )
        measure_rows(rows, draft_rows, 300)
    elif args.what == "plain":
        measure_plain(args.target, args.prompts, args.tokens, args.repeats)
    elif args.what == "draft":
        measure_draft(args.target, args.draft, args.tool, args.k, args.p_min, args.prompts, args.tokens)
    else:
        measure_memory(args.target, args.draft)


if __name__ == "__main__":
    main()
