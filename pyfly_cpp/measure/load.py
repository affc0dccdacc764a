"""The throughput of many requests at a time, and how long each of them waits. What throughput is: parallel.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyfly_cpp.measure.speed import Measured, Summary, summarise
from pyfly_cpp.measure.statistics import Interval, for_json, speedup


@dataclass(frozen=True)
class Load:
    """One setting with so many requests at a time."""

    n_parallel: int
    summary: Summary
    """tokens_per_second is that of all requests together; what it is compared with ran as many."""
    times_fewest: Interval | None
    """Over the throughput of the same setting with the fewest requests at a time."""
    prompt_tokens_per_second: float
    """Prompt tokens evaluated over the batch's seconds for them; NaN if there were none."""
    first_token: tuple[float, float]
    """Seconds from the beginning of a request, which did not wait for a place, to its first token: p50, p95."""
    between_tokens: tuple[float, float]
    """Seconds between what a reader gets and what he gets next, of one request: p50, p95. Tokens of one step
    come together and are one. NaN if no request had two steps."""

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        quantiles = ("p50", "p95")
        said = {
            "n_parallel": self.n_parallel,
            **vars(self.summary),
            "times_fewest": self.times_fewest,
            "prompt_tokens_per_second": self.prompt_tokens_per_second,
            "seconds_first_token": dict(zip(quantiles, self.first_token)),
            "seconds_between_tokens": dict(zip(quantiles, self.between_tokens)),
        }
        return {name: for_json(value) for name, value in said.items()}


def summarise_loads(measured: Sequence[Measured]) -> list[Load]:
    """One for each setting and number of requests, settings in the order in which they first occur."""
    counts = sorted({m.n_parallel for m in measured})
    by_count = {n: [m for m in measured if m.n_parallel == n] for n in counts}
    loads = [_load(n, s, by_count, counts[0]) for n in counts for s in summarise(by_count[n])]
    order = list(dict.fromkeys(m.setting for m in measured))
    return sorted(loads, key=lambda load: order.index(load.summary.setting))


def _load(n: int, summary: Summary, by_count: dict[int, list[Measured]], fewest: int) -> Load:
    def mine(n: int) -> list[Measured]:
        of_setting = [m for m in by_count[n] if m.setting == summary.setting]
        return sorted(of_setting, key=lambda m: (m.prompt.id, m.repeat))

    rows = mine(n)
    results = [m.result for m in rows]
    times_fewest = None
    if n != fewest:
        groups = [m.prompt.unit for m in rows]
        times_fewest = speedup([m.timed for m in rows], [m.timed for m in mine(fewest)], groups)
    seconds = sum(r.seconds_prompt for r in results)
    return Load(
        n,
        summary,
        times_fewest,
        sum(r.stats.prefilled for r in results) / seconds if seconds > 0 else math.nan,
        _quantiles([r.arrivals[0] for r in results if r.arrivals]),
        _quantiles([b - a for r in results for a, b in zip(r.arrivals, r.arrivals[1:])]),
    )


def _quantiles(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return math.nan, math.nan
    low, high = np.percentile(values, [50, 95])
    return float(low), float(high)
