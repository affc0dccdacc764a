"""Ways to run one model, each in a process of its own (`side.py`) that waits until it is asked.

Two llama.cpp runtimes in one process disturb each other: their threads wait for work on the same cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import side
from common import llama_options
from typing_extensions import Self

from pyfly_cpp.machine.cache_types import CACHE_WORDS


class Answered(NamedTuple):
    """An answer."""

    tokens: list[int]
    first: float
    """Seconds to its first token."""
    total: float

    @property
    def speed(self) -> float:
        """Tokens a second behind the first."""
        return (len(self.tokens) - 1) / (self.total - self.first) if len(self.tokens) > 1 else 0.0


class Side:
    """One of side.STOCK and side.OURS, as a process."""

    def __init__(self, name: str, given: argparse.Namespace, n_ctx: int, cache: str = "f16") -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, side.__file__, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        kind = CACHE_WORDS[cache]
        self._ask({"model_path": given.model, "n_ctx": n_ctx, "type_k": kind, "type_v": kind, **llama_options(given)})

    def prompt(self, question: str, most: int | None = None) -> list[int]:
        """A question as the tokens of a chat, the question cut to its last `most` tokens. Not of a stock side."""
        return list(self._ask({"question": question, "most": most}))

    def answer(self, prompt: Sequence[int], n: int, temperature: float = 0.0, seed: int = 0) -> Answered:
        """Up to n tokens."""
        return Answered(*self._ask({"prompt": list(prompt), "n": n, "temperature": temperature, "seed": seed}))

    def close(self) -> None:
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, what: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.name!r} has ended; its error stands above.")
        return json.loads(line)


def ratio(ours: Sequence[Answered], theirs: Sequence[Answered], what: str) -> list[float]:
    """Of `what` of the same questions, pair by pair."""
    return [getattr(a, what) / getattr(b, what) for a, b in zip(ours, theirs)]


def middle(answers: Sequence[Answered], what: str) -> float:
    """The median."""
    return median(getattr(one, what) for one in answers)
