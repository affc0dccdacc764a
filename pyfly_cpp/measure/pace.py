"""The speed of a setting: what benchmarks and tasks report alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pyfly_cpp.measure.statistics import Interval, speed, speedup


class Decoded(NamedTuple):
    """The decoding of one generation, for the speed of its setting."""

    tokens: int
    """Tokens after the first step."""
    seconds: float
    """Seconds until the last of them was there."""
    committed: int
    """All tokens, as in `Stats`; the next two likewise."""
    steps: int
    loose_accepted: int


@dataclass(frozen=True)
class Pace:
    """The speed of one setting."""

    setting: str
    tokens_per_second: Interval
    speedup_plain: Interval | None
    """Speed over that of plain decoding; None: that is this setting, or it did not run."""
    speedup_exact: Interval | None
    """Speed over that of `exact`, likewise; None for plain decoding, too."""
    mean_accepted: float
    """Tokens per step."""
    loose_rate: float
    """Loosely accepted tokens as a share of all."""


def pace(setting: str, decoded: Mapping[str, Sequence[Decoded]], groups: Sequence[str]) -> Pace:
    """The speed of a setting among others, all on the same items in the same order.

    Args:
        decoded: The generations of each setting.
        groups: A name for each item, as of `jackknife`.
    """
    timed = {name: [(one.tokens, one.seconds) for one in items] for name, items in decoded.items()}
    committed, steps, loose = (
        sum(getattr(one, name) for one in decoded[setting]) for name in ("committed", "steps", "loose_accepted")
    )

    def over(other: str) -> Interval | None:
        return None if other == setting or other not in timed else speedup(timed[setting], timed[other], groups)

    return Pace(
        setting=setting,
        tokens_per_second=speed(timed[setting], groups),
        speedup_plain=over("plain"),
        speedup_exact=over("exact") if setting != "plain" else None,
        mean_accepted=committed / steps if steps else math.nan,
        loose_rate=loose / committed if committed else math.nan,
    )
