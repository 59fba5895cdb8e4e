"""Llama shapes of 1B and 8B with random weights on one GPU: how close to the card's limit is Manta?

In this process, without Ray, server and tokenizer. Beside each figure stand the roofline, with
bandwidth and matrix rate measured in the same run; the step's captured kernels in a bare loop;
overlap off; other ways to sample; and `transformers`. Some three minutes on an H100:

    python benchmarks/gpu.py --save
    python benchmarks/gpu.py --models 8b --skip-transformers --set attention_backend=flashinfer-fa3
    python benchmarks/gpu.py --quick --device cpu       # a tiny shape: does the script work?
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.common import REPO_ROOT, finish, print_table, save_result
from benchmarks.gpu_bench.bare import bare_decode
from benchmarks.gpu_bench.card import describe, measure_rates, release
from benchmarks.gpu_bench.engine_runs import EngineRuns
from benchmarks.gpu_bench.peer import TransformersPeer
from benchmarks.gpu_bench.shapes import FULL, QUICK, SHAPES, TINY, CardRates, ModelShape, Plan
from benchmarks.load.arguments import key_value, positive, words
from engine.errors import ConfigError

RESULT = REPO_ROOT / "benchmarks" / "results" / "gpu.json"
MAX_OVER_BARE = 1.15
MAX_OVER_ROOFLINE = 1.35
MAX_MS_1B = 1.5
Row = dict[str, object]


@dataclass
class Report:
    """What was measured, what wasn't, and how much time is left."""

    budget_s: float
    started_at: float = field(default_factory=time.monotonic)
    engines: dict[str, dict[str, object]] = field(default_factory=dict)
    decode: list[Row] = field(default_factory=list)
    prefill: list[Row] = field(default_factory=list)
    serving: list[Row] = field(default_factory=list)
    kernels: list[Row] = field(default_factory=list)
    """Those of a greedy decode step, by model and batch."""
    notes: list[str] = field(default_factory=list)

    def has_time(self, what: str) -> bool:
        """Whether `what` may be measured; if not, a note says so."""
        spent = time.monotonic() - self.started_at
        if spent > self.budget_s:
            self.note(f"{what}: not measured, {spent:.0f} s of {self.budget_s:.0f} s were spent")
            return False
        print(f"[{spent:5.1f} s] {what}", file=sys.stderr, flush=True)
        return True

    def note(self, text: str) -> None:
        """Note that something is missing."""
        self.notes.append(text)
        print(text, file=sys.stderr, flush=True)


class Criterion(NamedTuple):
    """One bound. `value` is None where it wasn't measured."""

    name: str
    value: float | None
    limit: float
    passed: bool


def main(argv: list[str] | None = None) -> bool:
    """Run; returns whether all criteria of the models that were asked for are met."""
    args = parse(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU; --quick --device cpu tries the script without one")
    if device.type == "cpu" and not args.quick:
        raise SystemExit("--device cpu is for --quick only: the models would take hours")
    plan = QUICK if args.quick else FULL
    shapes = [TINY] if args.quick else [SHAPES[name] for name in args.models]
    report = Report(args.budget_s)
    size = (1 << 24, 256) if args.quick else (1 << 31, 8192)
    rates = measure_rates(device, copy_bytes=size[0], matrix=size[1])
    failure: Exception | None = None
    try:
        with tempfile.TemporaryDirectory() as folder:
            for shape in shapes:
                measure_engine(shape, plan, rates, report, Path(folder), device, dict(args.set))
            # This is last, so that an error or a long time here costs no figure of Manta's.
            if not args.skip_transformers:
                for shape in shapes:
                    measure_peer(shape, plan, report, Path(folder), device)
    except Exception as error:
        # Raised again once the figures so far are written: there may be no GPU a second time.
        report.note(f"stopped by {type(error).__name__}: {error}")
        failure = error
    criteria = judge(shapes, report)
    measured = all(shape.name in report.engines for shape in shapes)
    ok = failure is None and measured and all(criterion.passed for criterion in criteria)
    print_report(rates, report, criteria)
    figures: dict[str, object] = {
        "card": describe(device),
        "copy_bytes_per_s": rates.bytes_per_s,
        "matrix_flop_per_s": rates.flop_per_s,
        "plan": plan._asdict(),
        "engines": report.engines,
        "decode": report.decode,
        "prefill": report.prefill,
        "serving": report.serving,
        "kernels": report.kernels,
        "criteria": [criterion._asdict() for criterion in criteria],
        "notes": report.notes,
        "seconds": time.monotonic() - report.started_at,
    }
    if args.save:
        save_result(RESULT, figures, ok)
    finish(figures, ok)
    if failure is not None:
        raise failure
    return ok


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", type=words, default=["1b", "8b"], help="1b, 8b or both")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny shape; no criteria")
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument(
        "--budget-s", type=positive, default=420, help="after it nothing new is begun"
    )
    parser.add_argument(
        "--set",
        type=key_value,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of docs/configuration.md",
    )
    parser.add_argument("--save", action="store_true", help="write the result")
    args = parser.parse_args(argv)
    unknown = [name for name in args.models if name not in SHAPES]
    if unknown:
        parser.error(f"no shape {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    return args


def measure_engine(
    shape: ModelShape,
    plan: Plan,
    rates: CardRates,
    report: Report,
    folder: Path,
    device: torch.device,
    options: dict[str, str],
) -> None:
    """Measure all that an engine of `shape` does; its memory is free again afterwards."""
    if not report.has_time(f"{shape.name}: loading"):
        return
    started = time.monotonic()
    try:
        engine = EngineRuns(shape, plan, folder / shape.name, device.type, options)
    except ConfigError as error:
        report.note(f"{shape.name}: {error}")
        return
    load_s = time.monotonic() - started
    report.engines[shape.name] = {**engine.describe(), "load_s": load_s}
    engine.warm_up()
    for batch in plan.batches:
        if report.has_time(f"{shape.name}: decode of {batch}"):
            report.decode.append(decode_row(engine, shape, batch, rates, report))
    for num_tokens in plan.prompts:
        if report.has_time(f"{shape.name}: prefill of {num_tokens}"):
            figures = engine.prefill(num_tokens)
            roofline = shape.prefill_s(num_tokens, rates) * 1e3
            report.prefill.append(
                {
                    "model": shape.name,
                    "tokens": num_tokens,
                    "wall_ms": figures.wall_ms,
                    "device_ms": figures.device_ms,
                    "roofline_ms": roofline,
                    "over_roofline": figures.wall_ms / roofline,
                    "tokens_per_s": num_tokens / figures.wall_ms * 1e3,
                }
            )
    for overlap in (True, False):
        name = "on" if overlap else "off"
        if report.has_time(f"{shape.name}: serving, overlap {name}"):
            served = engine.serve(overlap=overlap)
            least = shape.serving_s(
                plan.num_requests, plan.concurrency, plan.input_len, plan.output_len, rates
            )
            bound = plan.num_requests * plan.output_len / least
            report.serving.append(
                {
                    "model": shape.name,
                    "overlap": overlap,
                    "tokens_per_s": served.tokens_per_s,
                    "busy": served.busy,
                    "roofline_tokens_per_s": bound,
                    "of_roofline": served.tokens_per_s / bound,
                    "steps": served.num_steps,
                }
            )
    del engine
    gc.collect()
    release(device)


def decode_row(
    engine: EngineRuns, shape: ModelShape, batch: int, rates: CardRates, report: Report
) -> Row:
    """Steps of `batch` rows with overlap, then the same kernels alone, then without overlap, then
    with other ways to sample."""
    on = engine.decode(batch, overlap=True)
    # Run this now: the next run's requests overwrite the pages that it reads.
    bare = bare_decode(engine.worker, on.last, engine.plan.steps)
    off = engine.decode(batch, overlap=False)
    drawn = {
        f"{word}_ms": engine.decode(batch, overlap=True, sampling=word).wall_ms
        for word in ("temperature", "top_p")
    }
    report.kernels.append({"model": shape.name, "batch": batch, "kernels": bare.kernels})
    roofline = shape.decode_s(batch, on.context, rates) * 1e3
    return {
        "model": shape.name,
        "batch": batch,
        "context": on.context,
        "wall_ms": on.wall_ms,
        "device_ms": on.device_ms,
        "busy": on.busy,
        "bare_ms": bare.ms,
        "bare_graph_size": bare.graph_size,
        "roofline_ms": roofline,
        "over_bare": on.wall_ms / bare.ms,
        "over_roofline": on.wall_ms / roofline,
        "tokens_per_s": on.tokens_per_s,
        "overlap_off_wall_ms": off.wall_ms,
        "overlap_off_device_ms": off.device_ms,
        "overlap_off_busy": off.busy,
        **drawn,
        "transformers_ms": None,
    }


def measure_peer(
    shape: ModelShape, plan: Plan, report: Report, folder: Path, device: torch.device
) -> None:
    """Add `transformers_ms` to the rows of `shape`."""
    rows = [r for r in report.decode if r["model"] == shape.name]
    rows = [r for r in rows if r["batch"] in plan.peer_batches]
    if not rows or not report.has_time(f"{shape.name}: transformers, loading"):
        return
    try:
        peer = TransformersPeer(shape, plan, folder / f"{shape.name}-peer", device)
        for row in rows:
            batch = row["batch"]
            if report.has_time(f"{shape.name}: transformers, decode of {batch}"):
                row["transformers_ms"] = peer.decode_ms(int(str(batch)))
        peer.close()
    except torch.OutOfMemoryError as error:
        report.note(f"{shape.name}: transformers ran out of memory: {error}")
    gc.collect()
    release(device)


def judge(shapes: list[ModelShape], report: Report) -> list[Criterion]:
    """The criteria of the shapes that have any."""
    found: list[Criterion] = []

    def check(name: str, model: str, batch: int, key: str, limit: float) -> None:
        row = next((r for r in report.decode if (r["model"], r["batch"]) == (model, batch)), None)
        value = None if row is None else row[key]
        # A loop of single launches doesn't show a bound of the card.
        if row is not None and key == "over_bare" and row["bare_graph_size"] is None:
            value = None
        number = value if isinstance(value, float) else None
        found.append(Criterion(name, number, limit, number is not None and number <= limit))

    names = {shape.name for shape in shapes}
    if "8b" in names:
        check("8B, batch 64: step / bare graph loop", "8b", 64, "over_bare", MAX_OVER_BARE)
        check("8B, batch 64: step / roofline", "8b", 64, "over_roofline", MAX_OVER_ROOFLINE)
    if "1b" in names:
        check("1B, batch 1: ms per token", "1b", 1, "wall_ms", MAX_MS_1B)
    return found


def print_report(rates: CardRates, report: Report, criteria: list[Criterion]) -> None:
    """Print the rates, the rows and the criteria as tables."""
    print(
        f"copy {rates.bytes_per_s / 1e12:.3g} TB/s read and written, bfloat16 matrix product "
        f"{rates.flop_per_s / 1e12:.3g} TFLOP/s"
    )
    for title, rows, columns in (
        (
            "decode, ms per step",
            report.decode,
            {
                "model": "model",
                "batch": "batch",
                "context": "context",
                "wall_ms": "step",
                "device_ms": "device",
                "busy": "busy",
                "bare_ms": "bare",
                "roofline_ms": "roofline",
                "over_bare": "/ bare",
                "over_roofline": "/ roofline",
                "overlap_off_wall_ms": "no overlap",
                "overlap_off_busy": "busy then",
                "temperature_ms": "temperature",
                "top_p_ms": "top_p",
                "transformers_ms": "transformers",
                "tokens_per_s": "tok/s",
            },
        ),
        (
            "prefill of one prompt",
            report.prefill,
            {
                "model": "model",
                "tokens": "tokens",
                "wall_ms": "ms",
                "device_ms": "device",
                "roofline_ms": "roofline",
                "over_roofline": "/ roofline",
                "tokens_per_s": "tok/s",
            },
        ),
        (
            "serving",
            report.serving,
            {
                "model": "model",
                "overlap": "overlap",
                "tokens_per_s": "out tok/s",
                "busy": "busy",
                "roofline_tokens_per_s": "roofline tok/s",
                "of_roofline": "of roofline",
                "steps": "steps",
            },
        ),
    ):
        print(f"\n{title}")
        print_table(list(columns.values()), [[row[key] for key in columns] for row in rows])
    if criteria:
        print("\ncriteria")
        cells = [[c.name, c.value, c.limit, str(c.passed)] for c in criteria]
        print_table(["criterion", "value", "at most", "passed"], cells)
    for note in report.notes:
        print(note)
    print()


if __name__ == "__main__":
    # Shows how memory is used and how long capturing took.
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    main()
