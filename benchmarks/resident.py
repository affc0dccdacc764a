"""Resident memory of one process over many requests, and over many contexts that are opened and closed.

    python benchmarks/resident.py TARGET DRAFT [--requests 1000] [--contexts 50] [--record FILE.json.gz]

Half of the requests are those of a FlyLlama, half of a FlyBatch with four slots; both draft with prompt lookup and the
draft model. They are of ten kinds in turn: greedy, sampled, with a JSON schema, with a grammar, with log-probabilities,
with a stop text, chats, states that are saved and restored, and two kinds that are cancelled. A context is a FlyLlama
or a FlyBatch with its draft model, which is loaded, asked once and closed. Memory is read at twenty places, when
glibc has given back what is free; the slope is a least-squares line through those of the last three quarters.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from common import add_record, markdown, print_machine, record

from pyfly_cpp import DraftModel, FlyBatch, FlyLlama, PromptLookup
from pyfly_cpp.machine.conditions import resident_mib

OPTIONS = {"n_threads": 1, "n_threads_batch": 1, "verbose": False, "adaptive": False}
N_PLACES = 20
_LIBC = ctypes.CDLL(None)
WORDS = ("Tom", "has", "three", "apples", "and", "buys", "four", "more", "pears", "than", "Ann", "who", "sold", "half")
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "name": {"type": "string", "maxLength": 8}}}


def drafters(draft: str) -> list[Any]:
    """Few remembered answers: their memory grows until it is full, as it is meant to."""
    return [PromptLookup(memory=500), DraftModel(draft, draft_max=4)]


def prompt_of(rng: random.Random) -> str:
    """A question whose beginning others may share."""
    return "You solve sums. " * rng.randrange(4) + " ".join(rng.choices(WORDS, k=rng.randrange(5, 60)))


def kinds(rng: random.Random) -> list[dict[str, Any]]:
    """Arguments of a request of each kind."""
    n = rng.randrange(4, 16)
    plain = {"prompt": prompt_of(rng), "max_tokens": n, "temperature": 0.0}
    return [
        plain,
        {**plain, "temperature": 0.9, "seed": rng.randrange(1000)},
        {**plain, "schema": True},
        {**plain, "grammar": True},
        {**plain, "logprobs": 3},
        {**plain, "stop": ["a", "."]},
        {**plain, "chat": True},
        {**plain, "state": True},
        {**plain, "cancel": True},
        {**plain, "cancel": True, "temperature": 0.8},
    ]


def asked(llm: FlyLlama, rng: random.Random) -> Iterator[None]:
    """Requests of a FlyLlama, without end."""
    from llama_cpp import LlamaGrammar

    grammar = LlamaGrammar.from_string('root ::= "a" [a-z]*', verbose=False)
    while True:
        for kind in kinds(rng):
            is_chat, has_state = kind.pop("chat", False), kind.pop("state", False)
            if kind.pop("grammar", False):
                kind["grammar"] = grammar
            if is_chat or kind.pop("schema", False):
                text = kind.pop("prompt")
                if not is_chat:
                    kind["response_format"] = {"type": "json_object", "schema": SCHEMA}
                llm.create_chat_completion([{"role": "user", "content": text}], **kind)
            elif kind.pop("cancel", False):
                pieces = llm.create_completion(**kind, stream=True)
                for _ in zip(range(2), pieces):
                    pass
                pieces.close()
            else:
                llm.create_completion(**kind)
            if has_state:
                llm.load_state(llm.save_state())
            yield


def submitted(batch: FlyBatch, rng: random.Random) -> Iterator[None]:
    """Requests of a FlyBatch, up to eight of which run or wait, without end."""
    from llama_cpp import LlamaGrammar

    handles: list[tuple[Any, bool]] = []
    while True:
        for kind in kinds(rng):
            is_chat, is_cancelled = kind.pop("chat", False), kind.pop("cancel", False)
            kind.pop("state", None)
            if kind.pop("grammar", False):
                kind["grammar"] = LlamaGrammar.from_string('root ::= "a" [a-z]*', verbose=False)
            prompt: Any = kind.pop("prompt")
            if kind.pop("schema", False):
                kind["response_format"] = {"type": "json_object", "schema": SCHEMA}
                is_chat = True
            if is_chat:
                prompt = [{"role": "user", "content": prompt}]
            handles.append((batch.submit(prompt, **kind), is_cancelled))
            if len(handles) == 8:
                handle, is_cancelled = handles.pop(rng.randrange(8))
                if is_cancelled:
                    handle.cancel()
                with contextlib.suppress(BaseException if is_cancelled else ()):
                    handle.result()
            yield


def opened(target: str, draft: str) -> Iterator[None]:
    """Contexts that are opened and closed, without end."""
    while True:
        with FlyLlama(target, n_ctx=512, drafter=drafters(draft), **OPTIONS) as llm:
            llm.create_completion("Tom has 3 apples.", max_tokens=4, temperature=0.0)
        yield
        with FlyBatch(target, 2, n_ctx=512, drafter=drafters(draft), **OPTIONS) as batch:
            batch.submit("Tom has 3 apples.", max_tokens=4, temperature=0.0).result()
        yield


def readings(steps: Iterator[None], n: int) -> dict[str, Any]:
    """What n steps leave behind.

    Returns:
        `mib`: [steps before, resident MiB] at each place; `kb_each`: the slope, KB per step.
    """
    places: list[list[float]] = []
    for i in range(n + 1):
        if i * N_PLACES % n < N_PLACES:
            gc.collect()
            if hasattr(_LIBC, "malloc_trim"):
                _LIBC.malloc_trim(0)
            places.append([i, resident_mib() or 0.0])
        if i < n:
            next(steps)
    later = np.array([place for place in places if place[0] >= n / 4])
    slope = float(np.polyfit(later[:, 0], later[:, 1], 1)[0])
    return {"n": n, "mib": places, "kb_each": round(1024 * slope, 2)}


def all_of(target: str, draft: str, n_requests: int, n_contexts: int) -> dict[str, Any]:
    """All three measurements."""
    found = {}
    with FlyLlama(target, n_ctx=512, drafter=drafters(draft), **OPTIONS) as llm:
        found["requests of a FlyLlama"] = readings(asked(llm, random.Random(0)), n_requests // 2)
    with FlyBatch(target, 4, n_ctx=512, drafter=drafters(draft), **OPTIONS) as batch:
        found["requests of a FlyBatch"] = readings(submitted(batch, random.Random(0)), n_requests // 2)
    found["contexts"] = readings(opened(target, draft), n_contexts)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--contexts", type=int, default=50)
    add_record(parser)
    given = parser.parse_args()
    machine = print_machine()
    measured = all_of(given.target, given.draft, given.requests, given.contexts)
    rows = []
    for what, found in measured.items():
        n, mib = found["n"], [m for _, m in found["mib"]]
        ends = [f"{mib[i]:.1f}" for i in (0, len(mib) // 4, -1)]
        rows.append([what, str(n), *ends, f"{found['kb_each']:.1f}"])
    print(markdown(["", "n", "MiB before", "after a quarter", "after all", "KB each, last three quarters"], rows))
    record(given.record, machine, measured)


if __name__ == "__main__":
    main()
