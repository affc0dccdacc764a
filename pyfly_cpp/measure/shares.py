"""Whose time it is when several requests run at the same time.

While n requests run, each second is 1/n second of every one of them, so that tokens over seconds is the throughput of
all. What the prompt of one of them takes is taken out: it held up nobody.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right


class Shares:
    """Keeps who runs when, in seconds of `time.perf_counter`. May be used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n = 0
        self._times = [time.perf_counter()]  # when the number of those who run has changed
        self._shares = [0.0]  # what would have come until then to somebody who always runs
        self._prompts: list[tuple[float, float, float]] = []  # (end, begin, seconds)

    def enter(self) -> float:
        """Somebody more runs from now on; returns the time."""
        return self._change(1)

    def leave(self) -> None:
        """Somebody has ended."""
        self._change(-1)

    def prompt(self, begin: float, seconds: float) -> float:
        """So many seconds since `begin` went into somebody's prompt; returns the time."""
        with self._lock:
            now = time.perf_counter()
            if seconds > 0:
                self._prompts.append((now, begin, seconds))
            return now

    def share(self, begin: float, end: float) -> float:
        """What of this time is the share of somebody who ran from its begin to its end, in seconds without prompts."""
        with self._lock:
            share = self._until(end) - self._until(begin)
            for other_end, other_begin, seconds in self._prompts[bisect_right(self._prompts, (begin,)) :]:
                both = self._until(min(end, other_end)) - self._until(max(begin, other_begin))
                share -= max(0.0, both) * min(1.0, seconds / (other_end - other_begin))
            return max(0.0, share)

    def _change(self, n: int) -> float:
        with self._lock:
            now = time.perf_counter()
            self._shares.append(self._until(now))
            self._times.append(now)
            self._n += n
            return now

    def _until(self, moment: float) -> float:
        i = bisect_right(self._times, moment)
        if i == len(self._times):
            return self._shares[-1] + (moment - self._times[-1]) / max(1, self._n)
        if i == 0:
            return 0.0
        part = (moment - self._times[i - 1]) / (self._times[i] - self._times[i - 1])
        return self._shares[i - 1] + part * (self._shares[i] - self._shares[i - 1])
