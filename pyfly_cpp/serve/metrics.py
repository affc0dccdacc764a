"""What a server counts, as Prometheus reads it."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any

from pyfly_cpp.stats import Stats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """Counts of seconds."""

    def __init__(self, bounds: Sequence[float] = _SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Counts one."""
        self._counts[bisect.bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> Iterable[str]:
        """As text."""
        n = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts):
            n += count
            yield f'{name}_bucket{{le="{bound}"}} {n}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {n}"


class Metrics:
    """Of one server; used by its event loop alone."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, int], int] = {}
        self.first_token = Histogram()
        """Seconds from a request's arrival to the first piece of a text, its waiting included."""
        self.between_tokens = Histogram()
        """Seconds between the pieces of a text that follow each other."""
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.embedded_tokens = 0

    def count(self, route: str, status: int) -> None:
        """A request was answered."""
        self._requests[route, status] = self._requests.get((route, status), 0) + 1

    def render(self, stats: Stats, running: int, waiting: int) -> str:
        """Everything, with the counters of the batch and who runs and waits now."""
        lines: list[str] = []

        def metric(name: str, kind: str, text: str, samples: Iterable[tuple[str, Any]]) -> None:
            lines.extend((f"# HELP pyfly_{name} {text}", f"# TYPE pyfly_{name} {kind}"))
            lines.extend(f"pyfly_{name}{labels} {_number(value)}" for labels, value in samples)

        metric(
            "requests_total",
            "counter",
            "Requests, by route and status.",
            ((f'{{route="{route}",status="{status}"}}', n) for (route, status), n in sorted(self._requests.items())),
        )
        metric("texts_running", "gauge", "Texts that are written now.", [("", running)])
        metric("texts_waiting", "gauge", "Texts that wait for their turn.", [("", waiting)])
        own = stats.committed - stats.matched - stats.loose_accepted
        metric(
            "tokens_total",
            "counter",
            "Tokens that came out, by how they came.",
            [
                ('{origin="matched"}', stats.matched),
                ('{origin="loose"}', stats.loose_accepted),
                ('{origin="target"}', own),
            ],
        )
        metric("drafted_tokens_total", "counter", "Tokens that were proposed.", [("", stats.drafted)])
        metric("rounds_total", "counter", "Rounds that were verified.", [("", stats.rounds)])
        metric("mean_accepted", "gauge", "Tokens per round, of all rounds.", [("", stats.mean_accepted)])
        metric("loose_rate", "gauge", "Share of loosely accepted tokens.", [("", stats.loose_rate)])
        metric("prompt_tokens_total", "counter", "Tokens of prompts.", [("", self.prompt_tokens)])
        metric(
            "prefilled_tokens_total",
            "counter",
            "Tokens of prompts that were evaluated, and not known already.",
            [("", stats.prefilled)],
        )
        metric("completion_tokens_total", "counter", "Tokens of answers.", [("", self.completion_tokens)])
        metric("embedded_tokens_total", "counter", "Tokens of texts that became vectors.", [("", self.embedded_tokens)])
        for name, text in (("first_token", "From a request to its first text."), ("between_tokens", "Between texts.")):
            lines.extend((f"# HELP pyfly_{name}_seconds {text}", f"# TYPE pyfly_{name}_seconds histogram"))
            lines.extend(getattr(self, name).lines(f"pyfly_{name}_seconds"))
        return "\n".join(lines) + "\n"  # fmt: skip


def _number(value: float) -> str:
    return "NaN" if value != value else f"{value:.6g}" if isinstance(value, float) else str(value)
