"""The figures that the prefix-aware policy must reach, and whether it does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks.routing_sim.cell import STALE, UNRESERVED, Run, Variant, select
from benchmarks.routing_sim.decision_cost import DecisionCost
from benchmarks.routing_sim.figures import Figures
from benchmarks.routing_sim.workloads import WORKLOADS

LEAST_HIT: Final = {
    "tenants": 0.95,
    "agents": 0.95,
    "burst": 0.95,
    "chat_large": 0.95,
    "chat": 0.85,
}
"""Least hit rate as a share of the pooled cache's hit rate."""
MOST_TTFT: Final = {"burst": 0.7, "unshared": 1.05}
"""Most TTFT p99 relative to that of the shortest queue; 1 for other workloads."""
MOST_QUEUED_P99: Final = {"unshared": 1.05}
MOST_QUEUED_MAX: Final = 1.25
LEAST_DONE_H: Final = 0.95
MOST_TTFT_MS_H: Final = 600.0
LEAST_HIT_H: Final = 0.93
STALE_HIT_LOSS: Final = 0.01
STALE_TTFT: Final = 1.15
UNRESERVED_TTFT: Final = 1.5
MOST_CHOOSE_US: Final = {(8, 1): 30.0, (64, 1): 30.0, (1024, 1): 60.0, (1024, 4): 60.0}
"""Most microseconds per choice, by replicas and the index's sample_every."""
MOST_UPDATE_US: Final = 0.5


@dataclass(frozen=True, slots=True)
class Criterion:
    """A bound that the mean over seeds has to keep; a single seed may miss it by chance.

    Fields:
        least: True if the mean mustn't be below the limit, False if it mustn't be above.
        values: one for each seed.
    """

    name: str
    num_replicas: int
    workload: str
    least: bool
    limit: float
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def worst(self) -> float:
        return min(self.values) if self.least else max(self.values)

    @property
    def ok(self) -> bool:
        return self.mean >= self.limit if self.least else self.mean <= self.limit

    def plain(self) -> dict[str, Any]:
        """The criterion as plain values, for JSON."""
        return {**asdict(self), "mean": self.mean, "worst": self.worst, "ok": self.ok}


def criteria(runs: Sequence[Run], costs: Sequence[DecisionCost]) -> list[Criterion]:
    """All criteria that these runs and costs can decide."""
    sizes = sorted({run.cell.num_replicas for run in runs})
    found: list[Criterion] = []
    for size in sizes:
        for workload in WORKLOADS:
            found += _load_l(runs, workload, size)
            found += _load_h(runs, workload, size)
            found += _stale(runs, workload, size)
            found += _unreserved(runs, workload, size)
    for cost in costs:
        limit = MOST_CHOOSE_US.get((cost.num_replicas, cost.sample_every))
        if limit is not None:
            where = (cost.num_replicas, cost.scenario)
            found.append(Criterion("choose, us", *where, False, limit, (cost.choose,)))
            found.append(
                Criterion("update a page, us", *where, False, MOST_UPDATE_US, (cost.update_page,))
            )
    return found


def _load_l(runs: Sequence[Run], workload: str, size: int) -> Iterator[Criterion]:
    ours = select(runs, workload, size)
    if not ours:
        return
    if workload in LEAST_HIT:
        yield Criterion(
            "hit rate / U2", size, workload, True, LEAST_HIT[workload], _hits_of_pooled(ours)
        )
    yield Criterion(
        "p99 TTFT / LL",
        size,
        workload,
        False,
        MOST_TTFT.get(workload, 1.0),
        tuple(run.ttft_p99_of_base for run in ours),
    )
    yield Criterion(
        "p99 queued / LL",
        size,
        workload,
        False,
        MOST_QUEUED_P99.get(workload, 1.0),
        tuple(run.queued_p99_of_base for run in ours),
    )
    most = tuple(run.queued_max_of_base for run in ours)
    yield Criterion("max queued / LL", size, workload, False, MOST_QUEUED_MAX, most)


def _load_h(runs: Sequence[Run], workload: str, size: int) -> Iterator[Criterion]:
    ours = select(runs, workload, size, load="H")
    if not ours:
        return
    done = tuple(run.figures.done_ratio for run in ours)
    yield Criterion("H: done / arrived", size, workload, True, LEAST_DONE_H, done)
    ttft = tuple(run.figures.ttft_ms_p99 for run in ours)
    yield Criterion("H: p99 TTFT, ms", size, workload, False, MOST_TTFT_MS_H, ttft)
    yield Criterion("H: hit rate / U2", size, workload, True, LEAST_HIT_H, _hits_of_pooled(ours))


def _stale(runs: Sequence[Run], workload: str, size: int) -> Iterator[Criterion]:
    pairs = _pairs(runs, workload, size, STALE)
    if not pairs:
        return
    loss = tuple(fresh.hit_rate - late.hit_rate for late, fresh in pairs)
    yield Criterion("2 s late: hit rate lost", size, workload, False, STALE_HIT_LOSS, loss)
    ttft = tuple(late.ttft_ms_p99 / fresh.ttft_ms_p99 for late, fresh in pairs)
    yield Criterion("2 s late: p99 TTFT / fresh", size, workload, False, STALE_TTFT, ttft)


def _unreserved(runs: Sequence[Run], workload: str, size: int) -> Iterator[Criterion]:
    """Criteria that show that these figures would reveal a router that doesn't reserve."""
    pairs = _pairs(runs, workload, size, UNRESERVED)
    if pairs:
        ratio = tuple(late.ttft_ms_p99 / ours.ttft_ms_p99 for late, ours in pairs)
        name = "unreserved: p99 TTFT / ours"
        yield Criterion(name, size, workload, True, UNRESERVED_TTFT, ratio)


def _hits_of_pooled(runs: Sequence[Run]) -> tuple[float, ...]:
    return tuple(run.hit_of_pooled for run in runs if run.hit_of_pooled is not None)


def _pairs(
    runs: Sequence[Run], workload: str, size: int, variant: Variant
) -> list[tuple[Figures, Figures]]:
    """Pairs of the variant's run and of our unchanged policy's run, one for each seed."""
    ours = {run.cell.seed: run.figures for run in select(runs, workload, size)}
    return [(run.figures, ours[run.cell.seed]) for run in select(runs, workload, size, variant)]
