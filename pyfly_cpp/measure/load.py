"""Measures how much many texts at a time get out of a model, and how long each of them waits.

So many texts run all the time: when a block of prompts has no more for the places that become free, some of its prompts
run again there, uncounted. What throughput is: parallel.py.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.machine.prompt_sets import BenchPrompt
from pyfly_cpp.measure.generator import Sampling, rotated
from pyfly_cpp.measure.parallel import Order, ParallelGenerator
from pyfly_cpp.measure.speed import Key, Measured, Summary, render, summarise
from pyfly_cpp.measure.statistics import Interval, for_json, speedup

_BLOCK = 2
"""Prompts in a block, for each of the most texts at a time, at least: so often does a place become free."""

_WARM_UP = 16  # tokens


def require_enough(prompts: Sequence[BenchPrompt], counts: Sequence[int]) -> None:
    """Raises ValueError if there are fewer prompts than texts at a time: they would share their prompts."""
    if len(prompts) < max(counts):
        raise ValueError(
            f"{max(counts)} requests at a time need as many prompts, and there are {len(prompts)}; give more, or lower "
            "--parallel."
        )


def measure_parallel(
    generator: ParallelGenerator,
    prompts: Sequence[BenchPrompt],
    settings: Sequence[Decoding],
    counts: Sequence[int],
    max_tokens: int,
    repeats: int = 1,
    progress: Callable[[int, str], None] | None = None,
    known: Mapping[Key, Measured] | None = None,
    keep: Callable[[Measured], None] | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
) -> list[Measured]:
    """Runs every setting with every number of texts at a time on the same prompts (of conversations, the first turn).
    They take turns on blocks of prompts, and another one begins each time; each evaluates its prompts anew.

    Args:
        counts: Texts at a time, 1..generator.n_parallel.
        known, keep, sampling: As of `measure`; a block of prompts is known as a whole or measured again.

    Raises:
        ValueError: there are fewer prompts than texts at a time, a prompt and its answer do not fit in the context, or
            a setting needs a drafter that is not there.
    """
    require_enough(prompts, counts)
    generator.require(settings)
    orders = []
    for i, prompt in enumerate(prompts):
        rendered = render(generator, prompt, [{"role": "user", "content": prompt.turns[0]}], max_tokens)
        orders.append(Order(i, rendered, max_tokens, sampling.temperature))
    n_blocks = max(1, len(orders) // (_BLOCK * max(counts)))
    blocks = [orders[i::n_blocks] for i in range(n_blocks)]
    cells = [(n, setting) for setting in settings for n in counts]
    for setting in settings:
        warm = [replace(order, max_tokens=_WARM_UP) for order in orders[: max(counts)]]
        for _ in generator.generate_all(warm, setting):
            pass
    measured: list[Measured] = []
    for i, (repeat, unseeded) in enumerate(itertools.product(range(repeats), blocks)):
        block = [replace(order, seed=sampling.seed_of(repeat * len(orders) + order.key)) for order in unseeded]
        for n, setting in rotated(cells, i):
            keys = [(prompts[order.key].id, 0, repeat, str(setting), n) for order in block if order.key is not None]
            if known is not None and all(key in known for key in keys):
                measured += [known[key] for key in keys]
                continue
            generator.forget_all()
            more = (replace(order, key=None) for order in itertools.cycle(block))
            made = generator.generate_all(itertools.chain(block, more), setting, n)
            n_wanted = len(measured) + len(block)
            with contextlib.closing(made):
                while len(measured) < n_wanted:
                    order, result = next(made)
                    if order.key is None:
                        continue
                    prompt = prompts[order.key]
                    n_prompt = len(order.prompt.tokens)
                    measured.append(Measured(prompt, 0, repeat, str(setting), n_prompt, result, n_parallel=n))
                    if keep is not None:
                        keep(measured[-1])
                    if progress is not None:
                        progress(len(measured), f"{prompt.id} {setting}, {n} requests")
    return measured


@dataclass(frozen=True)
class Load:
    """One setting with so many texts at a time."""

    n_parallel: int
    summary: Summary
    """tokens_per_second is that of all texts together; what it is compared with ran as many."""
    times_fewest: Interval | None
    """Over the throughput of the same setting with the fewest texts at a time."""
    prompt_tokens_per_second: float
    """Prompt tokens evaluated over the batch's seconds for them; NaN if there were none."""
    first_token: tuple[float, float]
    """Seconds from the beginning of a request, which did not wait for a place, to its first token: p50, p95."""
    between_tokens: tuple[float, float]
    """Seconds between what a reader gets and what he gets next, of one text: p50, p95. Tokens of one step come
    together and are one. NaN if no text had two steps."""

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
    """One for each setting and number of texts, settings in the order in which they first occur."""
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
