"""A session of 20 related prompts: prompt lookup alone, with a memory of earlier answers, and llama.cpp's ngram-mod.

    python benchmarks/session.py run    --model MODEL --out FILE [--only lookup,memory] [--most-seconds 200]
    python benchmarks/session.py steps  --out FILE

`run` answers the prompts of session_prompts.py one after the other, each in every way in turn, governed and exact, as
`chat` decodes; `plain` drafts nothing. It times what follows the first token and appends to FILE; called again, it
continues with the prompts that are missing; FILE.memory keeps the memory meanwhile. `steps` goes through
the answers in FILE without a model and counts tokens per step where every proposal is verified in full, which ngram-mod
is made for; its proposals are computed here: a pool of 4 Mi entries, each the token that followed the last n-gram of n
tokens with its hash; the pool learns prompts and answers, is emptied after five drafts in a row of which less than a
quarter was right, and proposes nothing unless it knows at least n_min tokens in a row, n_max at most.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import llama_cpp
import numpy as np
from session_prompts import SESSION
from speed import print_machine

from pyfly_cpp import Exact, FlyLlama, PromptLookup
from pyfly_cpp._native import Batch, CallbackDrafter, Drafter, ScriptedTarget
from pyfly_cpp.decoding.drafters import Host
from pyfly_cpp.engine.prompting import render_chat

LOOKUP = {"min_ngram_size": 2}  # as on the command line
WAYS: dict[str, PromptLookup | None] = {
    "plain": None,
    "lookup": PromptLookup(memory=0, **LOOKUP),
    "memory": PromptLookup(**LOOKUP),
}


class NgramMod:
    """What ngram-mod of the llama.cpp in llama-cpp-python 0.3.36 proposes."""

    def __init__(self, n: int = 24, n_min: int = 48, n_max: int = 64) -> None:
        self.n, self.n_min, self.n_max = n, n_min, n_max
        self.size = 4 * 2**20
        self.pool: dict[int, int] = {}
        self.begin([])

    def begin(self, prompt: Sequence[int]) -> None:
        """A text begins."""
        self.learned, self.n_low = 0, 0
        self.proposed: tuple[int, list[int]] | None = None
        self.learn(prompt)
        if len(self.pool) > self.size / 4:
            self.pool.clear()

    def learn(self, text: Sequence[int]) -> None:
        """All n-grams of a text that are followed by a token."""
        for i in range(self.learned, len(text) - self.n):
            self.pool[self.place(text[i : i + self.n])] = int(text[i + self.n])
        self.learned = max(0, len(text) - self.n)

    def place(self, ngram: Sequence[int]) -> int:
        """Of an n-gram in the pool."""
        place = 0
        for token in ngram:
            place = (place * 6364136223846793005 + int(token)) % 2**64
        return place % self.size

    def judge(self, text: Sequence[int]) -> None:
        """Looks at what became of the last proposal."""
        if self.proposed is None:
            return
        n_before, draft = self.proposed
        n_right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(draft, text[n_before:])))
        self.proposed = None
        self.n_low = self.n_low + 1 if n_right < len(draft) / 4 else 0
        if self.n_low == 5:
            self.pool.clear()
            self.learned = self.n_low = 0

    def __call__(self, history: Any) -> list[int]:
        text = [int(token) for token in history]
        self.judge(text)
        if self.learned + 32 < len(text):
            self.learn(text)
        out: list[int] = []
        while len(text) >= self.n and len(out) < self.n_max:
            token = self.pool.get(self.place([*text, *out][-self.n :]))
            if token is None:
                break
            out.append(token)
        if len(out) < max(1, self.n_min):
            return []
        self.proposed = (len(text), out)
        return out


# ---- With the model --------------------------------------------------------------------------------------------------


def run(given: argparse.Namespace) -> None:
    """Answers what is missing in the file, for at most so many seconds."""
    print_machine()
    begin = time.monotonic()
    rows = read(given.out)
    names = given.only.split(",")
    ways = {**WAYS, "memory": PromptLookup(memory_file=f"{given.out}.memory", **LOOKUP)}
    loaded = {name: FlyLlama(given.model, drafter=ways[name], n_ctx=2048, verbose=False) for name in names}
    for index in range(len(rows), len(SESSION)):
        if time.monotonic() - begin > given.most_seconds:
            break
        kind, prompt = SESSION[index]
        tokens = list(render_chat(loaded[names[0]], [{"role": "user", "content": prompt}]).tokens)
        row: dict[str, Any] = {"kind": kind, "prompt": tokens, "ways": {}}
        for name in names[index % len(names) :] + names[: index % len(names)]:
            llm = loaded[name]
            ends = {llm.token_eos(), llama_cpp.llama_vocab_eot(llm._model.vocab)}
            llm.reset()
            llm.reset_stats()
            stream = llm.generate(tokens, temp=0.0)
            answer = [next(stream)]
            started = time.perf_counter()
            for token in itertools.islice(stream, given.tokens - 1):
                answer.append(token)
                if token in ends:
                    break
            seconds = time.perf_counter() - started
            stream.close()
            stats = llm.stats
            row["ways"][name] = {"seconds": seconds, "n": len(answer) - 1, "rounds": stats.rounds, "same": True}
            if "answer" in row:
                row["ways"][name]["same"] = answer == row["answer"]
            row.setdefault("answer", answer)
        rows.append(row)
        with Path(given.out).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(index, kind, {name: f"{way['n'] / way['seconds']:.1f} t/s" for name, way in row["ways"].items()})
    for llm in loaded.values():
        llm.close()
    if rows:
        report_speed(rows, names)


def read(path: str) -> list[dict[str, Any]]:
    """The rows of a file, none where it is not there."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()] if Path(path).exists() else []


def report_speed(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Tokens per step, tokens a second, and ratios to the first way by kind of prompt."""
    for kind in (*dict.fromkeys(row["kind"] for row in rows), None):
        chosen = [row for row in rows if kind in (None, row["kind"])]
        for name in names:
            ways = [row["ways"][name] for row in chosen]
            speeds = [way["n"] / way["seconds"] for way in ways]
            first = [row["ways"][names[0]]["n"] / row["ways"][names[0]]["seconds"] for row in chosen]
            ratio = geometric_mean([a / b for a, b in zip(speeds, first)])
            print(
                f"{kind or 'all'}, {name}: {sum(w['n'] for w in ways) / sum(w['rounds'] for w in ways):.2f} tokens per "
                f"step, {sum(w['n'] for w in ways) / sum(w['seconds'] for w in ways):.1f} tokens/s, {ratio:.2f}x; "
                f"other answers: {sum(not w['same'] for w in ways)}"
            )


# ---- Without the model -----------------------------------------------------------------------------------------------


def steps(given: argparse.Namespace) -> None:
    """Tokens per step of every way on the answers of the file."""
    rows = read(given.out)
    n_vocab = max(token for row in rows for token in (*row["prompt"], *row["answer"])) + 1
    mods = {"ngram-mod": NgramMod(), "ngram-mod, n = 16, n_min = 0": NgramMod(16, 0)}
    for k in (4, 10):
        for name in ("lookup", "memory"):
            lookup = WAYS[name]
            assert lookup is not None
            with_k = lookup.but(num_pred_tokens=k)
            count(f"{name}, k = {k}", lambda host, lookup=with_k: lookup.open(host), rows, n_vocab, k)
    for name, mod in mods.items():
        count(name, lambda host, mod=mod: CallbackDrafter(mod), rows, n_vocab, mod.n_max, mod.begin)


def count(
    name: str,
    open_drafter: Callable[[Host], Drafter],
    rows: Sequence[dict[str, Any]],
    n_vocab: int,
    k: int,
    on_begin: Callable[[Sequence[int]], None] = lambda prompt: None,
) -> None:
    """Decodes the answers again, with a target that knows them."""
    text: list[int] = []
    zeros = np.zeros(n_vocab, dtype=np.float32)

    def row(history: Any) -> Any:
        out = zeros.copy()
        out[text[min(len(history), len(text) - 1)]] = 1
        return out

    n_tokens: dict[str, int] = defaultdict(int)
    n_steps: dict[str, int] = defaultdict(int)
    n_drafted = n_right = 0
    with ScriptedTarget(row, n_vocab) as target, Batch(target) as batch:
        host = Host(lambda: target, k, False, {}, lambda: None)
        with open_drafter(host) as drafter:
            batch.configure([(drafter, k)])
            slot = batch.slots[0]
            for one in rows:
                text[:] = [*one["prompt"], *one["answer"]]
                on_begin(one["prompt"])
                slot.begin(one["prompt"], Exact().nodes(), Exact().window.config())
                done = len(one["prompt"])
                while done < len(text):
                    slot.want(len(text) - done)
                    batch.step()
                    new = len(slot.tokens())
                    done += new
                    n_steps[one["kind"]] += new > 0
                    n_tokens[one["kind"]] += new
                counters = slot.counters()
                slot.end()
            n_drafted, n_right = counters["drafted"], counters["matched"]
            batch.configure()
    kinds = ", ".join(f"{kind} {n_tokens[kind] / n_steps[kind]:.2f}" for kind in n_tokens)
    share = n_right / n_drafted if n_drafted else 0.0
    print(
        f"{name}: {sum(n_tokens.values()) / sum(n_steps.values()):.2f} tokens per step ({kinds}); {n_drafted} tokens "
        f"drafted, {share:.0%} right"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "steps"])
    parser.add_argument("--model")
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="plain,lookup,memory")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--most-seconds", type=float, default=1e9)
    given = parser.parse_args()
    (run if given.what == "run" else steps)(given)


if __name__ == "__main__":
    main()
