"""100,000 requests against the simulated device: does the scheduler's memory stay flat?

Through the real actors, closed loop, KV room for a fraction of what is asked: prefixes shared and
evicted, long prompts chunked, requests retracted, one in twenty aborted by its client.

    python benchmarks/stress.py                       # six minutes
    python benchmarks/stress.py --requests 10000      # a short one
    python benchmarks/stress.py --drafts              # steps check drafts, 0.7 of which are right
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import REPO_ROOT, finish, print_table, save_result
from benchmarks.engine_driver import Arrivals, EngineDriver
from engine.protocol.sampling_params import SamplingParams

OUTSTANDING = 512
WARM_UP = 0.1
"""Share of the requests after which memory must not grow any more."""
GROWTH_ALLOWED = 0.10
ABORT_EVERY = 20
RESULT = REPO_ROOT / "benchmarks" / "results" / "stress.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--save", action="store_true", help="write the result")
    parser.add_argument("--drafts", action="store_true", help="speculate, up to 4 drafts a row")
    args = parser.parse_args()
    figures = run(args.requests, args.step_ms, drafts=args.drafts)
    rows = [[done, rss] for done, rss in figures["rss_mib"]]
    print_table(["requests ended", "scheduler RSS, MiB"], rows)
    clean = figures["kv_leaks"] == 0 and figures["kv_used"] == 0
    clean &= (figures["accepted_drafts"] > 0) == args.drafts
    ok = figures["growth"] <= GROWTH_ALLOWED and figures["retractions"] > 0 and clean
    print(
        f"growth after warm-up {figures['growth']:.1%}; {figures['requests_per_s']:.0f} requests/s;"
        f" {figures['retractions']:.0f} retractions, {figures['aborted']} aborted"
    )
    if args.save:
        save_result(RESULT.with_stem("stress-drafts") if args.drafts else RESULT, figures, ok)
    finish(figures, ok)


def run(total: int, step_ms: float, *, drafts: bool) -> dict[str, Any]:
    """Send `total` requests, at most `OUTSTANDING` at a time. Returns the figures, with the memory
    at every 50th part."""
    rng = np.random.default_rng(1)
    prefixes = [rng.integers(10, 4000, 200).astype(np.int32) for _ in range(16)]
    with EngineDriver(
        device="simulated",
        simulated={"step_ms": step_ms},
        max_running_requests=256,
        max_queued_requests=OUTSTANDING,
        max_total_tokens=24_000,
        chunked_prefill_size=2048,
        schedule_conservativeness=0.2,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4} if drafts else None,
    ) as driver:
        pid = driver.scheduler_pid()
        every = max(1, total // 50)
        memory: list[tuple[int, float]] = []
        arrivals = Arrivals()
        sent = aborted = 0
        open_requests: set[int] = set()
        started = time.monotonic()
        while len(arrivals.ended) + aborted < total:
            while sent < total and len(open_requests) < OUTSTANDING:
                tail = rng.integers(10, 4000, int(rng.integers(1, 80))).astype(np.int32)
                prompt = tail
                if rng.random() < 0.7:
                    prompt = np.concatenate([prefixes[int(rng.integers(len(prefixes)))], tail])
                # Not ignore_eos: such requests reserve all their output and are never retracted.
                params = SamplingParams(max_tokens=int(rng.integers(1, 256)), temperature=0.0)
                open_requests.update(driver.add([prompt], [params]))
                sent += 1
                if sent % ABORT_EVERY == 0:
                    victim = min(open_requests)
                    driver.abort(victim)
                    open_requests.remove(victim)
                    aborted += 1
            for rid in driver.receive(arrivals):
                if rid in open_requests:
                    open_requests.remove(rid)
                else:
                    # It ended before our abort arrived; count it once.
                    aborted -= 1
            arrivals.messages.clear()
            arrivals.tokens.clear()
            done = len(arrivals.ended) + aborted
            if done >= every * (len(memory) + 1):
                memory.append((done, rss_mib(pid)))
        elapsed = time.monotonic() - started
        time.sleep(1.0)
        stats = driver.stats()
    at_warm_up = next(rss for done, rss in memory if done >= total * WARM_UP)
    return {
        "requests": total,
        "outstanding": OUTSTANDING,
        "step_ms": step_ms,
        "seconds": elapsed,
        "requests_per_s": total / elapsed,
        "rss_mib": memory,
        "growth": max(rss for done, rss in memory if done >= total * WARM_UP) / at_warm_up - 1,
        "aborted": aborted,
        "accepted_drafts": stats.spec_decode_accepted_tokens_total,
        "retractions": stats.retractions_total,
        "kv_leaks": stats.kv_leaks_total,
        "kv_used": stats.kv_used_tokens,
        "steps": stats.steps_total,
    }


def rss_mib(pid: int) -> float:
    """Resident memory of a process on this machine."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} has no VmRSS")


if __name__ == "__main__":
    main()
