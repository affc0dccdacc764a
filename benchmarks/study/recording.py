"""Decodes what the plan says and is not recorded yet.

As many items as texts fit at once, each in a place of its own where its ways follow one another: so the batch is always
full, a prompt is evaluated once for all ways, and whenever it is stopped all ways have the same items but for the last.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.evaluation.files import DataError, Row
from pyfly_cpp.evaluation.generation import Generated, Prompt
from pyfly_cpp.evaluation.parallel import Order, ParallelGenerator
from pyfly_cpp.evaluation.repetition import find_loop
from pyfly_cpp.evaluation.runner import judge
from pyfly_cpp.evaluation.task import Item, Task, Verdict
from study.plan import PARTS, Way
from study.records import Records

Job = tuple[str, Item, tuple[Way, ...]]
"""Part, item, and the ways to decode it."""


class Recorder:
    """Records answers of a model into a folder."""

    def __init__(
        self,
        generator: ParallelGenerator,
        records: Records,
        base: Decoding,
        tasks: dict[str, Task] | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """
        Args:
            base: Drafts with what all ways draft with, and at least as much.
            tasks: By part; None: those of the plan.
            max_tokens: Shortens answers; None: as long as their tasks allow.
        """
        self._generator = generator
        self._records = records
        self._base = base
        self._tasks = tasks or {name: part.task for name, part in PARTS.items()}
        self._max_tokens = max_tokens
        self.left_out: Counter[str] = Counter()
        """Items whose prompts are too long, by part."""
        generator.llm.trace = True

    def run(self, jobs: Sequence[Job], is_over: Callable[[], bool] = lambda: False) -> int:
        """Records what is missing of the jobs, in their order. When `is_over` says so after an answer, no further items
        are begun, and those that were are finished, because what decodes quickly is not typical: loops are easy to
        draft. The records must be open for writing. Returns the number of new answers."""
        n = 0
        ends = False
        orders = itertools.takewhile(lambda _: not ends, self._orders(jobs))
        made = self._generator.generate_all(orders, self._base, n_at_once=self._generator.n_parallel)
        with contextlib.closing(made):
            for order, generated in made:
                part, item, way = order.key
                verdict = judge(self._tasks[part], item, generated)
                row = row_of(part, item, way, order.prompt, generated, verdict)
                tokens = {*row["answer"], *(token for entry in row["loose"] for token in entry[1:3])}
                llm = self._generator.llm
                self._records.add(row, {token: llm.detokenize([token], special=True) for token in tokens})
                n += 1
                ends = ends or is_over()
        return n

    def _orders(self, jobs: Sequence[Job]) -> Iterator[Order]:
        for part, item, ways in jobs:
            missing = [way for way in ways if not self._records.has(part, item.id, str(way))]
            if not missing:
                continue
            task = self._tasks[part]
            prompt = self._generator.render(task.messages(item), task.prefix(item), task.stop(item))
            if self._records.prompts.get((part, item.id), checksum(prompt)) != checksum(prompt):
                raise DataError(
                    f"the prompt of {item.id} is not the one that was recorded (its data, its task or the chat format "
                    "has changed); name another folder for the records."
                )
            n_most = min(task.max_tokens, self._max_tokens or task.max_tokens)
            if len(prompt.tokens) + n_most > self._generator.n_ctx:
                self.left_out[part] += 1
                continue
            order: Order | None = None
            for way in reversed(missing):
                order = Order((part, item, way), prompt, n_most, setting=way.setting, then=order)
            assert order is not None
            yield order


def row_of(part: str, item: Item, way: Way, prompt: Prompt, generated: Generated, verdict: Verdict) -> Row:
    """A line of the records. `rounds` and `drafted` are counts; `answer` is the tokens without the one that ends the
    text; `loose` as of records.LOOSE; `prompt` as of `checksum`."""
    n = len(generated.tokens)
    begin = len(prompt.tokens)
    loose = [r for r in generated.records if r.origin == "loose" and r.position - begin < n]
    return {
        "part": part,
        "item": item.id,
        "unit": item.unit,
        "way": str(way),
        "prompt": checksum(prompt),
        "right": verdict.correct,
        "said": verdict.extracted if len(verdict.extracted) <= 40 else "",
        "finish": generated.finish,
        "loop": find_loop(generated.tokens) is not None,
        "rounds": generated.stats.rounds,
        "drafted": generated.stats.drafted,
        "loose": [
            [r.position - begin, r.token, r.choice, _rounded(r.margin), _rounded(r.entropy), _rounded(r.probability)]
            for r in loose
        ],
        "answer": list(generated.tokens),
    }


def checksum(prompt: Prompt) -> list[int]:
    """Of a prompt: its length and the CRC of its tokens."""
    return [len(prompt.tokens), zlib.crc32(str(prompt.tokens).encode("ascii"))]


def _rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


class Progress:
    """Says on stderr how it goes, and when the time is up."""

    def __init__(self, minutes: float | None, n_all: int, every: float = 60.0) -> None:
        """`n_all`: answers that are missing; `every`: seconds between lines."""
        self._begun = self._said = time.monotonic()
        self._minutes = minutes
        self._n_all = n_all
        self._every = every
        self._n = 0

    def __call__(self) -> bool:
        """After an answer: whether it is over."""
        self._n += 1
        now = time.monotonic()
        passed = (now - self._begun) / 60
        if now - self._said >= self._every:
            self._said = now
            rate = self._n / passed
            left = (self._n_all - self._n) / rate / 60
            print(
                f"{self._n}/{self._n_all} answers, {rate:.1f} a minute, {left:.1f} h left", file=sys.stderr, flush=True
            )
        return self._minutes is not None and passed >= self._minutes


def n_missing(jobs: Sequence[Job], records: Records) -> int:
    """Answers that are still to be recorded."""
    return sum(not records.has(part, item.id, str(way)) for part, item, ways in jobs for way in ways)
