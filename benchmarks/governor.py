"""The governor against plain decoding, every fixed draft length, and llama.cpp's own drafting.

    python benchmarks/governor.py run --target MODEL --draft DRAFT --prompts spec_bench.jsonl --out RESULTS.jsonl
                                      [--tool llama-speculative-simple]
    python benchmarks/governor.py table RESULTS.jsonl [MORE.jsonl ...]
    python benchmarks/governor.py overhead --target MODEL

`run` decodes every prompt greedily with prompt lookup, the draft model and both, each governed, as FlyLlama(target,
drafter=...) is by itself, and with fixed draft lengths (none with `--fixed ''`). Settings that are compared decode in
lockstep with plain decoding: each has a model of its own, and they take turns of a round or a few, so that what else
the machine does slows all of them alike. A second plain decoder takes part; the ratio of the two is the noise. The
governor begins with the costs that were measured when its model was loaded (with PYFLY_COSTS=1, in this very run) and
learns as in a chat. Answers are short or long: each kind gets prompts, in the order of the file, until a number of
tokens was decoded. A run that is stopped goes on with the next prompt.

Speed is that of decoding: the tokens after the first round over the seconds after it, and those in which the draft
model evaluated the prompt: a draft has to earn them. llama.cpp's tool runs alone, with
its default draft lengths, and is compared with the plain decoders of the same prompt.

`overhead` compares pyfly's own work (drafting by prompt lookup, gate, governor, Python) in three ways to
decode the same prompts.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import llama_cpp
from resumable import Results, markdown, model_conditions
from speed import print_machine, run_tool

from pyfly_cpp import DraftModel, FlyLlama, PromptLookup
from pyfly_cpp.bench.prompts import BenchPrompt, read_prompts
from pyfly_cpp.evaluation.generation import Generator

N_CTX = 1536
TURN = 0.05
"""Seconds of a decoder's turn; a round is always finished."""
KINDS = {"code": "coding", "math": "math_reasoning", "translation": "translation", "summary": "summarization",
         "story": "writing"}  # fmt: skip
"""Kinds of text, and what Spec-Bench calls them."""
SETS = ("lookup", "draft", "both")
TOOL = {"lookup": "ngram-simple", "draft": "draft-simple"}


def candidates(path: str, longest: int, llm: FlyLlama) -> dict[str, list[BenchPrompt]]:
    """By kind: the prompts, of one turn and at most `longest` tokens, in the order of the file."""
    rows = read_prompts(path)
    return {
        kind: [
            BenchPrompt(row.id, kind, row.turns[:1])
            for row in rows
            if row.category == category and len(llm.tokenize(row.turns[0].encode("utf-8"))) <= longest
        ]
        for kind, category in KINDS.items()
    }


class Decoder:
    """One way to decode, on a model of its own."""

    def __init__(self, target: str, drafters: str, drafter: Any, adaptive: bool | None) -> None:
        self.drafters = drafters
        self.k: int | None = None
        self.llm = FlyLlama(target, n_ctx=N_CTX, verbose=False, drafter=drafter, adaptive=adaptive)

    def draft_with(self, drafters: str, drafter: Any, k: int) -> None:
        """Changes the drafters, which loads a draft model, and their draft length."""
        self.llm.drafter = drafter
        self.drafters, self.k = drafters, k

    @property
    def how(self) -> str:
        """plain, governor or fixed."""
        return "plain" if self.drafters == "none" else "governor" if self.llm.adaptive else "fixed"

    def start(self, tokens: Sequence[int], n_tokens: int) -> None:
        """Evaluates the prompt and the first round, which are not timed."""
        self.llm.draft_max = self.k
        self.llm.reset_stats()
        self.stream = self.llm.generate(list(tokens), temp=0.0)
        self.left = n_tokens
        self.decoded, self.seconds, self.slowest = 0, 0.0, 0.0
        next(self.stream)
        while self.llm.stats.committed > n_tokens - self.left + 1:
            next(self.stream)  # the first round's other tokens
            self.left -= 1
        self.left -= 1
        self.caught_up = self.llm.stats.seconds_catch_up

    def turn(self, seconds: float) -> bool:
        """Decodes for so long. Returns whether there is more to do."""
        started = now = time.perf_counter()
        while self.left > 0 and now - started < seconds:
            before = now
            token = next(self.stream)
            now = time.perf_counter()
            self.slowest = max(self.slowest, now - before)
            self.decoded += 1
            self.left -= 1
            if llama_cpp.llama_vocab_is_eog(self.llm._model.vocab, token):
                self.left = 0
        self.seconds += now - started
        return self.left > 0

    def record(self, **known: Any) -> dict[str, Any]:
        """What was measured."""
        self.stream.close()
        stats = self.llm.stats
        out = {
            **known, "drafters": self.drafters, "how": self.how, "k": self.k, "tokens": self.decoded,
            "seconds": self.seconds, "caught_up": self.caught_up, "slowest": self.slowest, "rounds": stats.rounds,
            "drafted": stats.drafted, "accepted": stats.matched,
        }  # fmt: skip
        if stats.governor is not None:
            out["rounds_at"] = list(stats.governor.rounds_at)
            out["target_ms"] = [round(1e3 * s, 1) for s in stats.governor.target_seconds]
        return out


def lockstep(decoders: Sequence[Decoder], tokens: Sequence[int], n_tokens: int) -> None:
    """All decoders decode the same prompt, in turns; who begins changes."""
    for decoder in decoders:
        decoder.start(tokens, n_tokens)
    running = list(decoders)
    while running:
        running = [decoder for decoder in running if decoder.turn(TURN)]
        running = [*running[1:], *running[:1]]


def run(args: argparse.Namespace) -> None:
    """Measures; one JSON line for each prompt."""
    print_machine()
    lookup, draft = PromptLookup(), DraftModel(args.draft, n_ctx=N_CTX)
    sets: dict[str, Any] = {"lookup": lookup, "draft": draft, "both": [lookup, draft]}
    lengths = [int(k) for k in args.fixed.split(",") if k]
    plain, plain_again, *fixed = (Decoder(args.target, "none", None, False) for _ in range(2 + len(lengths)))
    governed = {name: Decoder(args.target, name, drafter, None) for name, drafter in sets.items()}
    results = Results(Path(args.out))
    with results.writing({**model_conditions(args), "tokens": args.tokens, "longest": args.longest}):
        of_kind = candidates(args.prompts, args.longest, plain.llm)
        for prompt in (prompt for prompts in of_kind.values() for prompt in prompts):
            done = [row for row in results.rows if row["kind"] == prompt.category]
            n_tokens = sum(row["records"][0]["tokens"] for row in done)  # of plain decoding
            if n_tokens >= args.tokens_per_kind or any(row["prompt"] == prompt.id for row in done):
                continue
            rendered = Generator(plain.llm).render([{"role": "user", "content": prompt.turns[0]}])
            known = {"target": Path(args.target).name, "kind": prompt.category, "prompt": prompt.id}
            records = []
            for name, drafter in sets.items():
                for decoder, k in zip(fixed, lengths):
                    decoder.draft_with(name, drafter, k)
                group = [plain, governed[name], *fixed, *([plain_again] if name == "lookup" else [])]
                lockstep(group, rendered.tokens, args.tokens)
                records += [decoder.record(**known, group=name) for decoder in group]
            text = plain.llm.detokenize(list(rendered.tokens), special=True).decode("utf-8")
            for kind in TOOL.values() if args.tool else ():
                reported = run_tool(args.tool, args.target, args.draft, text, args.tokens, kind)
                if reported is not None:
                    records.append(
                        {**known, "drafters": "", "how": kind, "k": None, "tokens": reported[0], "seconds": reported[1]}
                    )
            results.add({"prompt": prompt.id, "kind": prompt.category, "records": records})
            print(f"{prompt.category} {prompt.id}: {summary(records)}", flush=True)


def summary(records: list[dict[str, Any]]) -> str:
    """How fast the ways to decode one prompt were, relative to plain decoding."""
    base = {r["group"]: speed_of([r]) for r in reversed(records) if r["how"] == "plain"}
    shown = [
        f"{r['drafters']} {r['how']}{r['k'] or ''} {speed_of([r]) / base[r['group']]:.2f}"
        for r in records
        if "group" in r and r is not records[0]
    ]
    own = speed_of([r for r in records if r["how"] == "plain"])
    shown += [f"{r['how']} {speed_of([r]) / own:.2f}" for r in records if "group" not in r]
    return f"plain {base['lookup']:.1f} t/s; " + "  ".join(shown)


def speed_of(records: list[dict[str, Any]]) -> float:
    """Total tokens over total seconds."""
    seconds = sum(r["seconds"] + r.get("caught_up", 0.0) for r in records)
    return sum(r["tokens"] for r in records) / seconds if seconds else math.nan


def relative(records: Sequence[dict[str, Any]], drafters: str, how: str, k: int | None) -> float:
    """Speed of a setting over that of the plain decoding beside which it ran; of a tool, over all plain decoding of the
    same file."""
    mine = [r for r in records if (r["drafters"], r["how"], r["k"]) == (drafters, how, k)]
    if how in TOOL.values():
        files = {r["file"] for r in mine}
        return speed_of(mine) / speed_of([r for r in records if r["how"] == "plain" and r["file"] in files])
    beside = {(r["file"], r["prompt"], r["group"]) for r in mine}
    plain = {(r["file"], r["prompt"], r["group"]): r for r in reversed(records) if r["how"] == "plain"}
    return speed_of(mine) / speed_of([r for key, r in plain.items() if key in beside])


def cell_of(record: dict[str, Any]) -> tuple[Any, ...]:
    """What is measured once: where two files have it, the later one counts."""
    return tuple(record[name] for name in ("target", "kind", "drafters", "how", "k"))


def table(args: argparse.Namespace) -> None:
    """Prints the matrix as Markdown."""
    records = [
        {**record, "file": i}
        for i, file in enumerate(args.results)
        for row in Results.measured(Path(file)).rows
        for record in row["records"]
    ]
    latest = {cell_of(r): r["file"] for r in records}
    records = [r for r in records if r["how"] == "plain" or r["file"] == latest[cell_of(r)]]
    targets = list(dict.fromkeys(r["target"] for r in records))
    ks = sorted({r["k"] for r in records if r["how"] == "fixed"})
    cells: dict[tuple[str, str, str, int | None], list[float]] = {}
    lines = []
    for target in targets:
        by_kind = [[r for r in records if (r["target"], r["kind"]) == (target, kind)] for kind in KINDS]
        theirs = {
            name: geometric_mean([relative(of_kind, "", name, None) for of_kind in by_kind])
            for name in TOOL.values()
            if any(r["how"] == name for r in by_kind[0])
        }
        for drafters in SETS:
            for how, lengths in (("governor", [None]), ("fixed", ks)):
                for k in lengths:
                    cells[target, drafters, how, k] = [relative(of_kind, drafters, how, k) for of_kind in by_kind]
            row = cells[target, drafters, "governor", None]
            best = max(ks, key=lambda k: geometric_mean(cells[target, drafters, "fixed", k]))
            fixed = cells[target, drafters, "fixed", best]
            tools = [f"{name} {v:.2f}" for name, v in theirs.items() if TOOL.get(drafters, name) == name]
            lines.append(
                [
                    target,
                    drafters,
                    *(f"{v:.2f}" for v in row),
                    f"**{geometric_mean(row):.3f}**",
                    f"K={best}: {geometric_mean(fixed):.3f} ({min(fixed):.2f}..{max(fixed):.2f})",
                    ", ".join(tools),
                ]
            )
    print(markdown(["target", "drafters", *KINDS, "geometric mean", "best fixed K", "llama.cpp"], lines))
    governed = [v for (_, _, how, _), row in cells.items() if how == "governor" for v in row]
    print(f"\n{len(governed)} cells: worst {min(governed):.3f}, geometric mean {geometric_mean(governed):.3f}")
    for drafters in SETS:
        mine = geometric_mean([v for t in targets for v in cells[t, drafters, "governor", None]])
        means = {k: geometric_mean([v for t in targets for v in cells[t, drafters, "fixed", k]]) for k in ks}
        print(f"{drafters}: governor {mine:.3f}; " + ", ".join(f"K={k} {v:.3f}" for k, v in means.items()))
    noise = []
    plain = [r for r in records if r["how"] == "plain" and r["group"] == "lookup"]
    for pair in dict.fromkeys((r["file"], r["target"], r["prompt"]) for r in plain):
        first, second = [r for r in plain if (r["file"], r["target"], r["prompt"]) == pair]
        noise.append(abs(math.log(speed_of([first]) / speed_of([second]))))
    print(
        f"noise: two plain decoders in lockstep differ by {math.expm1(median(noise)):.1%} (median), "
        f"{math.expm1(max(noise)):.1%} (most), {len(noise)} prompts"
    )


def overhead(args: argparse.Namespace) -> None:
    """Prints own work in microseconds a round and in percent of decoding."""
    print_machine()
    loose: dict[str, Any] = {"gate": "margin:0.3", "drafter": PromptLookup()}
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "lookup, no governor": {**loose, "adaptive": False},
        "lookup, governor": loose,
    }
    print("| decoding | rounds | own work, us a round | of decoding |\n| --- | --- | --- | --- |")
    for name, settings in ways.items():
        llm = FlyLlama(args.target, n_ctx=N_CTX, verbose=False, **settings)
        for prompt in read_prompts():
            tokens = Generator(llm).render([{"role": "user", "content": prompt.turns[0]}]).tokens
            llm.reset()
            stream = llm.generate(list(tokens), temp=0.0)
            for _ in range(args.tokens):
                next(stream)
            stream.close()
        stats = llm.stats
        own = stats.seconds_draft + stats.seconds_gate + stats.seconds_python
        print(f"| {name} | {stats.rounds} | {own / stats.rounds * 1e6:.0f} | {own / stats.seconds_decode:.2%} |")
        llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("run", help="measure one target")
    measure.add_argument("--target", required=True, help="GGUF of the target")
    measure.add_argument("--draft", required=True, help="GGUF of the draft")
    measure.add_argument("--prompts", required=True, help="Spec-Bench's prompts, JSONL")
    measure.add_argument("--out", required=True, help="results, JSONL; what is in it is not measured again")
    measure.add_argument("--fixed", default="2,3,4,6,8", help="draft lengths without the governor; '' for none")
    measure.add_argument("--tool", help="llama.cpp's llama-speculative-simple")
    measure.add_argument("--tokens-per-kind", type=int, default=180, help="how much of each kind (default 180)")
    measure.add_argument("--longest", type=int, default=600, help="longest prompt, tokens (default 600)")
    measure.add_argument("--tokens", type=int, default=96, help="most tokens for a prompt (default 96)")
    measure.set_defaults(run=run)
    show = commands.add_parser("table", help="print results as Markdown; of a cell in several files the last counts")
    show.add_argument("results", nargs="+")
    show.set_defaults(run=table)
    own = commands.add_parser("overhead", help="measure the governor's own work")
    own.add_argument("--target", required=True, help="GGUF of the target")
    own.add_argument("--tokens", type=int, default=64, help="tokens for each of twelve prompts (default 64)")
    own.set_defaults(run=overhead)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
