"""How many tokens a model reads for each turn of a session, and how many of them it has not read before.

    python benchmarks/turns.py attention.gguf hybrid.gguf [--record FILE.json.gz]

Counts, not times: they are the same on every machine. Greedy answers of 24 tokens, in six sessions:

    chat        a template that leaves out earlier thoughts
    agent       twelve calls of tools, whose thoughts stay until the user speaks again
    beginning   the system prompt has the date and a list of tools, which change at turns 4 and 7
    middle      a result of a tool is inserted into the history at turn 5, and another one taken out of it at turn 8
    alike       eight requests with a common beginning, four at a time
    served      ten turns of an agent through `serve`, three of them after a title was asked for, three after another
                conversation behind the same system prompt, one after a stream that was left; two slots and four

What a turn needs is what stands behind the longest beginning that it has in common with anything before in its session.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from common import add_record, markdown, print_machine, record
from over_http import free_port, running

from pyfly_cpp import FlyBatch, FlyLlama

OPTIONS = {"n_threads": 1, "n_threads_batch": 1, "verbose": False}
SYSTEM = "You solve sums, and explain each step. " * 60
BEGIN = "<|im_start|>assistant\n<think>\n"
N = 24


class Needs:
    """What a turn needs to read, of all that was read before."""

    def __init__(self) -> None:
        self._seen: list[list[int]] = []

    def of(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that nothing before begins with, without the last one, which gives the first row."""
        return min((len(prompt) - 1 - self._n_common(prompt, seen) for seen in self._seen), default=len(prompt) - 1)

    def add(self, tokens: Sequence[int]) -> None:
        """A prompt with its answer was read."""
        self._seen.append(list(tokens))

    @staticmethod
    def _n_common(prompt: Sequence[int], seen: Sequence[int]) -> int:
        n = min(len(prompt) - 1, len(seen))
        return next((i for i in range(n) if prompt[i] != seen[i]), n)


class Session:
    """A conversation, and [tokens of the prompt, tokens that were read, tokens that were needed] of each turn."""

    def __init__(self, llm: FlyLlama, system: str = SYSTEM) -> None:
        self.llm = llm
        self.messages = [("system", system)]
        self.turns: list[list[int]] = []
        self._needs = Needs()

    def say(self, role: str, content: str) -> None:
        """One more message."""
        self.messages.append((role, content))

    def answer(self) -> str:
        """The model's next message."""
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in self.messages)
        prompt = self.llm.tokenize((text + BEGIN).encode(), add_bos=False, special=True)
        self.llm.reset_stats()
        answer = self.llm.create_completion(prompt, max_tokens=N, temperature=0.0)
        self.turns.append([len(prompt), self.llm.stats.prefilled, self._needs.of(prompt)])
        self._needs.add(self.llm.eval_tokens)
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
    before = list(session.messages)
    for i in range(12):
        session.say("assistant", "<think>\n" + session.answer())
        session.say("tool", f"There are {i} apples in basket {i}, and nothing else.")
    session.messages = before
    session.say("assistant", "There are 66.")
    session.say("user", "And pears?")
    session.answer()
    return session.turns


def beginning(llm: FlyLlama) -> list[list[int]]:
    """Ten calls of tools; what the system prompt says of the day and of the tools changes."""
    session = Session(llm)
    for i in range(10):
        day, tools = ("Monday" if i < 3 else "Tuesday"), "add, count" if i < 6 else "add, count, weigh"
        session.messages[0] = ("system", f"{SYSTEM}\nTools: {tools}.\nToday is {day}.")
        session.say("user" if i == 0 else "tool", f"There are {i} apples in basket {i}, and nothing else. " * 3)
        session.answer()
        session.say("assistant", f"I count basket {i + 1}.")
    return session.turns


def middle(llm: FlyLlama) -> list[list[int]]:
    """Ten calls of tools; results come late, and go."""
    session = Session(llm)
    for i in range(10):
        if i == 4:
            session.messages.insert(4, ("tool", "The basket that was asked for first has 7 pears."))
        if i == 7:
            session.messages[8] = ("tool", "[removed]")
        session.say("user" if i == 0 else "tool", f"There are {i} apples in basket {i}, and nothing else. " * 3)
        session.answer()
        session.say("assistant", f"I count basket {i + 1}.")
    return session.turns


def alike(model: str) -> list[list[int]]:
    """All prompts together."""
    prefix = [(i * 37) % 1400 + 30 for i in range(800)]
    prompts = [prefix + [50 + i] * 10 for i in range(8)]
    with FlyBatch(model, n_parallel=4, n_ctx=1024, **OPTIONS) as batch:
        for handle in [batch.submit(prompt, max_tokens=4, temperature=0.0) for prompt in prompts]:
            handle.result()
        return [[sum(map(len, prompts)), batch.stats.prefilled, len(prefix) + sum(9 for _ in prompts)]]


class Client:
    """Asks a server, and counts what each request reads and needs."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=600)
        self._needs = Needs()

    def _tokens(self, text: str) -> list[int]:
        found = self._http.post("/tokenize", json={"content": text, "add_special": False, "parse_special": True})
        return list(found.raise_for_status().json()["tokens"])

    def _prompt(self, body: dict[str, Any]) -> str:
        return str(self._http.post("/apply-template", json=body).raise_for_status().json()["prompt"])

    def ask(self, body: dict[str, Any]) -> list[int]:
        """[Tokens of the prompt, tokens that were read, tokens that were needed]."""
        text = self._prompt(body)
        needed = self._needs.of(self._tokens(text))
        answer = self._http.post("/v1/chat/completions", json=body).raise_for_status().json()
        usage = answer["usage"]
        self._needs.add(self._tokens(text + (answer["choices"][0]["message"]["content"] or "")))
        return [
            usage["prompt_tokens"],
            max(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] - 1, 0),
            needed,
        ]

    def leave(self, body: dict[str, Any]) -> None:
        """A stream that ends with its first event."""
        with self._http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            next(response.iter_lines())
        self._needs.add(self._tokens(self._prompt(body)))


def served(model: str, n_slots: int) -> list[list[int]]:
    """Ten turns of an agent that calls tools, among others."""
    port = free_port()
    command = [
        sys.executable, "-m", "pyfly_cpp", "serve", "--model", model, "--parallel", str(n_slots), "--n-ctx", "4096",
        "--n-threads", "1", "--drafter", "none", "--port", str(port),
    ]  # fmt: skip
    tools = [{"type": "function", "function": {
        "name": "count", "description": "Counts a basket.",
        "parameters": {"type": "object", "properties": {"basket": {"type": "integer"}}, "required": ["basket"]},
    }}]  # fmt: skip
    greedy = {"max_tokens": N, "temperature": 0.0}
    system = {"role": "system", "content": SYSTEM}
    messages: list[dict[str, Any]] = [system, {"role": "user", "content": "How many apples are there?"}]
    rows = []
    with running(command, port) as url:
        client = Client(url)
        for i in range(10):
            body = {**greedy, "messages": messages, "tools": tools, "tool_choice": "auto"}
            if i == 5:
                client.leave(body)
            rows.append(client.ask(body))
            call = {"name": "count", "arguments": json.dumps({"basket": i})}
            calls = [{"id": f"c{i}", "type": "function", "function": call}]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            result = f"There are {i} apples in basket {i}, and nothing else."
            messages.append({"role": "tool", "tool_call_id": f"c{i}", "content": result})
            if i % 3 == 1:
                title = [{"role": "system", "content": "A title of four words."}, {"role": "user", "content": result}]
                rows.append(client.ask({**greedy, "messages": title}))
            elif i % 3 == 2:
                other = [system, {"role": "user", "content": f"How many pears are in basket {i}? " * 9}]
                rows.append(client.ask({**greedy, "messages": other, "tools": tools}))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    add_record(parser)
    given = parser.parse_args()
    machine = print_machine()
    counted: dict[str, dict[str, list[list[int]]]] = {}
    alone: list[Callable[[FlyLlama], list[list[int]]]] = [chat, agent, beginning, middle]
    for model in map(os.fspath, given.models):
        found = {}
        for session in alone:
            with FlyLlama(model, n_ctx=4096, **OPTIONS) as llm:
                found[session.__name__] = session(llm)
        found["alike"] = alike(model)
        for n_slots in (2, 4):
            found[f"served, {n_slots} slots"] = served(model, n_slots)
        counted[Path(model).stem] = found
    rows = [
        [
            name,
            session,
            *(str(sum(turn[i] for turn in turns)) for i in range(3)),
            " ".join(f"{n}/{m}" for _, n, m in turns),
        ]
        for name, found in counted.items()
        for session, turns in found.items()
    ]
    print(markdown(["model", "session", "prompts", "read", "needed", "read/needed, by turn"], rows))
    record(given.record, machine, counted)


if __name__ == "__main__":
    main()
