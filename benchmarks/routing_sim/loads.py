"""Requests per second that make a fleet as busy as a comparison needs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from benchmarks.routing_sim.figures import pooled_hit_rate, summarize
from benchmarks.routing_sim.replica import (
    CHUNK_TOKENS,
    PREFILL_TOKENS_PER_MS,
    STEP_MS,
    STEP_MS_PER_DECODE,
)
from benchmarks.routing_sim.simulator import Scenario, Simulator
from benchmarks.routing_sim.trace import Trace
from benchmarks.routing_sim.workloads import BURST_WINDOW_S, WORKLOADS

BUSY: Final = 0.75
CALIBRATION_SEED: Final = 0

RATES_L: Final[Mapping[int, Mapping[str, float]]] = MappingProxyType(
    {
        8: {
            "tenants": 102.0,
            "chat": 79.0,
            "agents": 340.0,
            "unshared": 175.0,
            "burst": 124.0,
            "chat_large": 103.0,
        },
        64: {
            "tenants": 835.0,
            "chat": 736.0,
            "agents": 1920.0,
            "unshared": 1403.0,
            "burst": 1000.0,
            "chat_large": 721.0,
        },
    }
)
"""Requests a second by replicas and workload, from calibrate_l: round robin is 75 % busy."""

RATES_H: Final[Mapping[int, Mapping[str, float]]] = MappingProxyType(
    {8: {"tenants": 152.0, "burst": 172.0}}
)
"""From calibrate_h: 75 % busy if every replica had the pooled cache's hit rate."""


def window_s(workload: str, num_replicas: int) -> tuple[float, float]:
    """Seconds before measuring and seconds measured. Both are shorter in large fleets, which see
    more requests."""
    warm = WORKLOADS[workload].warm_s
    measured = 30.0
    if num_replicas > 8:
        warm, measured = warm / 2, 8.0
    return warm, BURST_WINDOW_S if workload == "burst" else measured


def make_trace(workload: str, num_replicas: int, rate: float, seed: int) -> Trace:
    warm, measured = window_s(workload, num_replicas)
    return WORKLOADS[workload].trace(seed, rate, measured, warm)


def calibrate_l(workload: str, num_replicas: int, rate: float) -> float:
    """Requests a second that keep round robin BUSY, from how busy it is at this rate."""
    trace = make_trace(workload, num_replicas, rate, CALIBRATION_SEED)
    scenario = Scenario("round_robin", num_replicas, WORKLOADS[workload].cache_tokens)
    simulator = Simulator(scenario, trace)
    return rate * BUSY / summarize(simulator.run(), simulator.replicas, trace).busy


def calibrate_h(workload: str, num_replicas: int, rate: float) -> float:
    """Requests a second that need BUSY of all prefill time at the pooled cache's hit rate.

    A token's time depends on the decodes beside it, which are rate * output * step (Little).
    """
    trace = make_trace(workload, num_replicas, rate, CALIBRATION_SEED)
    hit = pooled_hit_rate(trace, num_replicas * WORKLOADS[workload].cache_tokens)
    uncached = (1 - hit) * float(np.mean([request.num_prompt for request in trace.counted]))
    output = float(np.mean([len(request.output) for request in trace.counted]))
    prefill_ms = BUSY * CHUNK_TOKENS / PREFILL_TOKENS_PER_MS
    for _ in range(20):
        per_ms = rate * output / num_replicas / 1e3
        decodes = per_ms * (STEP_MS + prefill_ms) / (1 - STEP_MS_PER_DECODE * per_ms)
        overhead = (STEP_MS + STEP_MS_PER_DECODE * decodes) / CHUNK_TOKENS
        rate = BUSY * num_replicas / (uncached * (1 / PREFILL_TOKENS_PER_MS + overhead) / 1e3)
    return rate
