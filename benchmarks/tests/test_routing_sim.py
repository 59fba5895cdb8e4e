"""The simulated fleet of benchmarks/routing.py: what it counts must add up."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common import REPO_ROOT
from benchmarks.routing_sim.cell import OURS, STALE, UNRESERVED, Cell, Run, Variant
from benchmarks.routing_sim.criteria import criteria
from benchmarks.routing_sim.decision_cost import DecisionCost
from benchmarks.routing_sim.figures import Figures, pooled_hit_rate, queued_tokens, summarize
from benchmarks.routing_sim.policies import POLICIES
from benchmarks.routing_sim.replica import RunRecord
from benchmarks.routing_sim.simulator import Scenario, Simulator
from benchmarks.routing_sim.trace import Trace
from benchmarks.routing_sim.workloads import WORKLOADS

REPLICAS = 3
CACHE_TOKENS = 60_000


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Tenants for three replicas: a few hundred requests, more prefixes than a cache holds."""
    return WORKLOADS["tenants"].trace(5, 30.0, 5.0, 3.0)


def simulate(trace: Trace, policy: str, **changes: float) -> tuple[Simulator, list[RunRecord]]:
    simulator = Simulator(Scenario(policy, REPLICAS, CACHE_TOKENS, seed=1, **changes), trace)  # type: ignore[arg-type]
    return simulator, simulator.run()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_request_ends_once_and_nothing_is_negative(trace: Trace, policy: str) -> None:
    simulator, records = simulate(trace, policy)
    seen = Counter(record.request.number for record in records)
    assert seen == Counter(range(len(trace.requests)))
    for record in records:
        arrival = record.request.arrival
        assert arrival <= record.started <= record.first_token <= record.finished
        assert 0 <= record.cached_tokens < record.request.num_prompt
    queued = queued_tokens(records, REPLICAS, trace)
    assert queued.min() >= -1e-6
    assert queued.max() > 0
    for replica in simulator.replicas:
        assert not replica.queue
        assert replica.cache.tree.protected_size == 0
        assert replica.cache.tree.total_size <= CACHE_TOKENS
        # One prefill at a time.
        ends = [end for _, end in replica.busy_s]
        assert all(a <= b for a, (b, _) in zip(ends, replica.busy_s[1:], strict=False))
    assert all(len(router.loads) == 0 for router in simulator.policies)
    figures = summarize(records, simulator.replicas, trace)
    assert 0 < figures.hit_rate <= 1
    assert 0 < figures.busy <= 1


def test_a_run_repeats_exactly(trace: Trace) -> None:
    first, second = (simulate(trace, OURS, num_routers=2)[1] for _ in range(2))
    assert [(r.replica, r.finished) for r in first] == [(r.replica, r.finished) for r in second]


def test_the_index_ends_with_the_pages_that_the_caches_hold(trace: Trace) -> None:
    simulator, _ = simulate(trace, OURS, event_delay_s=2.0)
    index = simulator.policies[0].index
    for replica in simulator.replicas:
        _, blocks = replica.cache.tree.snapshot()
        pages = {page for block in blocks for page in block.block_hashes}
        assert index.pages_of(str(replica.number)) >= pages
        index.load_snapshot(str(replica.number), 1, index.seq_of(str(replica.number)), pages)
    simulator.clock.now += 1000.0
    index.settle("nobody", simulator.clock.now)
    assert index.num_pages == sum(len(index.pages_of(name)) for name in ("0", "1", "2"))


def test_prefix_aware_beats_round_robin_on_tenants(trace: Trace) -> None:
    figures = {}
    for policy in (OURS, "round_robin"):
        simulator, records = simulate(trace, policy)
        figures[policy] = summarize(records, simulator.replicas, trace)
    assert figures[OURS].hit_rate > 1.3 * figures["round_robin"].hit_rate
    assert figures[OURS].ttft_ms_p99 < figures["round_robin"].ttft_ms_p99


def test_routers_that_do_not_book_are_worse(trace: Trace) -> None:
    p99 = []
    for delay in (0.0, 0.25):
        simulator, records = simulate(trace, OURS, report_delay_s=delay)
        assert all(len(router.loads) == 0 for router in simulator.policies)
        p99.append(summarize(records, simulator.replicas, trace).ttft_ms_p99)
    assert p99[1] > 1.2 * p99[0]


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_workloads_share_what_they_say(workload: str) -> None:
    made = WORKLOADS[workload].trace(1, 40.0, 30.0, 5.0)
    assert [r.number for r in made.requests] == list(range(len(made.requests)))
    arrivals = [request.arrival for request in made.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] >= 0 and arrivals[-1] < made.end == 35.0
    assert all(r.counted == (r.arrival >= made.start) for r in made.requests)
    assert len(made.requests) == pytest.approx(40 * 35, rel=0.35)
    hit = pooled_hit_rate(made, 10_000_000)
    assert (hit == 0) == (workload == "unshared")
    assert hit < 1


def test_one_large_replica_has_the_pooled_caches_hit_rate() -> None:
    """Nothing is evicted, and first come is first served: two ways to the same figure."""
    trace = WORKLOADS["tenants"].trace(1, 4.0, 20.0, 5.0)
    simulator = Simulator(Scenario("round_robin", 1, 10_000_000), trace)
    figures = summarize(simulator.run(), simulator.replicas, trace)
    assert 0 < figures.hit_rate == pooled_hit_rate(trace, 10_000_000)


def test_queued_tokens_of_a_known_case() -> None:
    trace = WORKLOADS["unshared"].trace(1, 2.0, 4.0, 0.0)
    simulator = Simulator(Scenario("round_robin", 1, CACHE_TOKENS), trace)
    records = simulator.run()
    queued = queued_tokens(records, 1, trace)[0]
    for point in range(0, len(queued), 7):
        at = 0.02 * point
        expected = 0.0
        for r in records:
            if r.request.arrival <= at < r.first_token:
                done = max(0.0, at - r.started) / (r.first_token - r.started)
                expected += r.uncached_tokens * (1 - done)
        assert queued[point] == pytest.approx(expected, abs=1e-6)
    assert np.any(queued > 0)


def test_criteria_compare_seed_by_seed() -> None:
    def run(variant: Variant, seed: int, hit: float, p99: float) -> Run:
        figures = Figures(100, hit, 10.0, p99, 500.0, 600.0, 0.5, 1.0)
        cell = Cell("tenants", "L", 8, seed, 100.0, (variant,))
        return Run(cell, variant, figures, 0.5, hit / 0.5, p99 / 100.0, 0.9, 1.3)

    runs = [
        *(run(Variant(), seed, hit, p99) for seed, hit, p99 in ((2, 0.48, 80.0), (3, 0.47, 110.0))),
        # Late events: 0.5 points lost on one seed, 2 on the other, p99 1.05 and 1.1 of before.
        *(run(STALE, seed, hit, p99) for seed, hit, p99 in ((3, 0.45, 115.5), (2, 0.475, 88.0))),
        run(UNRESERVED, 3, 0.4, 154.0),
    ]
    checks = {check.name: check for check in criteria(runs, [])}
    found = {
        name: (round(check.mean, 6), round(check.worst, 6), check.ok)
        for name, check in checks.items()
    }
    assert found == {
        "hit rate / U2": (0.95, 0.94, True),
        "p99 TTFT / LL": (0.95, 1.1, True),
        "p99 queued / LL": (0.9, 0.9, True),
        "max queued / LL": (1.3, 1.3, False),
        "2 s late: hit rate lost": (0.0125, 0.02, False),
        "2 s late: p99 TTFT / fresh": (1.075, 1.1, True),
        "unreserved: p99 TTFT / ours": (1.4, 1.4, False),
    }
    slow, update = criteria([], [DecisionCost(1024, 4, "ragged", 61.0, 1.0, 0.1)])
    assert (slow.ok, update.ok) == (False, True)


def test_quick_form_runs() -> None:
    script = Path("benchmarks") / "routing.py"
    done = subprocess.run(
        [sys.executable, str(script), "--quick"],
        cwd=REPO_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert '"policy": "round_robin"' in done.stdout.splitlines()[-1]
