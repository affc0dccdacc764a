"""Logits processors: the caller's Python functions, called from within a native round."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp.llama import LogitsProcessorList

from pyfly_cpp._native import Slot
from pyfly_cpp.interrupts import interrupts_deferred


class ExtendableProcessors(LogitsProcessorList):  # type: ignore[misc]
    """A list of logits processors whose `extend` returns it, as the base class's completion expects."""

    def extend(self, processors: Iterable[Any]) -> ExtendableProcessors:
        """As of a list."""
        super().extend(processors)
        return self


class Processors:
    """The caller's logits processors, shown the tokens before the very row they work on.

    The base class shows them its evaluated tokens, which during a round is not the history of the row. What a processor
    raises cannot pass through C; it is kept and raised when the round is over.
    """

    def __init__(self, slot: Slot, processors: LogitsProcessorList) -> None:
        self._slot = slot
        self._processors = processors
        self._failure: BaseException | None = None

    def __call__(self, _: npt.NDArray[np.intc], scores: npt.NDArray[np.single]) -> npt.NDArray[np.single]:
        if self._failure is not None:
            return scores
        try:
            shaped = np.asarray(self._processors(self._slot.history(), np.array(scores)), dtype=np.single)
            if shaped.shape != scores.shape:
                raise ValueError(
                    f"the logits processors returned an array of shape {list(shaped.shape)}, not {list(scores.shape)}; "
                    "each must return the scores."
                )
            return shaped
        except BaseException as failure:
            self._failure = failure
            return scores

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Around a round: raises what a processor raised during it."""
        with interrupts_deferred():
            yield
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
