"""How many tokens a model reads for each turn of a session, and for requests that begin alike.

    python benchmarks/turns.py attention.gguf hybrid.gguf [-o record.json]

Counts, not times: they are the same on every machine. Three sessions with greedy answers of 24 tokens: a chat whose
template leaves out earlier thoughts; an agent that calls twelve tools, whose thoughts stay until the user speaks again;
and eight requests with a common beginning, four at a time.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from common import markdown

from pyfly_cpp import FlyBatch, FlyLlama

OPTIONS = {"n_threads": 1, "n_threads_batch": 1, "verbose": False}
SYSTEM = "You solve sums, and explain each step. " * 60
BEGIN = "<|im_start|>assistant\n<think>\n"
N = 24


class Session:
    """A conversation, and [tokens of the prompt, tokens that were read] of each turn."""

    def __init__(self, llm: FlyLlama) -> None:
        self.llm = llm
        self.text = ""
        self.turns: list[list[int]] = []
        self.say("system", SYSTEM)

    def say(self, role: str, content: str) -> None:
        """One more message."""
        self.text += f"<|im_start|>{role}\n{content}<|im_end|>\n"

    def answer(self) -> str:
        """The model's next message."""
        prompt = self.llm.tokenize((self.text + BEGIN).encode(), add_bos=False, special=True)
        self.llm.reset_stats()
        answer = self.llm.create_completion(prompt, max_tokens=N, temperature=0.0)
        self.turns.append([len(prompt), self.llm.stats.prefilled])
        return str(answer["choices"][0]["text"])


def chat(llm: FlyLlama) -> list[list[int]]:
    """Eight turns; what is said of an answer is not what the model wrote, as without its thoughts."""
    session = Session(llm)
    for i in range(8):
        session.say("user", f"Tom has {i + 3} apples and buys {2 * i + 1} more. How many apples has Tom?")
        session.answer()
        session.say("assistant", "He has some.")
    return session.turns


def agent(llm: FlyLlama) -> list[list[int]]:
    """Twelve calls of tools behind one question, then another question."""
    session = Session(llm)
    session.say("user", "How many apples are there?")
    before = session.text
    for i in range(12):
        session.text += BEGIN + session.answer() + "<|im_end|>\n"
        session.say("tool", f"There are {i} apples in basket {i}, and nothing else.")
    session.text = before
    session.say("assistant", "There are 66.")
    session.say("user", "And pears?")
    session.answer()
    return session.turns


def alike(model: str) -> list[int]:
    """[Tokens of all prompts, tokens that were read]."""
    prefix = [(i * 37) % 1400 + 30 for i in range(800)]
    prompts = [prefix + [50 + i] * 10 for i in range(8)]
    with FlyBatch(model, n_parallel=4, n_ctx=1024, **OPTIONS) as batch:
        for handle in [batch.submit(prompt, max_tokens=4, temperature=0.0) for prompt in prompts]:
            handle.result()
        return [sum(map(len, prompts)), batch.stats.prefilled]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    record = {}
    for model in map(os.fspath, given.models):
        found: dict[str, object] = {}
        for name, session in (("chat", chat), ("agent", agent)):
            with FlyLlama(model, n_ctx=4096, **OPTIONS) as llm:
                found[name] = session(llm)
        found["alike"] = alike(model)
        record[Path(model).stem] = found
    rows = [
        [name, session, " ".join(f"{read}/{n}" for n, read in ([pairs] if session == "alike" else pairs))]
        for name, found in record.items()
        for session, pairs in found.items()
    ]
    print(markdown(["model", "session", "read/prompt, by turn"], rows))
    if given.output is not None:
        given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
