"""The figures of a simulated run."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.routing_sim.replica import CacheModel, Replica, RunRecord
from benchmarks.routing_sim.trace import Trace

GRID_S = 0.02


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the requests that arrive in the window, and of the replicas in it.

    Fields:
        hit_rate: cached prompt tokens / prompt tokens.
        ttft_ms_p50, ttft_ms_p99: arrival to first token.
        queued_p99: of uncached tokens queued or in prefill, over replicas and a grid of 20 ms.
        queued_max: the maximum of the same.
        busy: share of time that replicas prefill.
        done_ratio: requests that end in the window / that arrive in it.
    """

    requests: int
    hit_rate: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    queued_p99: float
    queued_max: float
    busy: float
    done_ratio: float


def summarize(records: Sequence[RunRecord], replicas: Sequence[Replica], trace: Trace) -> Figures:
    counted = [record for record in records if record.request.counted]
    ttft = np.array([r.first_token - r.request.arrival for r in counted]) * 1e3
    queued = queued_tokens(records, len(replicas), trace)
    done = sum(trace.start <= record.finished < trace.end for record in records)
    busy = sum(
        max(0.0, min(end, trace.end) - max(begin, trace.start))
        for replica in replicas
        for begin, end in replica.busy_s
    )
    return Figures(
        requests=len(counted),
        hit_rate=_hit_rate(counted),
        ttft_ms_p50=float(np.percentile(ttft, 50)),
        ttft_ms_p99=float(np.percentile(ttft, 99)),
        queued_p99=float(np.percentile(queued, 99)),
        queued_max=float(queued.max()),
        busy=busy / (len(replicas) * (trace.end - trace.start)),
        done_ratio=done / len(counted),
    )


def queued_tokens(records: Sequence[RunRecord], num_replicas: int, trace: Trace) -> np.ndarray:
    """Uncached prompt tokens not computed yet, [num_replicas, grid points in the window]."""
    points = int((trace.end - trace.start) / GRID_S)
    times = trace.start + GRID_S * np.arange(points)
    change = np.zeros((num_replicas, points + 1))
    progress = np.zeros((num_replicas, points))
    for record in records:
        tokens = record.uncached_tokens
        arrival, started, ended = (
            int(np.searchsorted(times, at))
            for at in (record.request.arrival, record.started, record.first_token)
        )
        change[record.replica, arrival] += tokens
        change[record.replica, ended] -= tokens
        if started < ended:
            elapsed = times[started:ended] - record.started
            done = tokens * elapsed / (record.first_token - record.started)
            progress[record.replica, started:ended] += done
    return change.cumsum(axis=1)[:, :points] - progress


def pooled_hit_rate(trace: Trace, cache_tokens: int) -> float:
    """U2: the hit rate of one cache of this size that sees all requests, with no load at all.

    Each request touches it twice: at its arrival, and when its output would be complete at
    20 ms a token. It is a reference and no strict maximum: separate caches, which see fewer
    requests, sometimes forget less.
    """
    cache = CacheModel(cache_tokens)
    ends: list[tuple[float, int]] = []
    cached = total = 0
    for request in trace.requests:
        while ends and ends[0][0] <= request.arrival:
            cache.insert(trace.requests[heapq.heappop(ends)[1]].whole())
        prompt = request.prompt()
        if request.counted:
            cached += cache.match(prompt)[0]
            total += len(prompt)
        cache.insert(prompt)
        heapq.heappush(ends, (request.nominal_end, request.number))
    return cached / total


def _hit_rate(records: Sequence[RunRecord]) -> float:
    prompt = sum(record.request.num_prompt for record in records)
    return sum(record.cached_tokens for record in records) / prompt
