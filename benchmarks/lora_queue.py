"""How long requests wait where more adapters are asked for than run at once: the scheduler alone,
in simulated time.

10,000 requests of 200 adapters come at random, equally likely (uniform) or as Zipf has it. A step
takes 10 ms and 20 µs for each token, an adapter 50 ms to read, as beside steps. The same requests
are also run with room for all adapters: first come, first served, without a limit. A request's wait
is the time until its first token.

    python benchmarks/lora_queue.py            # ten minutes
    python benchmarks/lora_queue.py --save
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.common import REPO_ROOT, finish, print_table, save_result
from engine.config import EngineConfig
from engine.executor.base import Executor
from engine.loop.engine_core import EngineCore
from engine.protocol.adapters import AdapterLoaded, AdapterRef, DropAdapter, LoadAdapter
from engine.protocol.messages import AddRequest
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.sequence import TokenSequence
from engine.protocol.step import GenerationBatchResult, ModelWorkerBatch, SampleMasks
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scheduler_config import SchedulerConfig

NUM_ADAPTERS = 200
MAX_LORAS = 4
STEP_S, TOKEN_S, LOAD_S = 0.010, 20e-6, 0.050
PROMPT, OUTPUT = range(20, 200), range(5, 40)
LIMIT = 2.0
"""Of a request's wait, beside that without a limit and the adapter's load."""
RESULT = REPO_ROOT / "benchmarks" / "results" / "lora-queue.json"


class Arrival(NamedTuple):
    """A request that comes at `at` seconds."""

    at: float
    adapter: int
    prompt: int
    output: int


class SimulatedTime(Executor):
    """Steps and loads that take a set time."""

    num_kv_tokens = 1 << 20

    def __init__(self) -> None:
        self.now = 0.0
        self._steps: deque[tuple[float, ModelWorkerBatch]] = deque()
        self._free_at = 0.0
        self._loads: list[tuple[float, str]] = []
        self.held: set[str] = set()
        self.most_held = 0

    def clock(self) -> float:
        return self.now

    def launch(self, batch: ModelWorkerBatch) -> None:
        start = max(self.now, self._free_at)
        self._free_at = start + STEP_S + TOKEN_S * len(batch.input_ids)
        self._steps.append((self._free_at, batch))

    def sample(self, masks: SampleMasks) -> None:
        raise NotImplementedError

    def order(self, message: LoadAdapter | DropAdapter) -> None:
        if isinstance(message, LoadAdapter):
            self._loads.append((self.now + LOAD_S, message.adapter.digest))
        else:
            self.held.discard(message.digest)

    def take_loaded(self) -> list[AdapterLoaded]:
        due = [item for item in self._loads if item[0] <= self.now]
        self._loads = [item for item in self._loads if item[0] > self.now]
        self.held |= {digest for _, digest in due}
        self.most_held = max(self.most_held, len(self.held))
        return [AdapterLoaded(0, digest) for _, digest in due]

    def wait(self, timeout_s: float | None) -> GenerationBatchResult | None:
        at, batch = self._steps.popleft()
        self.now = max(self.now, at)
        return GenerationBatchResult(batch.step, [7] * len(batch.sampled_lines))

    def next_load(self) -> float | None:
        """When the next load is done."""
        return min((at for at, _ in self._loads), default=None)

    def shutdown(self) -> None:
        self._steps.clear()


def arrivals(kind: str, count: int, rate: float, seed: int) -> list[Arrival]:
    """`count` requests at `rate` per second on average."""
    rng = random.Random(seed)
    weights = [1.0 if kind == "uniform" else 1 / (n + 1) for n in range(NUM_ADAPTERS)]
    chosen = rng.choices(range(NUM_ADAPTERS), weights, k=count)
    now, found = 0.0, []
    for adapter in chosen:
        now += rng.expovariate(rate)
        found.append(Arrival(now, adapter, rng.choice(PROMPT), rng.choice(OUTPUT)))
    return found


def run(requests: list[Arrival], max_loras: int) -> tuple[list[float], EngineCore]:
    """Seconds until each request's first token."""
    engine = EngineConfig(
        model=str(REPO_ROOT / "models" / "manta-small"),
        lora_folder=".",
        max_loras=max_loras,
        max_cpu_loras=NUM_ADAPTERS,
        max_queued_requests=len(requests),
        schedule_policy="fcfs",
        max_running_requests=256,
    )
    device = SimulatedTime()
    scheduler = Scheduler(SchedulerConfig(engine.resolve(), device.num_kv_tokens))
    core = EngineCore(scheduler, device, clock=device.clock)
    waits = [0.0] * len(requests)
    rng = np.random.default_rng(1)
    coming = deque(enumerate(requests))
    open_requests = 0
    while coming or open_requests:
        while coming and coming[0][1].at <= device.now:
            rid, request = coming.popleft()
            ref = AdapterRef(f"a{request.adapter}", f"d{request.adapter}", "")
            prompt = rng.integers(10, 4000, request.prompt, dtype=np.int32)
            params = SamplingParams(max_tokens=request.output, temperature=0.0, ignore_eos=True)
            sequence = TokenSequence(prompt, params, namespace=ref.namespace(), adapter=ref)
            scheduler.add(AddRequest(rid=rid, sequence=sequence), device.now)
            open_requests += 1
        core.launch_ready()
        if scheduler.num_in_flight:
            core.process_one()
        else:
            next_times = [
                at for at in (device.next_load(), coming[0][1].at if coming else None) if at
            ]
            device.now = max(device.now, min(next_times))
        for _, out in scheduler.take_outputs():
            for rid, _, _ in out.started:
                waits[rid] = device.now - requests[rid].at
            open_requests -= len(out.finished)
    leak = scheduler.check_invariants()
    assert leak is None, leak
    return waits, core


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rates", default="2,4,8", help="requests per second, comma-separated")
    parser.add_argument("--save", action="store_true", help="write the result")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for kind in ("uniform", "zipf"):
        for rate in map(float, args.rates.split(",")):
            requests = arrivals(kind, args.requests, rate, seed=3)
            free, _ = run(requests, NUM_ADAPTERS)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            limited, core = run(requests, MAX_LORAS)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            over = [w / (LIMIT * f + LOAD_S) for w, f in zip(limited, free, strict=True)]
            adapters = core.scheduler.adapters
            assert adapters is not None
            rows.append(
                {
                    "arrivals": kind,
                    "rate": rate,
                    "p50_free_ms": float(np.percentile(free, 50)) * 1e3,
                    "p50_ms": float(np.percentile(limited, 50)) * 1e3,
                    "p99_free_ms": float(np.percentile(free, 99)) * 1e3,
                    "p99_ms": float(np.percentile(limited, 99)) * 1e3,
                    "longest_ms": max(limited) * 1e3,
                    "within": sum(o <= 1 for o in over) / len(over),
                    "loads": adapters.loads_total,
                    "grown_mib": grown / 1024,
                }
            )
    print_table([name.replace("_", " ") for name in rows[0]], [list(r.values()) for r in rows])
    ok = all(row["within"] == 1.0 for row in rows)
    figures = {"benchmark": "lora-queue", "requests": args.requests, "rows": rows}
    if args.save:
        save_result(RESULT, figures, ok)
    finish(figures, ok)


if __name__ == "__main__":
    main()
