"""Routing policies on running servers: the hit rate that replies report, and time to first token.

    python benchmarks/routing_real.py [--policies A,B] [--replicas 3] [--rounds 2] [--save]

Real replicas of the small model behind Ray Serve, one server at a time; each round runs all
policies, in another order. Tenants with prompts of 640 tokens, drawn by Zipf's law, are more than
one replica's cache holds and less than all of them do. `ok`: prefix_aware's hit rate is at least
0.95 of the best one's and its p99 TTFT at most that of power of two.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import REPO_ROOT, completion_body, finish, print_table, save_result
from benchmarks.load.client import analyse
from benchmarks.load.load import run_requests
from benchmarks.routing_sim.policies import POLICIES
from benchmarks.servers import manta_server

RESULT = REPO_ROOT / "benchmarks/results/routing-real.json"
MEASURED = (
    "prefix_aware",
    "serve",
    "power_of_two",
    "round_robin",
    "least_tokens",
    "consistent_hash",
    "ray_prefix_tree",
    "sglang_prefix_tree",
)
TENANTS, PREFIX, TAIL, OUTPUT, VOCAB = 36, 640, (16, 200), (4, 32), 4000
KV_TOKENS = 12288
"""KV tokens of each replica: about 14 tenants' prompts besides the running requests."""
REQUESTS, WARM_UP, RATE = 260, 60, 5.0
"""Requests; the first `WARM_UP` of them, which don't count; arrivals per second."""


@dataclass
class Outcome:
    """Results of one run."""

    prompt: int = 0
    cached: int = 0
    ttft_s: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.cached / self.prompt

    def ttft_ms(self, share: float) -> float:
        ordered = sorted(self.ttft_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3


@dataclass(frozen=True)
class Arrival:
    at_s: float
    prompt: list[int]
    output: int


def arrivals(seed: int) -> list[Arrival]:
    """Poisson arrivals of tenants' requests."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(6, VOCAB) for _ in range(PREFIX)] for _ in range(TENANTS)]
    weights = [1 / (rank + 1) for rank in range(TENANTS)]
    made, at = [], 0.0
    for _ in range(REQUESTS):
        at += rng.expovariate(RATE)
        (prefix,) = rng.choices(prefixes, weights)
        tail = [rng.randrange(6, VOCAB) for _ in range(rng.randint(*TAIL))]
        made.append(Arrival(at, prefix + tail, rng.randint(*OUTPUT)))
    return made


async def drive(url: str, plan: list[Arrival]) -> Outcome:
    """Send each request at its time, also if earlier ones failed."""
    bodies = [completion_body(a.prompt, a.output, return_token_ids=True) for a in plan]
    offsets = [arrival.at_s for arrival in plan]
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        records = await run_requests(session, f"{url}/v1/completions", bodies, offsets, None)
    outcome = Outcome()
    for number, (record, arrival) in enumerate(zip(records, plan, strict=True)):
        result = analyse(record, expected_tokens=arrival.output)
        if result.error is not None:
            raise RuntimeError(result.error)
        if number >= WARM_UP:
            outcome.prompt += result.prompt_tokens
            outcome.cached += result.cached_tokens
            outcome.ttft_s.append(result.ttft)
    return outcome


def run(policy: str, replicas: int, seed: int) -> Outcome:
    """One policy on a server of its own."""
    overrides = {
        "num_replicas": replicas,
        "routing_policy": POLICIES.get(policy, policy),
        "max_total_tokens": KV_TOKENS,
        "cpu_threads": 1,
        "dtype": "float32",
    }
    with manta_server(overrides) as server:
        return asyncio.run(drive(server.base_url, arrivals(seed)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--policies", default=",".join(MEASURED))
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    policies = options.policies.split(",")
    outcomes: dict[str, list[Outcome]] = {policy: [] for policy in policies}
    for number in range(options.rounds):
        for policy in policies if number % 2 == 0 else reversed(policies):
            outcomes[policy].append(run(policy, options.replicas, seed=number))
            done = outcomes[policy][-1]
            print(f"{policy}: hit {done.hit_rate:.3f}, p99 {done.ttft_ms(0.99):.0f} ms", flush=True)
    figures = {
        policy: {
            "hit_rate": statistics.mean(o.hit_rate for o in done),
            "ttft_ms_p50": statistics.mean(o.ttft_ms(0.5) for o in done),
            "ttft_ms_p99": statistics.mean(o.ttft_ms(0.99) for o in done),
            "hit_rates": [o.hit_rate for o in done],
            "ttft_ms_p99s": [o.ttft_ms(0.99) for o in done],
        }
        for policy, done in outcomes.items()
    }
    print_table(
        ["policy", "hit rate", "TTFT p50 ms", "p99"],
        [
            [policy, round(f["hit_rate"], 3), round(f["ttft_ms_p50"]), round(f["ttft_ms_p99"])]
            for policy, f in figures.items()
        ],
    )
    ours = figures.get("prefix_aware")
    ok = ours is not None and ours["hit_rate"] >= 0.95 * max(
        f["hit_rate"] for f in figures.values()
    )
    blind = figures.get("power_of_two")
    if ok and ours and blind:
        ok = ours["ttft_ms_p99"] <= blind["ttft_ms_p99"]
    result: dict[str, object] = {
        "benchmark": "routing_real",
        "replicas": options.replicas,
        "rounds": options.rounds,
        "kv_tokens": KV_TOKENS,
        "policies": figures,
    }
    if options.save:
        save_result(RESULT, result, ok)
    finish(result, ok)


if __name__ == "__main__":
    main()
