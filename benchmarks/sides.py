"""Ways to run one model, each in a process of its own (`side.py`) that waits until it is asked.

Two llama.cpp runtimes in one process disturb each other: their threads wait for work on the same cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import side
from child import Child

from pyfly_cpp.machine.cache_types import CACHE_WORDS

NAMES = (*side.STOCK, *side.OURS, *(f"{name}+head" for name in side.OURS))


def names(text: str) -> list[str]:
    """Sides separated by commas, for argparse. One must be ours: it makes tokens of prompts."""
    found = text.split(",")
    for name in found:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(f"there is no side {name!r}; there are {', '.join(NAMES)}")
    if all(name in side.STOCK for name in found):
        raise argparse.ArgumentTypeError("one side must be ours: it makes tokens of the prompts")
    return found


class Answered(NamedTuple):
    """An answer."""

    tokens: list[int]
    first: float
    """Seconds to its first token."""
    total: float
    counters: dict[str, Any] | None = None
    """side.COUNTERS of one of side.OURS."""

    @property
    def speed(self) -> float:
        """Tokens a second behind those of the first step; 0 if there are none. Ours may have several in it, whose
        time is that of the prompt."""
        n = len(self.tokens) - (1 if self.counters is None else max(1, self.counters["committed_first"]))
        return n / (self.total - self.first) if n > 0 else 0.0


class Side(Child):
    """One of side.STOCK and side.OURS, as a process; of the latter also with a head, `NAME+head`."""

    def __init__(
        self, name: str, model: str, n_ctx: int, threads: int, cache: str = "f16", head: str | None = None
    ) -> None:
        """`head`: the file of the sides with a head."""
        self.name = name
        options: dict[str, Any] = {
            "model_path": model, "n_ctx": n_ctx, "n_threads": threads, "n_threads_batch": threads
        }  # fmt: skip
        if name.endswith("+head"):
            if head is None:
                raise SystemExit(f"the side {name} needs the file of a head; end_to_end.py takes it as --head.")
            options["head"] = head
        kind = CACHE_WORDS[cache]
        super().__init__(side.__file__, [name], {**options, "type_k": kind, "type_v": kind, "verbose": False})

    def prompt(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None = None, most: int | None = None
    ) -> list[int]:
        """The tokens of a chat, its last message cut to its last `most` tokens. Not of a stock side."""
        return list(self.ask({"messages": list(messages), "tools": tools, "most": most}))

    def answer(self, prompt: Sequence[int], n: int, temperature: float = 0.0, seed: int = 0) -> Answered:
        """Up to n tokens."""
        return Answered(*self.ask({"prompt": list(prompt), "n": n, "temperature": temperature, "seed": seed}))


def ratio(ours: Sequence[Answered], theirs: Sequence[Answered], what: str) -> list[float]:
    """Of `what` of the same questions, pair by pair."""
    return [getattr(a, what) / getattr(b, what) for a, b in zip(ours, theirs)]


def middle(answers: Sequence[Answered], what: str) -> float:
    """The median."""
    return median(getattr(one, what) for one in answers)
