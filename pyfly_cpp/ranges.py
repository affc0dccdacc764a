"""Numbers of the caller's: whether they are any, and within their range."""

from __future__ import annotations

import math
import operator
from typing import Any

from pyfly_cpp.errors import ArgumentError

_LARGEST = 2**31 - 1


def is_integer(n: Any) -> bool:
    """Whether this is an integer, numpy's included, and no bool."""
    try:
        operator.index(n)
    except TypeError:
        return False
    return not isinstance(n, bool)


def require_integer(name: str, n: Any, least: int, most: int = _LARGEST) -> int:
    """Returns `n` if it is an integer in least..most, numpy's included; raises ValueError otherwise."""
    if not is_integer(n) or not least <= n <= most:
        limit = f">= {least}" if most == _LARGEST else f"in {least}..{most}"
        raise ArgumentError(f"{name} must be an integer {limit}, not {n!r}.")
    return int(n)


def require_number(name: str, value: Any, most: float = math.inf) -> float:
    """Returns `value` as a float if it is a finite number in [0, most]; raises ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, not {value!r}.")
    try:
        number = float(value)
    except OverflowError:  # an integer larger than any float
        number = math.inf
    if not math.isfinite(number) or not 0.0 <= number <= most:
        allowed = "a finite number >= 0" if most == math.inf else f"in [0, {most:g}]"
        raise ValueError(f"{name} must be {allowed}, not {value!r}.")
    return number
