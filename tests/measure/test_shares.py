"""Shares of the time in which several requests run."""

from __future__ import annotations

import pytest

from pyfly_cpp.measure import shares as module
from pyfly_cpp.measure.shares import Shares


@pytest.fixture
def clock(monkeypatch):
    """Tells what it is set to."""

    class Clock:
        now = 100.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_time_is_divided_evenly(clock):
    shares = Shares()
    assert shares.enter() == 100
    clock.now = 101
    shares.enter()
    clock.now = 105
    shares.leave()
    clock.now = 106
    assert shares.share(100, 106) == 1 + 4 / 2 + 1
    assert shares.share(102, 104) == 1 and shares.share(101, 105) == 2
    assert shares.share(100, 106) + shares.share(101, 105) == 6, "all of the time is somebody's, and once"


def test_the_prompt_of_another_is_taken_out_where_it_was(clock):
    shares = Shares()
    shares.enter()
    begin = shares.enter()
    clock.now = 102
    assert shares.prompt(begin, 1.5) == 102  # of these two seconds
    clock.now = 104
    assert shares.share(100, 104) == 2 - 1.5 / 2
    assert shares.share(102, 104) == 1, "before it began to decode"
    assert shares.share(101, 103) == 1 - 1.5 / 4


def test_no_time_at_all(clock):
    shares = Shares()
    shares.enter()
    shares.prompt(100.0, 0.0)
    assert shares.share(100, 100) == 0 and shares.share(90, 95) == 0
