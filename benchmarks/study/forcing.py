"""Whether recorded answers are the target's own choices: teacher forcing.

An answer is evaluated anew, the prompt and all of it at once. Each token that no loose accept chose has to be the most
probable one there, up to the noise of kernels, which round by the size of a batch. How large this noise is, answers of
plain decoding tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyfly_cpp import FlyLlama
from pyfly_cpp.evaluation.files import DataError, Row
from pyfly_cpp.evaluation.generation import Generator
from pyfly_cpp.evaluation.task import Item
from study.comparing import Answers
from study.plan import PARTS, Way, digest
from study.recording import checksum
from study.records import loose_of


@dataclass(frozen=True)
class Forced:
    """An answer, evaluated anew."""

    row: Row
    gaps: npt.NDArray[np.float32]
    """Of each token that no loose accept chose: the largest logit in its place less its own, >= 0; shape [n]."""


def sample(answers: Answers, way: Way, items: Mapping[tuple[str, str], Item], n: int) -> list[Row]:
    """The first n answers of a way to these items, in an order that has nothing to do with what they are."""
    rows = [row for row in answers.of(way, list(PARTS)) if (row["part"], row["item"]) in items]
    return sorted(rows, key=lambda row: digest(f"{row['part']} {row['item']}"))[:n]


def force(llm: FlyLlama, rows: Sequence[Row], items: Mapping[tuple[str, str], Item]) -> Iterator[Forced]:
    """Evaluates answers, one after the other.

    Args:
        llm: The target, with `logits_all=True` and room for prompt and answer.
        items: By part and name.

    Raises:
        DataError: the prompt of an item is not the one that was recorded.
    """
    generator = Generator(llm)
    for row in rows:
        task, item = PARTS[row["part"]].task, items[row["part"], row["item"]]
        prompt = generator.render(task.messages(item), task.prefix(item), task.stop(item))
        if checksum(prompt) != row["prompt"]:
            raise DataError(f"the prompt of {item.id} is not the one that was recorded; give the data of the records.")
        llm.reset()
        llm.eval([*prompt.tokens, *row["answer"]])
        begin = len(prompt.tokens) - 1
        logits = llm.scores[begin : begin + len(row["answer"])]
        gaps = logits.max(axis=1) - logits[np.arange(len(logits)), row["answer"]]
        yield Forced(row, np.delete(gaps, [entry["place"] for entry in loose_of(row)]))
