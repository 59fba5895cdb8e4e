"""Routing policies on simulated fleets: hit rate, time to first token, balance, decision cost.

Replicas have the engine's own RadixCache, kept to a size, under a fluid model of their device;
routers are the very objects that Ray Serve's routers run, fed late cache events.

    python benchmarks/routing.py                      # half an hour of one core
    python benchmarks/routing.py --quick              # a few seconds: does it run?
    python benchmarks/routing.py --sizes 8 --workloads tenants,chat
    python benchmarks/routing.py --decisions          # a minute; wants a quiet machine
    python benchmarks/routing.py --calibrate          # the rates in routing_sim/loads.py anew
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import REPO_ROOT, finish, print_table, save_result
from benchmarks.routing_sim.cell import (
    BASELINE,
    OURS,
    STALE,
    UNRESERVED,
    Cell,
    Run,
    Variant,
    run_cell,
)
from benchmarks.routing_sim.criteria import Criterion, criteria
from benchmarks.routing_sim.decision_cost import (
    SCENARIOS,
    Case,
    DecisionCost,
    hashing_us,
    measure_decisions,
)
from benchmarks.routing_sim.loads import RATES_H, RATES_L, calibrate_h, calibrate_l
from benchmarks.routing_sim.policies import POLICIES
from benchmarks.routing_sim.workloads import WORKLOADS

SIZES = (8, 64)
SEEDS = {8: (2, 3, 4), 64: (2,)}
"""Weights were chosen on seed 1, loads calibrated on seed 0."""
COST_SIZES = ((8, 1), (64, 1), (1024, 1), (1024, 4))
"""Replicas, and the index's sample_every."""
COST_ROUNDS = 100
ROUTERS = (2, 4)
STALE_WORKLOADS = {8: ("tenants", "agents", "burst", "chat_large"), 64: ("tenants", "burst")}
UNRESERVED_WORKLOADS = ("tenants", "burst")
ROUTER_WORKLOADS = {8: ("tenants", "agents", "burst"), 64: ()}
RESULT = REPO_ROOT / "benchmarks" / "results" / "routing.json"
DECISIONS_RESULT = RESULT.with_name("routing-decisions.json")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="numbers of replicas")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--quick", action="store_true", help="one short case and no bounds")
    parser.add_argument("--decisions", action="store_true", help="only what a decision costs")
    parser.add_argument("--calibrate", action="store_true", help="print rates and do no more")
    parser.add_argument("--save", action="store_true", help="write the result")
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    workloads = args.workloads.split(",")
    if args.calibrate:
        calibrate(sizes, workloads)
        return
    cells = [quick_cell()] if args.quick else list(full_cells(sizes, workloads))
    runs = [] if args.decisions else run_all(cells, args.jobs)
    sizes_of_cost = COST_SIZES[:1] if args.quick else COST_SIZES
    cases = [Case(*size, scenario) for size in sizes_of_cost for scenario in SCENARIOS]
    costs = measure_decisions(cases, rounds=5 if args.quick else COST_ROUNDS)
    checks = [] if args.quick else criteria(runs, costs)
    print_runs(runs)
    print_costs(costs)
    print_criteria(checks)
    figures: dict[str, Any] = {
        "runs": [run.plain() for run in runs],
        "decision_us": [asdict(cost) for cost in costs],
        "hashing_us": hashing_us(),
        "criteria": [check.plain() for check in checks],
    }
    ok = all(check.ok for check in checks)
    if args.save:
        save_result(DECISIONS_RESULT if args.decisions else RESULT, figures, ok)
    finish(figures, ok)


def full_cells(sizes: Sequence[int], workloads: Sequence[str]) -> Iterator[Cell]:
    """All policies on the first held-out seed; on other seeds ours and its baselines."""
    for size in sizes:
        for workload in workloads:
            for number, seed in enumerate(SEEDS[size]):
                variants = [Variant(BASELINE), Variant()]
                if number == 0:
                    variants += [Variant(p) for p in POLICIES if p not in (BASELINE, OURS)]
                if workload in STALE_WORKLOADS[size]:
                    variants.append(STALE)
                if workload in UNRESERVED_WORKLOADS:
                    variants.append(UNRESERVED)
                if workload in ROUTER_WORKLOADS[size] and number == 0:
                    variants += [Variant(num_routers=count) for count in ROUTERS]
                rate = RATES_L[size][workload]
                yield Cell(workload, "L", size, seed, rate, tuple(variants))
                if workload in RATES_H.get(size, {}) and number < 2:
                    rate = RATES_H[size][workload]
                    yield Cell(workload, "H", size, seed, rate, tuple(variants[:2]))


def quick_cell() -> Cell:
    """Two policies on two replicas."""
    variants = (Variant(BASELINE), Variant(), Variant("round_robin"))
    return Cell("tenants", "L", 2, SEEDS[8][0], RATES_L[8]["tenants"] / 8, variants)


def run_all(cells: Sequence[Cell], jobs: int) -> list[Run]:
    """Every cell's runs, in the cells' order for any number of processes."""
    runs: list[Run] = []
    start = time.monotonic()
    if jobs == 1:
        results = map(run_cell, cells)
        pool = None
    else:
        pool = multiprocessing.get_context("spawn").Pool(jobs)
        results = pool.imap(run_cell, cells)
    for cell, result in zip(cells, results, strict=True):
        runs += result
        ours = next(run for run in result if run.variant == Variant())
        print(
            f"{time.monotonic() - start:5.0f} s  {cell.workload} {cell.load} N={cell.num_replicas}"
            f" seed {cell.seed}: hit rate {ours.figures.hit_rate:.3f} of {ours.pooled_hit:.3f},"
            f" p99 TTFT {ours.ttft_p99_of_base:.2f} and queue {ours.queued_p99_of_base:.2f} of LL",
            file=sys.stderr,
            flush=True,
        )
    if pool is not None:
        pool.close()
        pool.join()
    return runs


def calibrate(sizes: Sequence[int], workloads: Sequence[str]) -> None:
    for size in sizes:
        for workload in workloads:
            rate = RATES_L[size][workload]
            found = calibrate_l(workload, size, rate)
            print(f"L N={size} {workload}: {rate:g} -> {found:.4g} requests/s", flush=True)
            if workload in RATES_H.get(size, {}):
                rate = RATES_H[size][workload]
                found = calibrate_h(workload, size, rate)
                print(f"H N={size} {workload}: {rate:g} -> {found:.4g} requests/s", flush=True)


def print_runs(runs: Sequence[Run]) -> None:
    headers = [
        "workload", "load", "N", "seed", "policy", "events s", "report s", "routers", "hit rate",
        "/ U2", "p50 ms", "p99 ms", "p99/LL", "queue p99/LL", "max/LL", "busy", "done",
    ]  # fmt: skip
    rows: list[list[object]] = [
        [
            run.cell.workload, run.cell.load, run.cell.num_replicas, run.cell.seed,
            run.variant.policy, run.variant.event_delay_s, run.variant.report_delay_s,
            run.variant.num_routers, run.figures.hit_rate, run.hit_of_pooled,
            run.figures.ttft_ms_p50, run.figures.ttft_ms_p99, run.ttft_p99_of_base,
            run.queued_p99_of_base, run.queued_max_of_base, run.figures.busy,
            run.figures.done_ratio,
        ]
        for run in runs
    ]  # fmt: skip
    print_table(headers, rows)
    print()


def print_costs(costs: Sequence[DecisionCost]) -> None:
    headers = ["N", "sample", "who holds 128 pages", "choose us", "book us", "update us/page"]
    rows: list[list[object]] = [
        [c.num_replicas, c.sample_every, c.scenario, c.choose, c.book, c.update_page] for c in costs
    ]
    print_table(headers, rows)
    print()


def print_criteria(checks: Sequence[Criterion]) -> None:
    headers = ["criterion", "N", "workload", "mean", "worst", "", "limit", "ok"]
    rows: list[list[object]] = [
        [
            c.name, c.num_replicas, c.workload, c.mean, c.worst, ">=" if c.least else "<=",
            c.limit, str(c.ok),
        ]
        for c in checks
    ]  # fmt: skip
    if rows:
        print_table(headers, rows)
        print()


if __name__ == "__main__":
    main()
