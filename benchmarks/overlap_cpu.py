"""Overlap on and off with a real model on CPU, 32 requests at a time, through the real actors.

Both engines are up at once and take turns (an idle engine uses no CPU), so that a noisy machine is
noisy for both. With fewer compute threads than cores the scheduler has a core to itself.

    python benchmarks/overlap_cpu.py                    # the carried model, three minutes
    python benchmarks/overlap_cpu.py --models models/manta-small,/path/to/model --save
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import REPO_ROOT, finish, print_table, save_result
from benchmarks.engine_driver import Arrivals, EngineDriver
from engine.protocol.sampling_params import SamplingParams

CONCURRENCY = 32
PROMPT_LEN = 64
NOISE = 0.02
"""A ratio of medians above 1 - NOISE counts as "not slower": medians of these runs vary by this."""
RESULT = REPO_ROOT / "benchmarks" / "results" / "overlap-cpu.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default="models/manta-small", help="comma-separated folders")
    parser.add_argument("--threads", default="1,2", help="compute threads, comma-separated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--save", action="store_true", help="write the result")
    args = parser.parse_args()
    rows = []
    for model in args.models.split(","):
        for threads in (int(t) for t in args.threads.split(",")):
            rows.append(compare(model, threads, args.rounds, args.output_len))
    headers = ["model", "threads", "on tok/s", "off tok/s", "on / off", "pairs won", "ok"]
    cells = [
        [
            r["model"],
            r["threads"],
            r["on"],
            r["off"],
            r["ratio"],
            f"{r['won']}/{args.rounds}",
            str(r["passed"]),
        ]
        for r in rows
    ]
    print_table(headers, cells)
    ok = all(r["passed"] for r in rows)
    figures = {"concurrency": CONCURRENCY, "output_len": args.output_len, "rows": rows}
    if args.save:
        save_result(RESULT, figures, ok)
    finish(figures, ok)


def compare(model: str, threads: int, rounds: int, output_len: int) -> dict[str, Any]:
    """Medians of output tokens/s over rounds on, off, off, on, ..."""
    config: dict[str, Any] = {
        "model": model,
        "cpu_threads": threads,
        "dtype": "float32",
        "max_running_requests": CONCURRENCY,
        "max_total_tokens": 16384,
    }
    speeds: dict[bool, list[float]] = {True: [], False: []}
    with (
        EngineDriver(enable_overlap=True, **config) as on,
        EngineDriver(enable_overlap=False, **config) as off,
    ):
        drivers = {True: on, False: off}
        outputs = {}
        for overlap, driver in drivers.items():
            outputs[overlap] = load(driver, 0, output_len)[1]
        if outputs[True] != outputs[False]:
            raise RuntimeError("overlap on and off gave different tokens")
        for i in range(rounds):
            for overlap in (True, False) if i % 2 == 0 else (False, True):
                speeds[overlap].append(load(drivers[overlap], i + 1, output_len)[0])
    median = {overlap: float(np.median(values)) for overlap, values in speeds.items()}
    ratio = median[True] / median[False]
    alone = threads < (os.cpu_count() or 1)
    return {
        "model": Path(model).name,
        "threads": threads,
        "on": median[True],
        "off": median[False],
        "ratio": ratio,
        "rounds_on": speeds[True],
        "rounds_off": speeds[False],
        "won": sum(a > b for a, b in zip(speeds[True], speeds[False], strict=True)),
        "scheduler_core_to_itself": alone,
        "passed": ratio > 1.0 if alone else ratio > 1.0 - NOISE,
    }


def load(driver: EngineDriver, seed: int, output_len: int) -> tuple[float, list[list[int]]]:
    """Output tokens/s of 32 requests at once, and each request's tokens."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(10, 4000, PROMPT_LEN).astype(np.int32) for _ in range(CONCURRENCY)]
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    arrivals = Arrivals()
    started = time.monotonic()
    rids = driver.add(prompts, [params] * CONCURRENCY)
    driver.collect(arrivals, CONCURRENCY)
    seconds = time.monotonic() - started
    return CONCURRENCY * output_len / seconds, [arrivals.tokens[rid] for rid in rids]


if __name__ == "__main__":
    main()
