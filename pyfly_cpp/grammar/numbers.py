"""Numbers between bounds as right sides of rules of a GBNF grammar."""

from __future__ import annotations

from collections.abc import Callable

_MOST_DIGITS = 16
"""Most digits of a number without a bound: without a limit, models write ever more."""


def integers(low: int | None, high: int | None) -> str:
    """For the integers from `low` to `high`. Raises ValueError: there are none."""
    return _signed(low, high, _naturals)


def decimals(low: int | None, high: int | None) -> str:
    """For the numbers from `low` to `high`, without exponents. Raises ValueError: there are none."""

    def positive(least: int, most: int | None) -> list[str]:
        if most is None:
            return [f'({" | ".join(_naturals(least, None))}) ("." [0-9]{{1,15}})?']
        inside = [f'({" | ".join(_naturals(least, most - 1))}) ("." [0-9]{{1,15}})?'] if least < most else []
        return [*inside, f'"{most}" ("." "0"{{1,15}})?']

    return _signed(low, high, positive)


def _signed(low: int | None, high: int | None, positive: Callable[[int, int | None], list[str]]) -> str:
    if low is not None and high is not None and low > high:
        raise ValueError(f"has a number of at least {low} and at most {high}")
    out = []
    if low is None or low < 0:
        least = 0 if high is None or high > 0 else -high
        out.append(f'"-" ({" | ".join(positive(least, None if low is None else -low))})')
    if high is None or high >= 0:
        out += positive(max(0, low or 0), high)
    return " | ".join(out)


def _naturals(low: int, high: int | None) -> list[str]:
    """For each number of digits, what is written with so many."""
    n_least = len(str(low))
    n_most = max(_MOST_DIGITS, n_least) if high is None else len(str(high))
    if high is None and n_least < n_most:
        return [*_naturals(low, 10**n_least - 1), f"[1-9] [0-9]{{{n_least},{n_most - 1}}}"]
    high = 10**n_most - 1 if high is None else high
    return [
        _same_length(str(max(low, 10 ** (n - 1) if n > 1 else 0)), str(min(high, 10**n - 1)))
        for n in range(n_least, n_most + 1)
    ]


def _same_length(low: str, high: str) -> str:
    if not low:
        return ""
    if low[0] == high[0]:
        return f'"{low[0]}" {_same_length(low[1:], high[1:])}'.rstrip()
    n = len(low) - 1
    first, last, out = int(low[0]), int(high[0]), []
    if low[1:].strip("0"):
        out.append(f'"{first}" {_same_length(low[1:], "9" * n)}')
        first += 1
    if high[1:].strip("9"):
        out.append(f'"{last}" {_same_length("0" * n, high[1:])}')
        last -= 1
    if first <= last:
        out.append(f"[{first}-{last}]" + (f" [0-9]{{{n}}}" if n else ""))
    return f"({' | '.join(out)})"
