"""Loops: planted ones are found, with their period; ordinary text has none."""

from __future__ import annotations

import random

import pytest

from pyfly_cpp.engine.repetition import LoopWatch, find_loop


def oracle(tokens):
    """Length of the longest run that is some unit of 1..64 tokens, repeated >= 4 times over >= 32 tokens; slow and
    plain."""
    best = 0
    for period in range(1, 65):
        for start in range(len(tokens) - period):
            end = start + period
            while end < len(tokens) and tokens[end] == tokens[end - period]:
                end += 1
            length = end - start
            if length >= max(4 * period, 32) and length > best:
                best = length
    return best


@pytest.mark.parametrize("period", [1, 2, 7, 31, 64])
def test_planted_loops(period):
    rng = random.Random(period)
    head = [rng.randrange(10**6) for _ in range(50)]
    unit = [rng.randrange(10**6) for _ in range(period)]
    times = max(4, -(-32 // period))
    loop = find_loop(head + unit * times)
    assert (loop.start, loop.period, loop.length, loop.at_end) == (50, period, period * times, True)
    loop = find_loop(head + unit * times + head)
    assert (loop.period, loop.at_end) == (period, False)
    assert find_loop(head + unit * (times - 1)) is None or (period * (times - 1) >= 32 and times - 1 >= 4)


def test_longer_periods_and_short_runs_are_no_loops():
    unit = list(range(65))
    assert find_loop(unit * 5) is None
    assert find_loop([5] * 31) is None and find_loop([5] * 32) is not None
    assert find_loop([]) is None and find_loop([1]) is None


def test_against_the_oracle():
    rng = random.Random(0)
    for _ in range(60):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(20, 120))]
        if rng.random() < 0.5:
            unit = tokens[: rng.randrange(1, 12)]
            tokens[10:10] = unit * rng.randrange(1, 12)
        found = find_loop(tokens)
        assert (found.length if found else 0) == oracle(tokens)


@pytest.mark.parametrize("period", [1, 7, 64])
def test_a_loop_is_stopped_while_it_is_written(period):
    """Soon after its 128th token, or the fourth unit if that is later."""
    watch, head = LoopWatch(), list(range(1000, 1300))
    assert not any(map(watch.add, head)) and watch.loop is None
    n = next(i + 1 for i in range(1000) if watch.add(i % period))
    assert max(128, 4 * period) <= n < max(128, 4 * period) + 32 and watch.loop.period == period
    assert not any(map(LoopWatch().add, [*head[:289], *[5] * 127]))  # the last look is at the last one
    watch.add(999)
    assert watch.loop is None
