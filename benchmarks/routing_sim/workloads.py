"""Six ways in which prompts share prefixes. Open loop: nobody waits for an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from benchmarks.routing_sim.trace import Tokens, Trace, TraceRequest, make_trace

VOCABULARY = 32_000
SMALL_CACHE = 200_000
LARGE_CACHE = 2_000_000
BURST_AFTER_S = 5.0
BURST_S = 20.0
MAX_TURNS = 20

Rng = np.random.Generator
Maker = Callable[[Rng, float, float], list[TraceRequest]]
"""Makes requests of (rng, requests per second, seconds); some may lie outside the seconds."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A name, how requests are made, tokens of cache in a replica, seconds before measuring."""

    name: str
    make: Maker
    cache_tokens: int
    warm_s: float

    def trace(self, seed: int, rate: float, window_s: float, warm_s: float | None = None) -> Trace:
        warm = self.warm_s if warm_s is None else warm_s
        rng = np.random.default_rng([seed, *self.name.encode()])
        return make_trace(self.make(rng, rate, warm + window_s), warm, window_s)


def tenants(rng: Rng, rate: float, seconds: float) -> list[TraceRequest]:
    """2,000 tenants, Zipf 1.0, each with a system prompt of 1,000 to 4,000 tokens."""
    prompts = [_tokens(rng, int(rng.integers(1000, 4001))) for _ in range(2000)]
    chosen = _zipf(rng, len(prompts))
    return [
        TraceRequest(at, (prompts[chosen()], _tail(rng)), _output(rng))
        for at in _poisson(rng, rate, 0.0, seconds)
    ]


def adapters(rng: Rng, rate: float, seconds: float) -> list[TraceRequest]:
    """64 adapters, Zipf 1.0, each with three system prompts of 500 to 2,000 tokens."""
    prompts = [[_tokens(rng, int(rng.integers(500, 2001))) for _ in range(3)] for _ in range(64)]
    chosen = _zipf(rng, len(prompts))
    found = []
    for at in _poisson(rng, rate, 0.0, seconds):
        number = chosen()
        segments = (prompts[number][int(rng.integers(3))], _tail(rng))
        found.append(TraceRequest(at, segments, _output(rng), adapter=f"a{number}"))
    return found


def burst(rng: Rng, rate: float, seconds: float) -> list[TraceRequest]:
    """Tenants; for 20 s, half of the requests begin with a new prompt of 8,000 tokens.

    The window has to end BURST_AFTER_S + BURST_S after its start or later.
    """
    requests = tenants(rng, rate, seconds)
    hot = _tokens(rng, 8000)
    begin = seconds - BURST_WINDOW_S + BURST_AFTER_S
    for position, request in enumerate(requests):
        if begin <= request.arrival < begin + BURST_S and rng.random() < 0.5:
            requests[position] = TraceRequest(
                request.arrival, (hot, request.segments[1]), request.output
            )
    return requests


def chat(rng: Rng, rate: float, seconds: float) -> list[TraceRequest]:
    """Conversations: a long first message, then short turns about every 20 s.

    They begin long before the window, so that it sees all ages. The turns before it are not in
    the trace, i.e. caches start cold.
    """
    mean_turns = 8.0
    requests: list[TraceRequest] = []
    for begin in _poisson(rng, rate / mean_turns, -10.0 * MAX_TURNS, seconds):
        at = begin
        segments: tuple[Tokens, ...] = (_tokens(rng, _lognormal(rng, 1500, 0.8, 50, 8000)),)
        for _ in range(min(int(rng.geometric(1 / mean_turns)), MAX_TURNS)):
            request = TraceRequest(at, segments, _output(rng, 250))
            requests.append(request)
            message = _tokens(rng, _lognormal(rng, 120, 0.8, 8, 2000))
            segments = (*segments, request.output, message)
            at = request.nominal_end + rng.lognormal(np.log(15.0) - 0.32, 0.8)
    return requests


def agents(rng: Rng, rate: float, seconds: float) -> list[TraceRequest]:
    """20 kinds of agent (3,000 tokens, Zipf 1.0) whose tasks branch four ways, twice.

    A call's four children come within 100 ms after its answer; each continues prompt and
    answer. So a task is 1 + 4 + 16 calls.
    """
    prompts = [_tokens(rng, 3000) for _ in range(20)]
    chosen = _zipf(rng, len(prompts))
    requests: list[TraceRequest] = []

    def call(at: float, segments: tuple[Tokens, ...], depth: int) -> None:
        request = TraceRequest(at, segments, _output(rng))
        requests.append(request)
        if depth < 2:
            after = request.nominal_end + 0.5 + rng.exponential(0.5)
            for delay in rng.uniform(0.0, 0.1, 4):
                order = _tokens(rng, _lognormal(rng, 120, 0.5, 16, 1000))
                call(after + delay, (*segments, request.output, order), depth + 1)

    for at in _poisson(rng, rate / 21, -30.0, seconds):
        task = _tokens(rng, _lognormal(rng, 400, 0.6, 50, 3000))
        call(at, (prompts[chosen()], task), 0)
    return requests


def unshared(rng: Rng, rate: float, seconds: float) -> list[TraceRequest]:
    """No two prompts have anything in common."""
    return [
        TraceRequest(at, (_tokens(rng, _lognormal(rng, 1200, 0.8, 100, 4000)),), _output(rng))
        for at in _poisson(rng, rate, 0.0, seconds)
    ]


BURST_WINDOW_S: Final = 30.0
"""Measured seconds of `burst`: the 20 s, and a little before and after."""

WORKLOADS: Final[Mapping[str, Workload]] = MappingProxyType(
    {
        w.name: w
        for w in (
            Workload("tenants", tenants, SMALL_CACHE, 30.0),
            Workload("chat", chat, SMALL_CACHE, 40.0),
            Workload("agents", agents, SMALL_CACHE, 20.0),
            Workload("unshared", unshared, SMALL_CACHE, 10.0),
            Workload("burst", burst, SMALL_CACHE, 30.0),
            Workload("chat_large", chat, LARGE_CACHE, 40.0),
        )
    }
)


def _poisson(rng: Rng, rate: float, begin: float, end: float) -> list[float]:
    count = int(rng.poisson(rate * (end - begin)))
    times: list[float] = np.sort(rng.uniform(begin, end, count)).tolist()
    return times


def _zipf(rng: Rng, count: int) -> Callable[[], int]:
    """Draws ranks 0..count-1 with weights 1 / (rank + 1)."""
    edges = np.cumsum(1.0 / np.arange(1, count + 1))
    return lambda: int(np.searchsorted(edges, rng.uniform(0.0, edges[-1])))


def _lognormal(rng: Rng, mean: float, sigma: float, low: int, high: int) -> int:
    """A length with this mean before it's cut to [low, high]."""
    return int(np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma), low, high))


def _tokens(rng: Rng, count: int) -> Tokens:
    return rng.integers(0, VOCABULARY, count, dtype=np.int32)


def _tail(rng: Rng) -> Tokens:
    """The tokens that a tenant's user adds."""
    return _tokens(rng, _lognormal(rng, 600, 0.8, 32, 4000))


def _output(rng: Rng, mean: float = 160) -> Tokens:
    return _tokens(rng, _lognormal(rng, mean, 0.7, 8, 1024))
