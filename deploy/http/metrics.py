"""Prometheus metrics of one ingress process; `docs/metrics.md` describes each."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from deploy.http.engine_client import EngineClient
from engine.errors import EngineDeadError
from engine.protocol.tokenizer_messages import TextDelta

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 2.0
_LATENCY_BUCKETS = [
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15),
    *(0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
]
"""Bounds in seconds: fine where inter-token times lie, coarse up to long generations."""


class LatencyHistogram(Collector):
    """A histogram by endpoint for one event loop: no locks, so observing costs a bisection.

    prometheus_client's own took 2.6 µs an observation, which is too much for every token.
    """

    def __init__(self, name: str, documentation: str) -> None:
        self._name = name
        self._documentation = documentation
        self._series: dict[str, tuple[list[int], list[float]]] = {}

    def series(self, endpoint: str) -> tuple[list[int], list[float]]:
        """Counts by bucket and the sum in a list of one element; `observe` takes both."""
        if endpoint not in self._series:
            self._series[endpoint] = ([0] * (len(_LATENCY_BUCKETS) + 1), [0.0])
        return self._series[endpoint]

    @staticmethod
    def observe(series: tuple[list[int], list[float]], seconds: float, times: int = 1) -> None:
        """Count `times` events that took `seconds` each."""
        series[0][bisect_left(_LATENCY_BUCKETS, seconds)] += times
        series[1][0] += seconds * times

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=["endpoint"])
        bounds = [*(str(bound) for bound in _LATENCY_BUCKETS), "+Inf"]
        for endpoint, (counts, total) in self._series.items():
            running, buckets = 0, []
            for bound, count in zip(bounds, counts, strict=True):
                running += count
                buckets.append((bound, float(running)))
            family.add_metric([endpoint], buckets, total[0])
        yield family


class EngineStats(Collector):
    """The engines' own statistics, as fetched for the scrape under way."""

    def __init__(self) -> None:
        self._replicas: Sequence[Mapping[str, float]] = []
        self._fetched = False

    async def fetch(self, client_provider: Callable[[], EngineClient]) -> None:
        """Ask the engines. If they don't answer in time, the scrape goes on without them."""
        self._replicas, self._fetched = [], False
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                self._replicas = await client_provider().stats()
            self._fetched = True
        except Exception as exception:  # no error here may hide the other metrics
            logger.warning("no engine statistics: %s", type(exception).__name__)

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "manta_engine_stats_up",
            "1 if the engines answered this scrape's question for statistics.",
            value=float(self._fetched),
        )
        families: dict[str, Metric] = {}
        for index, stats in enumerate(self._replicas):
            replica = stats.get("replica", index)
            label = f"{replica:g}" if isinstance(replica, float) else str(replica)
            for key, value in stats.items():
                if key == "replica" or not isinstance(value, int | float):
                    continue
                name = "manta_engine_" + re.sub(r"\W", "_", key, flags=re.ASCII)
                family = families.get(name)
                if family is None:
                    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                    family = families[name] = kind(
                        name, f"Scheduler statistic {key}.", labels=["replica"]
                    )
                family.add_metric([label], float(value))  # type: ignore[attr-defined]
        yield from families.values()


class Resumes(Collector):
    """The client's own count of resumed sequences, as of the scrape under way."""

    def __init__(self) -> None:
        self.by_cause: Mapping[str, int] = {}

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "manta_requests_resumed",
            "Times that a sequence went on elsewhere, by what it had lost.",
            labels=["cause"],
        )
        for cause, count in self.by_cause.items():
            family.add_metric([cause], count)
        yield family


class ServerMetrics:
    """All metrics of a process, in a registry of their own. Use from one event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "manta_requests",
            "Requests by final HTTP status; 499: the client left.",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self.sequences = Counter(
            "manta_sequences",
            "Finished sequences (choices) by finish_reason.",
            ["endpoint", "finish_reason"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "manta_prompt_tokens", "Prompt tokens of sequences that began.", registry=self.registry
        )
        self.cached_prompt_tokens = Counter(
            "manta_cached_prompt_tokens",
            "Of manta_prompt_tokens those found in the prefix cache.",
            registry=self.registry,
        )
        self.generation_tokens = Counter(
            "manta_generation_tokens", "Generated tokens.", registry=self.registry
        )
        self.in_flight = Gauge(
            "manta_requests_in_flight",
            "Requests received and not yet answered in full.",
            ["endpoint"],
            registry=self.registry,
        )
        self.time_to_first_token = LatencyHistogram(
            "manta_time_to_first_token_seconds",
            "From a request's arrival to a sequence's first delta.",
        )
        self.inter_token_latency = LatencyHistogram(
            "manta_inter_token_latency_seconds", "Between tokens of a sequence."
        )
        self.e2e_latency = LatencyHistogram(
            "manta_e2e_request_latency_seconds",
            "From a request's arrival to the end of its answer, if the status is 200.",
        )
        for histogram in (self.time_to_first_token, self.inter_token_latency, self.e2e_latency):
            self.registry.register(histogram)
        self.engine_stats = EngineStats()
        self.registry.register(self.engine_stats)
        self.resumes = Resumes()
        self.registry.register(self.resumes)

    def add_endpoint(self, endpoint: str) -> None:
        """Export the endpoint's latencies from now on, also while there are none."""
        for histogram in (self.time_to_first_token, self.inter_token_latency, self.e2e_latency):
            histogram.series(endpoint)

    async def render(self, client_provider: Callable[[], EngineClient]) -> bytes:
        """The metrics in Prometheus' text format."""
        await self.engine_stats.fetch(client_provider)
        with suppress(EngineDeadError):  # no client yet: nothing was resumed
            self.resumes.by_cause = dict(client_provider().resumes)
        return generate_latest(self.registry)


@dataclass
class RequestTracker:
    """Measures one request from now on. Its sequences are numbered as its choices."""

    metrics: ServerMetrics
    endpoint: str
    _start: float = field(default_factory=time.perf_counter)
    _last: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By sequence: the time of its last delta, and its number of tokens until then."""
    _inter_token: tuple[list[int], list[float]] = field(init=False)
    """The endpoint's series of latencies between tokens, looked up at the first delta."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request came."""
        return time.perf_counter() - self._start

    def delta(self, index: int, delta: TextDelta) -> None:
        """Note progress of a sequence; called for every delta."""
        now = time.perf_counter()
        last = self._last.get(index)
        if last is None:
            metrics = self.metrics
            self._inter_token = metrics.inter_token_latency.series(self.endpoint)
            if delta.num_output > 0:
                series = metrics.time_to_first_token.series(self.endpoint)
                LatencyHistogram.observe(series, now - self._start)
            metrics.prompt_tokens.inc(delta.num_prompt)
            metrics.cached_prompt_tokens.inc(delta.num_cached)
        elif (tokens := delta.num_output - last[1]) > 0:
            LatencyHistogram.observe(self._inter_token, (now - last[0]) / tokens, tokens)
        self._last[index] = (now, delta.num_output)
        if delta.finish_reason is not None:
            self.metrics.sequences.labels(self.endpoint, delta.finish_reason).inc()

    def end(self, status: int) -> None:
        """The request is over; it may have succeeded, failed or been cancelled."""
        metrics, endpoint = self.metrics, self.endpoint
        metrics.requests.labels(endpoint, str(status)).inc()
        metrics.generation_tokens.inc(sum(tokens for _, tokens in self._last.values()))
        if status == 200:
            LatencyHistogram.observe(metrics.e2e_latency.series(endpoint), self.elapsed_s)
