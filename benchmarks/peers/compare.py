"""Manta and vLLM (CPU build) side by side: same model files, cores, compute threads and prompts.

    python benchmarks/peers/compare.py             # sets up what is missing, then measures

Each round starts one server after the other (never two at once), measures it at every
concurrency with fresh random prompts, and stops it; rounds repeat A B A B. Ratios are of medians
over rounds, between rows of the same model, dtype, number of compute threads and `--impls`: the
engine's own model code, or that of transformers. With both, each engine's ratios between them are
printed, too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import PEERS, REPO_ROOT, environment, finish, print_table
from benchmarks.load.arguments import key_value, naturals, positive, positives, words
from benchmarks.load.command import Target, measure
from benchmarks.load.load import Workload
from benchmarks.load.report import RunReport, medians, print_reports
from benchmarks.peers import models, vllm_cpu
from benchmarks.servers import ManagedServer, ServerError, exit_on_sigterm, manta_server

SAVE_TO = REPO_ROOT / "benchmarks" / "results" / "peers.json"
PAGE_SIZE = 32  # the smallest that vLLM's CPU attention takes
MAX_MODEL_LEN = 2048
MAX_RUNNING = 64
KV_GIB = 2
MAX_TOTAL_TOKENS = 65_536
WARMUP_REQUESTS = 8
START_TIMEOUT_S = 900.0  # vLLM's first start of a model compiles it for minutes

SAME = (
    "model files, dtype, cores, number of compute threads, prompts, greedy sampling, exact output "
    f"length, prefix cache on (prompts share nothing), {PAGE_SIZE}-token pages, at most "
    f"{MAX_RUNNING} running requests, client on the same cores, streaming /v1/completions "
    "with token ids in and out"
)
DIFFERENT = (
    "vLLM compiles the model with torch.compile and runs on Intel's OpenMP with 5 ms block time "
    "and threads pinned to cores; with one thread fewer than cores it leaves the last core to its "
    "other processes (its default), else its processes share the cores with the compute threads",
    "vLLM serves from one API process, an engine process and a worker process on shared memory; "
    "Manta serves through Ray Serve's proxy and the processes of a Ray cluster on one node",
    f"vLLM has {KV_GIB} GiB for KV, Manta {MAX_TOTAL_TOKENS} tokens; neither runs full here",
    "token budgets of a step (chunked prefill) are each engine's default",
)


@dataclass(frozen=True)
class Contender:
    """One row: an engine with its threads and dtype, and whose code of the model it runs."""

    engine: str
    threads: int
    dtype: str
    impl: str = "auto"

    @property
    def name(self) -> str:
        of_model = "" if self.impl == "auto" else f" {self.impl}"
        return f"{self.engine} {self.threads}t {self.dtype}{of_model}"


class Cell(NamedTuple):
    """A group of figures: medians are taken over the rounds of a cell."""

    model: str
    concurrency: int
    contender: Contender


Results = dict[Cell, list[RunReport]]


def main() -> int:
    args = parse_arguments(sys.argv[1:])
    exit_on_sigterm()
    os.sched_setaffinity(0, args.cores)  # the servers started from here inherit it
    figures: dict[str, object] = {
        "benchmark": "peers",
        "vllm_cpu": vllm_cpu.VERSION,
        "cores": args.cores,
        "same": SAME,
        "different": DIFFERENT,
    }
    results: Results = {}
    starts: list[object] = []
    try:
        paths = model_paths(args.models)
        figures["models"] = {path.name: models.fingerprint(path) for path in paths}
        measure_all(args, paths, results, starts)
        ok = all(report.failed == 0 for reports in results.values() for report in reports)
    except (ServerError, vllm_cpu.PeerSetupError) as error:
        print(f"FAILED: {error}", file=sys.stderr)
        figures["error"] = str(error)
        ok = False
    print_results(results)
    ratios = compare(results)
    print_ratios(ratios)
    figures["transformers_by_native"] = losses = compare_impls(results)
    print_losses(losses)
    print(f"\nSame for both: {SAME}.\nDifferent:")
    for difference in DIFFERENT:
        print(f"- {difference}")
    figures["cells"] = [
        {
            "model": cell.model,
            "concurrency": cell.concurrency,
            **vars(cell.contender),
            "medians": medians(reports),
            "rounds": [report.figures() for report in reports],
        }
        for cell, reports in results.items()
    ]
    figures["ratios"] = ratios
    figures["starts"] = starts
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        saved = {**figures, "environment": environment(), "ok": ok}
        args.save.write_text(json.dumps(saved, indent=1) + "\n")
    finish(figures, ok)
    return 0 if ok else 1


def model_paths(names: Sequence[str]) -> list[Path]:
    """Folders of the models: those of `models.SHAPES` are built when missing, others are folders
    in `models/`."""
    return [
        models.build(name, PEERS / "models" / name)
        if name in models.SHAPES
        else REPO_ROOT / "models" / name
        for name in names
    ]


def contenders(args: argparse.Namespace) -> list[Contender]:
    """The rows in the order in which a round runs them: engines alternate."""
    rows = [
        Contender(engine, threads, args.dtype, impl)
        for threads, impl, engine in product(args.threads, args.impls, args.engines)
    ]
    if args.vllm_extra_dtype:
        rows += [Contender("vllm", threads, args.vllm_extra_dtype) for threads in args.threads]
    return rows


def measure_all(
    args: argparse.Namespace, paths: Sequence[Path], results: Results, starts: list[object]
) -> None:
    """Run every round and add to `results` and `starts`, so that a failure keeps earlier figures.

    `starts` has each server's load average before its start and the time until it was ready.
    Raises `ServerError` if a server did not start, `PeerSetupError` if the peer's environment could
    not be built.
    """
    for number, path, contender in product(range(args.rounds), paths, contenders(args)):
        name = f"{path.name} {contender.name} #{number + 1}"
        load = round(os.getloadavg()[0], 2)
        print(f"starting {name} (load {load})", file=sys.stderr, flush=True)
        with start(contender, path, args) as server:
            starts.append({"server": name, "load_1min": load, "ready_s": server.ready_s})
            target = Target(server.base_url, path.name, return_token_ids=True)
            for report in measure_server(args, target, server, number, name):
                assert report.concurrency is not None
                cell = Cell(path.name, report.concurrency, contender)
                results.setdefault(cell, []).append(report)


def measure_server(
    args: argparse.Namespace, target: Target, server: ManagedServer, number: int, name: str
) -> Iterator[RunReport]:
    """Measure one running server at every concurrency; the seed depends on the round alone."""
    for concurrency in args.concurrency:
        load = Workload(
            num_prompts=args.num_prompts,
            input_len=args.input_len,
            output_len=args.output_len,
            concurrency=concurrency,
        )
        report = measure(
            target,
            load,
            seed=number * 1_000 + concurrency,
            warmup=WARMUP_REQUESTS,
            label=f"{name} c{concurrency}",
            server=server,
        )
        print(
            f"  c{concurrency}: {report.output_tok_s:.0f} tok/s, mean TTFT "
            f"{report.ttft_ms.get('mean', math.nan):.0f} ms, TPOT "
            f"{report.tpot_ms.get('mean', math.nan):.1f} ms, {report.failed} failed, "
            f"load {report.load_1min:.1f} before",
            file=sys.stderr,
            flush=True,
        )
        yield report


def start(contender: Contender, model: Path, args: argparse.Namespace) -> ManagedServer:
    """The contender's server for `model`; the caller enters it."""
    if contender.engine == "manta":
        overrides: dict[str, object] = {
            "model": model,
            "served_model_name": model.name,
            "dtype": contender.dtype,
            "cpu_threads": contender.threads,
            "page_size": PAGE_SIZE,
            "max_running_requests": MAX_RUNNING,
            "max_total_tokens": MAX_TOTAL_TOKENS,
            "model_impl": contender.impl,
        }
        return manta_server(overrides | dict(args.set), timeout_s=START_TIMEOUT_S)
    by_default = contender.threads == len(args.cores) - 1
    return vllm_cpu.server(
        PEERS / "vllm",
        model,
        bind="auto" if by_default else ",".join(map(str, args.cores[: contender.threads])),
        kv_gib=KV_GIB,
        timeout_s=START_TIMEOUT_S,
        dtype=contender.dtype,
        block_size=PAGE_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_RUNNING,
        impl=contender.impl,
    )


def compare(results: Results) -> list[dict[str, object]]:
    """Ratios Manta / vLLM for each pair of cells that differ only in the engine.

    Manta is better above 1 for throughput, and below 1 for latencies. `same_outputs` is the share
    of requests whose output ids agree; near-ties of random weights make it less than 1.
    """
    ratios: list[dict[str, object]] = []
    for cell, peer_reports in results.items():
        other = cell._replace(contender=replace(cell.contender, engine="manta"))
        if cell.contender.engine != "vllm" or other not in results:
            continue
        manta, vllm = medians(results[other]), medians(peer_reports)
        pairs = [
            (ours, theirs)
            for mine, peer in zip(results[other], peer_reports, strict=False)
            for ours, theirs in zip(mine.outputs, peer.outputs, strict=True)
        ]
        ratios.append(
            {
                "model": cell.model,
                "concurrency": cell.concurrency,
                "threads": cell.contender.threads,
                "dtype": cell.contender.dtype,
                "impl": cell.contender.impl,
                "same_outputs": statistics.fmean(ours == theirs for ours, theirs in pairs),
                **quotients(manta, vllm),
            }
        )
    return ratios


def quotients(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    """Of the figures that both have."""
    return {name: a[name] / b[name] for name in a.keys() & b.keys()}


def compare_impls(results: Results) -> list[dict[str, object]]:
    """Ratios of an engine with transformers' code of the model to itself with its own."""
    ratios: list[dict[str, object]] = []
    for cell, reports in results.items():
        own = cell._replace(contender=replace(cell.contender, impl="native"))
        if cell.contender.impl != "transformers" or own not in results:
            continue
        ratios.append(
            {
                "model": cell.model,
                "concurrency": cell.concurrency,
                "server": cell.contender.name,
                **quotients(medians(reports), medians(results[own])),
            }
        )
    return ratios


def print_losses(losses: Sequence[dict[str, object]]) -> None:
    """Print transformers / native."""
    if not losses:
        return
    keys = ("model", "concurrency", "server", "output_tok_s", "ttft_ms_mean", "tpot_ms_mean")
    print("\nModel code of transformers / the engine's own")
    print_table(list(keys), [[loss.get(key) for key in keys] for loss in losses])


def print_results(results: Results) -> None:
    """Print every run, then the medians of each cell."""
    print_reports([report for reports in results.values() for report in reports])
    columns = ("output_tok_s", "ttft_ms_mean", "ttft_ms_p99", "tpot_ms_mean", "itl_ms_p99")
    rows: list[list[object]] = []
    for cell, reports in sorted(results.items(), key=lambda item: item[0][:2]):
        middle = medians(reports)
        cpu = [r.server_cpu_s / r.duration_s for r in reports if r.server_cpu_s is not None]
        rows.append(
            [cell.model, cell.concurrency, cell.contender.name]
            + [middle.get(column) for column in columns]
            + [statistics.median(cpu) if cpu else None]
        )
    print("\nMedians over rounds")
    print_table(["model", "conc", "server", *columns, "server cores busy"], rows)


def print_ratios(ratios: Sequence[dict[str, object]]) -> None:
    """Print Manta / vLLM."""
    if not ratios:
        return
    columns = ("output_tok_s", "ttft_ms_mean", "tpot_ms_mean", "e2e_ms_mean", "same_outputs")
    print("\nManta / vLLM (throughput: more is better; latencies: less is better)")
    keys = ("model", "concurrency", "threads", "dtype", "impl", *columns)
    print_table(list(keys), [[ratio.get(key) for key in keys] for ratio in ratios])


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; defaults are the published comparison."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--engines", type=words, default=["vllm", "manta"], help="order within a round")
    add("--models", type=words, default=["llama-4m", "llama-88m"])
    add("--cores", type=naturals, default=cores, help="cores for servers and client")
    add("--threads", type=positives, help="compute threads (default: cores less one, and cores)")
    add("--dtype", default="bfloat16", help="of both engines")
    add(
        "--impls",
        type=words,
        default=["auto"],
        help="whose code of the model: auto, native, transformers",
    )
    add("--vllm-extra-dtype", help="more rows of vLLM alone, such as bfloat16")
    add("--concurrency", type=positives, default=[1, 8, 32])
    add("--num-prompts", type=positive, default=32)
    add("--input-len", type=positive, default=256)
    add("--output-len", type=positive, default=64)
    add("--rounds", type=positive, default=3)
    add(
        "--set",
        action="append",
        default=[],
        type=key_value,
        metavar="KEY=VALUE",
        help="further override of Manta's configuration",
    )
    add(
        "--save",
        type=Path,
        nargs="?",
        const=SAVE_TO,
        metavar="FILE",
        help=f"write figures and environment (default {SAVE_TO.relative_to(REPO_ROOT)})",
    )
    args = parser.parse_args(argv)
    if args.threads is None:
        args.threads = sorted({max(1, len(args.cores) - 1), len(args.cores)})
    if not set(args.engines) <= {"vllm", "manta"}:
        parser.error(f"--engines knows vllm and manta, not {','.join(args.engines)}")
    if not set(args.impls) <= {"auto", "native", "transformers"}:
        parser.error(f"--impls knows auto, native and transformers, not {','.join(args.impls)}")
    if max(args.threads) > len(args.cores):
        parser.error(f"--threads must not exceed the {len(args.cores)} cores")
    return args


if __name__ == "__main__":
    sys.exit(main())
