"""How busy a device is kept, on a simulated one: overlap and pipeline micro-batching.

Through the real actors and messages: SchedulerActor, one WorkerActor per stage, this process as
the client. The device of each stage takes a set time per step and computes nothing
(`device: simulated`).

    python benchmarks/overlap.py                    # tables, four minutes
    python benchmarks/overlap.py --save             # also results/overlap.json and the picture
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import REPO_ROOT, finish, percentiles, print_table, save_result
from benchmarks.engine_driver import Arrivals, EngineDriver
from engine.protocol.sampling_params import SamplingParams
from engine.trace import RoleTrace, StageSpan

RUNNING = 256
"""Running requests of one-stage cases."""
PIPELINE_ROWS = 128
"""Running requests per micro-batch of pipelines: steps have these rows with and without others."""
PROMPT_LEN = 32
CHUNK = 256
LONG_PROMPT = 1920
BUSY_NEEDED = {10.0: 0.98, 5.0: 0.95}
"""Share of the time that the device must be busy with overlap, by step length in ms."""
PIPELINE_NEEDED = 0.95
ITL_EXTRA_MS = 0.3
RESULT = REPO_ROOT / "benchmarks" / "results" / "overlap.json"
PICTURE = REPO_ROOT / "docs" / "overlap.png"
PICTURE_MS = 60.0


@dataclass
class Case:
    """One engine and one load. `needed`: lower bound of `busy`; None for cases to compare with."""

    name: str
    load: str
    step_ms: float
    stages: int
    overlap: bool
    needed: float | None
    async_depth: int = 0


CASES = [
    Case("overlap", "decode", 10.0, 1, True, BUSY_NEEDED[10.0]),
    Case("no overlap", "decode", 10.0, 1, False, None),
    Case("overlap", "decode", 5.0, 1, True, BUSY_NEEDED[5.0]),
    Case("no overlap", "decode", 5.0, 1, False, None),
    Case("2 stages", "decode", 5.0, 2, True, PIPELINE_NEEDED),
    Case("2 stages, one batch", "decode", 5.0, 2, False, None),
    Case("4 stages", "decode", 5.0, 4, True, PIPELINE_NEEDED),
    Case("4 stages, one batch", "decode", 5.0, 4, False, None),
    Case("2 stages", "prefill", 5.0, 2, True, PIPELINE_NEEDED),
    Case("2 stages, one batch", "prefill", 5.0, 2, False, None),
    Case("4 stages", "prefill", 5.0, 4, True, PIPELINE_NEEDED),
    Case("4 stages, one batch", "prefill", 5.0, 4, False, None),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400, help="decode steps per request")
    parser.add_argument("--async-depth", type=int, default=1, help="pp_async_depth of pipelines")
    parser.add_argument("--rounds", type=int, default=1, help="repeat all cases; medians count")
    parser.add_argument("--save", action="store_true", help="write the result and the picture")
    args = parser.parse_args()

    rows: list[dict[str, Any]] = []
    pictures: dict[str, list[RoleTrace]] = {}
    for case in CASES:
        if case.stages > 1 and case.overlap:
            case.async_depth = args.async_depth
        measured = []
        for _ in range(args.rounds):
            figures, roles = run(case, args.steps)
            measured.append(figures)
        row = {key: float(np.median([m[key] for m in measured])) for key in measured[0]}
        passed = case.needed is None or row["share_of_bound"] >= case.needed
        itl_limit = None
        if case.needed is not None and case.load == "decode" and case.stages == 1:
            itl_limit = max(case.step_ms, row["scheduler_ms"]) + ITL_EXTRA_MS
            passed = passed and row["itl_p50_ms"] <= itl_limit
        rows.append({**vars(case), **row, "itl_limit_ms": itl_limit, "passed": passed})
        print_rows(rows[-1:], header=len(rows) == 1)
        if case.load == "decode" and case.step_ms == 5.0 and case.stages <= 2:
            pictures[f"{case.name}, {case.step_ms:g} ms a step"] = roles
    print()
    print_rows(rows, header=True)
    ok = all(row["passed"] for row in rows)
    figures = {"running": RUNNING, "pipeline_rows": PIPELINE_ROWS, "cases": rows}
    if args.save:
        draw(pictures, PICTURE)
        save_result(RESULT, figures, ok)
    finish(figures, ok)


def run(case: Case, steps: int) -> tuple[dict[str, float], list[RoleTrace]]:
    """Figures of one case and the spans that they come from."""
    rng = np.random.default_rng(0)
    running = RUNNING
    if case.stages > 1:
        running = PIPELINE_ROWS * (case.stages + case.async_depth if case.overlap else 1)
    config: dict[str, Any] = {
        "device": "simulated",
        "simulated": {"step_ms": case.step_ms},
        "pp_size": case.stages,
        "pp_async_depth": case.async_depth,
        "enable_overlap": case.overlap,
        "max_running_requests": running,
        "chunked_prefill_size": CHUNK if case.load == "prefill" else 4096,
    }
    with EngineDriver(**config) as driver:
        count, length, output = running, PROMPT_LEN, steps
        if case.load == "prefill":
            count, length, output = 128, LONG_PROMPT, 1
        prompts = [rng.integers(10, 4000, length).astype(np.int32) for _ in range(count)]
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        arrivals = Arrivals()
        driver.add(prompts, [params] * count)
        driver.collect(arrivals, count)
        roles = driver.trace(8192)
    return measure(case, roles, arrivals), roles


def measure(case: Case, roles: list[RoleTrace], arrivals: Arrivals) -> dict[str, float]:
    """Busy share of every stage, throughput against its bound, and the scheduler's cost.

    Only the steady part counts: decode steps without the first and last tenth; for prefill, all
    chunks without the first and last tenth. The bound: a step ends at the slowest stage every
    `step_ms`, with the rows (decode) or tokens (prefill) that it really had.
    """
    steps = [s for role in roles for s in role.steps]
    mode = "decode" if case.load == "decode" else "extend"
    chosen = [s for s in steps if s.mode == mode]
    edge = len(chosen) // 10
    chosen = chosen[edge : len(chosen) - edge]
    wanted = {s.step for s in chosen}
    stages = [[s for s in role.stages if s.step in wanted] for role in roles if role.stages]
    busy = [share_busy(stage) for stage in stages]
    last = stages[-1]
    window = last[-1].ended_at - last[0].ended_at
    bound_steps = window / (case.step_ms / 1e3)
    share = (len(last) - 1) / bound_steps
    times = np.asarray([at for at, tokens in arrivals.messages if tokens])
    inner = times[len(times) // 10 : -max(1, len(times) // 10)]
    gaps = np.diff(inner) * 1e3
    if case.load == "decode":
        # A request gets a token at each turn of its micro-batch.
        batches = len({s.micro_batch for s in chosen})
        gaps = (inner[batches:] - inner[:-batches]) * 1e3
    scheduler = [(s.sent_at - s.composed_at) + (s.processed_at - s.received_at) for s in chosen]
    return {
        "share_of_bound": share,
        "busy_min": min(busy),
        "busy_max": max(busy),
        "rows_per_step": float(np.mean([s.num_rows for s in chosen])),
        "tokens_per_s": sum(s.num_tokens for s in chosen[1:]) / window,
        "itl_p50_ms": percentiles(gaps)["p50"],
        "itl_p99_ms": percentiles(gaps)["p99"],
        "scheduler_ms": float(np.median(scheduler)) * 1e3,
    }


def share_busy(spans: list[StageSpan]) -> float:
    """Share of the time from the first span's start to the last span's end that spans cover."""
    return sum(s.ended_at - s.started_at for s in spans) / (
        spans[-1].ended_at - spans[0].started_at
    )


def print_rows(rows: list[dict[str, Any]], *, header: bool) -> None:
    """One line per case."""
    headers = [
        "case", "load", "step ms", "of bound", "needed", "busy min", "busy max", "rows", "tok/s",
        "ITL p50", "p99", "sched ms", "ok",
    ]  # fmt: skip
    cells = [
        [
            r["name"], r["load"], r["step_ms"], r["share_of_bound"], r["needed"], r["busy_min"],
            r["busy_max"], r["rows_per_step"], r["tokens_per_s"], r["itl_p50_ms"],
            r["itl_p99_ms"], r["scheduler_ms"], str(r["passed"]),
        ]
        for r in rows
    ]  # fmt: skip
    if header:
        print_table(headers, cells)
    else:
        print(
            "  ".join(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells[0]), flush=True
        )


def draw(pictures: dict[str, list[RoleTrace]], path: Path) -> None:
    """Timelines of some steady milliseconds: the scheduler's work and every stage."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heights = [1 + sum(1 for role in roles if role.stages) for roles in pictures.values()]
    figure, axes = plt.subplots(
        len(pictures),
        1,
        figsize=(11, 0.55 * sum(heights) + 1.1 * len(pictures)),
        gridspec_kw={"height_ratios": heights},
        squeeze=False,
    )
    colours = plt.get_cmap("tab10")
    for axis, (title, roles) in zip(axes[:, 0], pictures.items(), strict=True):
        _draw_roles(axis, roles, colours)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlim(0, PICTURE_MS)
        axis.set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_roles(axis: Any, roles: list[RoleTrace], colours: Any) -> None:
    steps = next(role.steps for role in roles if role.steps)
    offset = next(role.wall_offset_s for role in roles if role.steps)
    start = steps[len(steps) // 2].composed_at + offset
    labels = []
    for y, role in enumerate(sorted(roles, key=lambda r: (bool(r.stages), r.role))):
        labels.append(role.role.removesuffix(".0"))
        bars: list[tuple[float, float, int]] = []
        for s in role.steps:
            bars.append((s.composed_at, s.sent_at, s.micro_batch))
            bars.append((s.received_at, s.processed_at, s.micro_batch))
        bars += [(s.started_at, s.ended_at, s.micro_batch) for s in role.stages]
        for begin, end, micro_batch in bars:
            left = (begin + role.wall_offset_s - start) * 1e3
            width = (end - begin) * 1e3
            if left + width >= 0 and left <= PICTURE_MS:
                axis.barh(
                    y, width, left=left, height=0.7, color=colours(micro_batch), lw=0.6, ec="w"
                )
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()


if __name__ == "__main__":
    main()
