"""Where requests with adapters run: Manta's policy beside Ray Serve's for multiplexed models.

Simulated: 8 replicas with room for 8 adapters each, 64 adapters (Zipf 1.0) with prompts of their
own. Reading an adapter takes 0.2 s, one at a time, beside the steps.

    python benchmarks/lora_routing.py            # a minute
    python benchmarks/lora_routing.py --save
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import REPO_ROOT, finish, print_table, save_result
from benchmarks.routing_sim.figures import summarize
from benchmarks.routing_sim.simulator import Scenario, Simulator
from benchmarks.routing_sim.workloads import SMALL_CACHE, Workload, adapters

NUM_REPLICAS = 8
WARM_S, WINDOW_S = 30.0, 60.0
OURS, THEIRS = "prefix_aware", "ray_multiplexed"
MAX_LOADS, MAX_TTFT = 0.5, 1.0
"""Of Ray's."""
RESULT = REPO_ROOT / "benchmarks" / "results" / "lora-routing.json"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rates", default="40,80,120", help="requests per second")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--window", type=float, default=WINDOW_S)
    parser.add_argument("--save", action="store_true", help="write the result")
    args = parser.parse_args(argv)
    workload = Workload("adapters", adapters, SMALL_CACHE, WARM_S)
    rows: list[dict[str, Any]] = []
    for rate in map(float, args.rates.split(",")):
        for seed in map(int, args.seeds.split(",")):
            trace = workload.trace(seed, rate, args.window)
            found = {}
            for policy in (OURS, THEIRS):
                simulator = Simulator(Scenario(policy, NUM_REPLICAS, SMALL_CACHE, seed=seed), trace)
                figures = summarize(simulator.run(), simulator.replicas, trace)
                loads = sum(replica.num_loads for replica in simulator.replicas)
                found[policy] = loads, figures
            (loads, ours), (their_loads, theirs) = found[OURS], found[THEIRS]
            rows.append(
                {
                    "rate": rate,
                    "seed": seed,
                    "loads": loads,
                    "their_loads": their_loads,
                    "hit_rate": ours.hit_rate,
                    "their_hit_rate": theirs.hit_rate,
                    "p99_ms": ours.ttft_ms_p99,
                    "their_p99_ms": theirs.ttft_ms_p99,
                }
            )
    print_table([name.replace("_", " ") for name in rows[0]], [list(r.values()) for r in rows])
    ok = all(
        r["loads"] <= MAX_LOADS * r["their_loads"]
        and r["hit_rate"] >= r["their_hit_rate"]
        and r["p99_ms"] <= MAX_TTFT * r["their_p99_ms"]
        for r in rows
    )
    figures = {"benchmark": "lora-routing", "replicas": NUM_REPLICAS, "rows": rows}
    if args.save:
        save_result(RESULT, figures, ok)
    finish(figures, ok)


if __name__ == "__main__":
    main()
