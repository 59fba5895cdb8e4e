"""Several policies on one trace, compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from benchmarks.routing_sim.figures import Figures, pooled_hit_rate, summarize
from benchmarks.routing_sim.loads import make_trace
from benchmarks.routing_sim.simulator import Scenario, Simulator
from benchmarks.routing_sim.workloads import WORKLOADS

BASELINE: Final = "least_tokens"
OURS: Final = "prefix_aware"
STALE_S: Final = 2.0
REPORT_S: Final = 0.05
"""Age of load reports where a router doesn't book what it sends; cache events have the same age."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy, and its differences from the usual case."""

    policy: str = OURS
    event_delay_s: float = 0.05
    report_delay_s: float = 0.0
    num_routers: int = 1


STALE: Final = Variant(event_delay_s=STALE_S)
UNRESERVED: Final = Variant(report_delay_s=REPORT_S)


@dataclass(frozen=True, slots=True)
class Cell:
    """One trace and its variants. load: L or H, see loads; rate: requests per second."""

    workload: str
    load: str
    num_replicas: int
    seed: int
    rate: float
    variants: tuple[Variant, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Results of one variant.

    Fields:
        pooled_hit: U2, the hit rate of one cache of the fleet's size on the same trace.
        hit_of_pooled: hit rate / U2; None where nothing can be hit.
        ttft_p99_of_base, queued_p99_of_base, queued_max_of_base: the same figure / that of
            BASELINE on the same trace.
    """

    cell: Cell = field(repr=False)
    variant: Variant
    figures: Figures
    pooled_hit: float
    hit_of_pooled: float | None
    ttft_p99_of_base: float
    queued_p99_of_base: float
    queued_max_of_base: float

    def plain(self) -> dict[str, Any]:
        """The run as a flat mapping, for JSON."""
        cell, rest = asdict(self.cell), asdict(self)
        del cell["variants"], rest["cell"]
        return {**cell, **rest.pop("variant"), **rest.pop("figures"), **rest}


def run_cell(cell: Cell) -> list[Run]:
    """Every variant, in order; BASELINE must be among them.

    Deterministic: the same cell gives the same figures on any machine.
    """
    trace = make_trace(cell.workload, cell.num_replicas, cell.rate, cell.seed)
    cache_tokens = WORKLOADS[cell.workload].cache_tokens
    pooled = pooled_hit_rate(trace, cell.num_replicas * cache_tokens)
    results: dict[Variant, Figures] = {}
    for variant in cell.variants:
        scenario = Scenario(
            variant.policy,
            cell.num_replicas,
            cache_tokens,
            num_routers=variant.num_routers,
            event_delay_s=variant.event_delay_s,
            report_delay_s=variant.report_delay_s,
            seed=cell.seed,
        )
        simulator = Simulator(scenario, trace)
        results[variant] = summarize(simulator.run(), simulator.replicas, trace)
    base = results[Variant(BASELINE)]
    return [_compared(cell, variant, got, pooled, base) for variant, got in results.items()]


def select(
    runs: Sequence[Run],
    workload: str,
    num_replicas: int,
    variant: Variant | None = None,
    load: str = "L",
) -> list[Run]:
    """The runs of a variant (by default ours as it is), one per seed."""
    wanted = variant or Variant()
    return [
        run
        for run in runs
        if run.variant == wanted
        and (run.cell.workload, run.cell.num_replicas, run.cell.load)
        == (workload, num_replicas, load)
    ]


def _compared(cell: Cell, variant: Variant, got: Figures, pooled: float, base: Figures) -> Run:
    return Run(
        cell,
        variant,
        got,
        pooled,
        got.hit_rate / pooled if pooled else None,
        got.ttft_ms_p99 / base.ttft_ms_p99,
        got.queued_p99 / base.queued_p99,
        got.queued_max / base.queued_max,
    )
