"""Logits processors: the caller's Python functions, called from within a native step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp.llama import LogitsProcessorList

_MOST = 1e30
"""A logit that no other one comes near, and that stays finite when it is divided by a temperature."""


def listed(functions: Any) -> list[Any]:
    """The functions of a sequence, or the only one, or none."""
    is_one = callable(functions) and not isinstance(functions, Sequence)
    return [functions] if is_one else list(functions or ())


class Processors:
    """The caller's logits processors, shown the tokens before the very row they work on.

    The base class shows them its evaluated tokens, which during a step is not the history of the row. What a processor
    raises cannot pass through C; it is kept for whoever steps the request, and no token can be chosen by the row.
    """

    def __init__(self, history: Callable[[], npt.NDArray[np.int32]], processors: Any) -> None:
        """`history`: the tokens before the row that is being sampled. `processors`: a sequence, or only one."""
        self._history = history
        self._processors = LogitsProcessorList(listed(processors))
        self._failure: BaseException | None = None
        self._stopped_by: list[int] | None = None  # the tokens before the last row without a distribution

    def __call__(self, _: npt.NDArray[np.intc], scores: npt.NDArray[np.single]) -> npt.NDArray[np.single]:
        history = self._history()
        if self._stopped_by is not None and self._stopped_by == history.tolist():
            return np.full_like(scores, np.nan)  # in the step that the row is left to: nobody is asked twice
        self._failure = self._stopped_by = None
        try:
            shaped = np.asarray(self._processors(history, np.array(scores)), dtype=np.single)
            if shaped.shape != scores.shape:
                raise ValueError(
                    f"the logits processors returned an array of shape {list(shaped.shape)}, not {list(scores.shape)}; "
                    "each must return the scores."
                )
            shaped = _with_finite_peaks(shaped, scores)
        except BaseException as failure:
            self._failure, shaped = failure, np.full_like(scores, np.nan)
        if not np.isfinite(shaped.max()):
            self._stopped_by = history.tolist()
        return shaped

    def take_failure(self) -> BaseException | None:
        """The exception of a processor, once."""
        failure, self._failure = self._failure, None
        return failure


def _with_finite_peaks(shaped: npt.NDArray[np.single], scores: npt.NDArray[np.single]) -> npt.NDArray[np.single]:
    """A row with a finite number where a processor has put +inf, which no distribution takes; a row of nothing else
    stays."""
    if shaped.max() != np.inf:
        return shaped
    forced = np.isposinf(shaped) & ~np.isposinf(scores)
    return shaped if forced.all() else np.where(forced, np.single(_MOST), shaped)


def bias_processor(biases: Sequence[tuple[int, float]]) -> Callable[[Any, Any], Any]:
    """A logits processor that adds to the logits of tokens. `biases`: (token id, what is added)."""
    ids = np.array([token for token, _ in biases], dtype=np.intp)
    values = np.array([value for _, value in biases], dtype=np.single)

    def add(_: Any, scores: Any) -> Any:
        scores[ids] += values
        return scores

    return add
