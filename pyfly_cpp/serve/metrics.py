"""Counters of a server, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pyfly_cpp.engine.stats import Stats
from pyfly_cpp.serve.turns import Turns

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The counters of one server."""

    def __init__(self, stats: Callable[[], Stats], turns: Turns) -> None:
        """
        Args:
            stats: Counts of the batch, asked for with each rendering.
            turns: Knows who runs and waits.
        """
        self._registry = _Registry()
        own: dict[str, Any] = {"namespace": "pyfly", "registry": self._registry}
        timed: dict[str, Any] = {"unit": "seconds", "buckets": _SECONDS, **own}
        self.requests = Counter("requests", "Requests, by route and status.", ("route", "status"), **own)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts.", **own)
        self.completion_tokens = Counter("completion_tokens", "Tokens of answers.", **own)
        self.embedded_tokens = Counter("embedded_tokens", "Tokens of embedded inputs.", **own)
        self.first_token = Histogram("first_token", "From a request to its first token.", **timed)
        self.between_tokens = Histogram("between_tokens", "Between tokens.", **timed)
        Gauge("texts_running", "Answers that are written now.", **own).set_function(lambda: turns.running)
        Gauge("texts_waiting", "Answers that wait for their turn.", **own).set_function(lambda: turns.waiting)
        self._registry.register(_OfBatch(stats))

    def render(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)


class _Registry(CollectorRegistry):
    """Leaves out when each counter was created."""

    def collect(self) -> Iterable[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class _OfBatch(Collector):
    """The counters of a batch."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        own = stats.committed - stats.matched - stats.loose_accepted
        tokens = CounterMetricFamily("pyfly_tokens", "Tokens that came out, by how they came.", labels=["origin"])
        for origin, n in (("matched", stats.matched), ("loose", stats.loose_accepted), ("target", own)):
            tokens.add_metric([origin], n)
        yield tokens
        yield CounterMetricFamily("pyfly_drafted_tokens", "Tokens that were proposed.", stats.drafted)
        text = "Proposed tokens that prompt lookup found in earlier answers, and that were right."
        yield CounterMetricFamily("pyfly_accepted_from_answers", text, stats.accepted_from_answers)
        yield CounterMetricFamily("pyfly_rounds", "Steps that were verified.", stats.rounds)
        text = "Tokens of prompts that were evaluated, and not known already."
        yield CounterMetricFamily("pyfly_prefilled_tokens", text, stats.prefilled)
        yield GaugeMetricFamily("pyfly_mean_accepted", "Tokens per step, of all steps.", stats.mean_accepted)
        yield GaugeMetricFamily("pyfly_loose_rate", "Share of loosely accepted tokens.", stats.loose_rate)
