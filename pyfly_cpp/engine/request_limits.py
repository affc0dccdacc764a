"""Arguments that a request cannot have: what the base class or llama.cpp would answer less clearly, or not survive."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from pyfly_cpp.errors import ArgumentError, did_you_mean
from pyfly_cpp.ranges import is_integer


def require_names(function: str, signature: inspect.Signature, given: Iterable[str]) -> None:
    """Raises TypeError unless a function has arguments of all these names."""
    unknown = next((name for name in given if name not in signature.parameters), None)
    if unknown is not None:
        raise TypeError(f"{function} has no argument {unknown!r}.{did_you_mean(unknown, signature.parameters)}")


_NUMBERS = ("top_p", "min_p", "typical_p", "tfs_z", "repeat_penalty", "frequency_penalty", "presence_penalty",
            "mirostat_tau", "mirostat_eta")  # fmt: skip
_INTEGERS = ("top_k", "mirostat_mode")


def require_sampling(sampling: Mapping[str, Any]) -> None:
    """Raises ValueError unless these arguments of `Llama.generate` are numbers, and the temperature is none below 0,
    which the base class takes for another way of sampling."""
    for name, value in sampling.items():
        if name == "temp" and (not _is_number(value) or not 0.0 <= value < math.inf):
            raise ValueError(f"temperature must be a finite number >= 0, not {value!r}; 0 is greedy.")
        if name in _INTEGERS and not is_integer(value):
            raise ValueError(f"{name} must be an integer, not {value!r}.")
        if name in _NUMBERS and not _is_number(value):
            raise ValueError(f"{name} must be a number, not {value!r}.")


_LEAST_TEMPERATURE = 1e-6


def as_divisible(temperature: float) -> float:
    """The temperature that a request is sampled with: 0 for one below 1e-6. Logits divided by such a one may be no
    numbers any more, and the most probable token, which 0 takes, is what it comes to."""
    return temperature if temperature >= _LEAST_TEMPERATURE else 0.0


def require_request(max_tokens: Any, seed: Any) -> None:
    """Raises ValueError unless these arguments of `create_completion` are numbers or None."""
    if max_tokens is not None and not isinstance(max_tokens, numbers.Real):
        raise ValueError(f"max_tokens must be a number of tokens, or None for no limit, not {max_tokens!r}.")
    if seed is not None and not is_integer(seed):
        raise ValueError(f"seed must be an integer or None, not {seed!r}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not math.isnan(value)


def require_fitting(draft_max: int | None, n_batch: int) -> None:
    """Raises ValueError unless a batch of n_batch tokens holds a step of draft_max."""
    if draft_max is not None and draft_max > n_batch - 1:
        raise ArgumentError(
            f"{{draft_max}} is {draft_max}, but a batch of {n_batch} tokens ({{n_batch}}) holds the last token and at "
            f"most {n_batch - 1} drafts; lower {{draft_max}} or raise {{n_batch}}."
        )
