"""What a grammar in one micro-batch costs the other micro-batch, on a simulated pipeline.

Two stages, two micro-batches: the first has free requests alone. The second has free requests too,
or one constrained request among them, or constrained requests alone. One engine, through the real
actors and messages; its loads take turns, so that a noisy machine is noisy for all. The device of
each stage takes a set time per step and computes nothing (`device: simulated`), so what is measured
is what masks hold up: the scheduler's process and the order of the steps.

    python benchmarks/structured_pipeline.py          # tables, three minutes
    python benchmarks/structured_pipeline.py --save   # also results/structured-pipeline.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import REPO_ROOT, finish, print_table, save_result
from benchmarks.engine_driver import Arrivals, EngineDriver
from engine.constraints import ConstraintSpec, structured
from engine.protocol.sampling_params import SamplingParams

PROMPT_LEN = 32
NEEDED = 0.98
"""Share of its tokens/s that the free micro-batch must keep beside one constrained request."""
ATTEMPTS = 30
RESULT = REPO_ROOT / "benchmarks" / "results" / "structured-pipeline.json"
RECORDS: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0, "maximum": 9999},
            "name": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["alpha", "beta", "gamma"]},
            "ok": {"type": "boolean"},
        },
        "required": ["id", "name", "kind", "ok"],
        "additionalProperties": False,
    },
    "minItems": 500,
}
"""Its outputs don't end before any output length here."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--step-ms", default="5,10", help="length of a step, comma-separated")
    parser.add_argument("--rows", type=int, default=32, help="requests of each micro-batch")
    parser.add_argument("--steps", type=int, default=400, help="decode steps of each request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write the result")
    args = parser.parse_args()
    rows = [
        row
        for step_ms in (float(ms) for ms in args.step_ms.split(","))
        for row in compare(step_ms, args.rows, args.steps, args.rounds)
    ]
    headers = [
        "step ms",
        "other micro-batch",
        "free tok/s",
        "of none",
        "its tok/s",
        "of none",
        "ok",
    ]
    cells = [
        [r["step_ms"], r["other"], r["free"], r["ratio"], r["its"], r["its_ratio"], str(r["ok"])]
        for r in rows
    ]
    print_table(headers, cells)
    ok = all(row["ok"] for row in rows)
    figures = {"rows": args.rows, "steps": args.steps, "rounds": args.rounds, "loads": rows}
    if args.save:
        save_result(RESULT, figures, ok)
    finish(figures, ok)


def compare(step_ms: float, rows: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Medians over the rounds of tokens/s of both micro-batches, for each load."""
    loads = {"no grammar": 0, "one constrained request": 1, "constrained requests alone": rows}
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in loads}
    config: dict[str, Any] = {
        "device": "simulated",
        "simulated": {"step_ms": step_ms},
        "pp_size": 2,
        "max_running_requests": 2 * rows,
    }
    with EngineDriver(**config) as driver:
        for constrained in loads.values():
            run(driver, rows, min(steps, 50), constrained)  # warm-up
        for i in range(rounds):
            order = list(loads) if i % 2 == 0 else list(loads)[::-1]
            for name in order:
                speeds[name].append(run(driver, rows, steps, loads[name]))
    medians = {name: np.median(values, axis=0).tolist() for name, values in speeds.items()}
    base = medians["no grammar"]
    return [
        {
            "step_ms": step_ms,
            "other": name,
            "free": free,
            "ratio": free / base[0],
            "its": its,
            "its_ratio": its / base[1],
            "rounds": speeds[name],
            "ok": loads[name] > 1 or free / base[0] >= NEEDED,
        }
        for name, (free, its) in medians.items()
    ]


def run(driver: EngineDriver, rows: int, steps: int, constrained: int) -> tuple[float, float]:
    """Tokens/s of the free micro-batch and of the other, without their first and last tenth.

    Requests join whichever micro-batch has a place, so it is tried until they came as two groups.
    Raises `RuntimeError` if they never do.
    """
    for _ in range(ATTEMPTS):
        arrivals = Arrivals()
        groups = add_groups(driver, arrivals, rows, steps, constrained)
        every = groups[0] | groups[1]
        times: tuple[list[float], list[float]] = ([], [])
        while every - arrivals.ended.keys():
            before = {rid: len(tokens) for rid, tokens in arrivals.tokens.items()}
            driver.receive(arrivals)
            came = {rid for rid, got in arrivals.tokens.items() if len(got) > before.get(rid, 0)}
            mine = [len(came & group) for group in groups]
            if min(mine):
                break
            if rows in mine:
                times[mine.index(rows)].append(arrivals.messages[-1][0])
        else:
            return speed(times[0], rows), speed(times[1], rows)
        for rid in every:
            driver.abort(rid)
    raise RuntimeError("the two groups of requests never were two micro-batches")


def add_groups(
    driver: EngineDriver, arrivals: Arrivals, rows: int, steps: int, constrained: int
) -> tuple[set[int], set[int]]:
    """Send one request of each group; once they run, the others. Returns their ids."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 4000, PROMPT_LEN).astype(np.int32) for _ in range(2 * rows)]
    spec = structured.json_schema(RECORDS)
    free = [params(steps, None)] * rows
    other = [params(steps, spec)] * constrained + [params(steps, None)] * (rows - constrained)
    groups: tuple[set[int], set[int]] = (set(), set())
    for group, given in zip(groups, (free, other), strict=True):
        (rid,) = driver.add(prompts[:1], given[:1])
        group.add(rid)
        while rid not in arrivals.tokens:
            driver.receive(arrivals)
    groups[0].update(driver.add(prompts[2 : rows + 1], free[1:]))
    groups[1].update(driver.add(prompts[rows + 1 :], other[1:]))
    return groups


def params(steps: int, spec: ConstraintSpec | None) -> SamplingParams:
    free = spec is None  # the constrained ones can't end before
    return SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=free, constraint=spec)


def speed(times: list[float], rows: int) -> float:
    """Tokens/s of a micro-batch whose steps came at `times`, without the first and last tenth."""
    edge = len(times) // 10
    inner = times[edge : len(times) - edge]
    return rows * (len(inner) - 1) / (inner[-1] - inner[0])


if __name__ == "__main__":
    main()
