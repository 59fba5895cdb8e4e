"""Manta and llama.cpp side by side on GGUF files: same files, cores, threads, prompts, over HTTP.

    python benchmarks/peers/llama_cpp.py --save       # builds what is missing, then measures

The peer is `llama-server` with continuous batching, built for this machine from the sources in the
newest `llama-cpp-python` that pip finds (needs cmake and g++; some ten minutes). The files are
SmolLM2-135M-Instruct as its package has it (Q4_1) and in Q8_0, and an 88 M Llama in Q4_0, made by
llama.cpp's own tool. Each round starts one server after the other, never two at once; rounds repeat
A B A B. Ratios are of medians over rounds. Manta's own bfloat16 of the 88 M Llama is measured, too.

ok: no request failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gguf import GGMLQuantizationType as Kind

from benchmarks.common import PEERS, REPO_ROOT, environment, finish, print_table
from benchmarks.load.arguments import naturals, positive, positives, words
from benchmarks.load.command import Target, measure
from benchmarks.load.load import Workload
from benchmarks.load.report import RunReport, medians, print_reports
from benchmarks.peers import models
from benchmarks.peers.vllm_cpu import PeerSetupError, run
from benchmarks.servers import ManagedServer, ServerError, exit_on_sigterm, free_port, manta_server
from engine.checkpoint.wheel_models import fetch_wheel_model
from tests.support.gguf_files import write_gguf

SAVE_TO = REPO_ROOT / "benchmarks" / "results" / "peers-gguf.json"
FOLDER = PEERS / "llama.cpp"
PACKAGE = "llama-cpp-python"
TOOLS = ("llama-server", "llama-quantize")
FLAGS = ("GGML_NATIVE=ON", "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_CURL=OFF")
FLAGS += ("LLAMA_OPENSSL=OFF", "LLAMA_BUILD_UI=OFF", "BUILD_SHARED_LIBS=OFF")
FLAGS += ("LLAMA_BUILD_COMMON=ON", "LLAMA_BUILD_TOOLS=ON", "LLAMA_BUILD_SERVER=ON")
MAX_RUNNING = 32
MAX_MODEL_LEN = 1024
WARMUP_REQUESTS = 4
SAME = (
    "the GGUF file, cores, number of compute threads, prompts of random token ids, greedy "
    f"sampling, exact output length, at most {MAX_RUNNING} running requests of {MAX_MODEL_LEN} "
    "tokens, client on the same cores, streaming /v1/completions, a new connection each time"
)
DIFFERENT = (
    "llama.cpp computes in float32 with inputs of matrices rounded to 8 bits, and keeps keys and "
    "values in float16; Manta computes in `--dtype` with inputs rounded to 14 bits (21 in float32)",
    "llama-server is one process; Manta serves through Ray Serve's proxy and a Ray cluster",
)


@dataclass(frozen=True)
class Contender:
    """One row: an engine, and the type that Manta computes in."""

    engine: str
    dtype: str = ""

    @property
    def name(self) -> str:
        return f"{self.engine} {self.dtype}".strip()


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
    figures: dict[str, object] = {"benchmark": "peers-gguf", "same": SAME, "different": DIFFERENT}
    results: Results = {}
    try:
        tools = set_up(FOLDER)
        figures["llama_cpp"] = (FOLDER / "version").read_text().strip()
        files = [model_file(name, tools) for name in args.models]
        for number in range(args.rounds):
            for file in files:
                for contender in contenders(file, args):
                    measure_server(file, contender, number, tools, args, results)
        ok = all(report.failed == 0 for reports in results.values() for report in reports)
    except (ServerError, PeerSetupError) as error:
        print(f"FAILED: {error}", file=sys.stderr)
        figures["error"] = str(error)
        ok = False
    print_reports([report for reports in results.values() for report in reports])
    ratios = compare(results)
    keys = ("model", "concurrency", "manta", "output_tok_s", "ttft_ms_mean", "tpot_ms_mean")
    print("\nManta / llama.cpp (throughput: more is better; latencies: less is better)")
    print_table([*keys, "server_cpu_s"], [[row.get(k) for k in (*keys, "cpu")] for row in ratios])
    figures["ratios"] = ratios
    figures["cells"] = [
        {
            "model": cell.model,
            "concurrency": cell.concurrency,
            "server": cell.contender.name,
            "medians": medians(reports),
            "rounds": [report.figures() for report in reports],
        }
        for cell, reports in results.items()
    ]
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        saved = {**figures, "environment": environment(), "ok": ok}
        args.save.write_text(json.dumps(saved, indent=1) + "\n")
    finish(figures, ok)
    return 0 if ok else 1


def set_up(folder: Path) -> Path:
    """Build the peer's tools in `folder` unless they are there, and return where they are.

    Raises `PeerSetupError` if a step failed.
    """
    binaries = folder / "build" / "bin"
    if all((binaries / tool).exists() for tool in TOOLS):
        return binaries
    print(f"building llama.cpp in {folder} (some ten minutes)", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    run([*pip, "--no-build-isolation", "--dest", str(folder), PACKAGE])
    archive = next(folder.glob("llama_cpp_python-*.tar.gz"))
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    (folder / "version").write_text(archive.name.removesuffix(".tar.gz") + "\n")
    source = next(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
    build, flags = str(folder / "build"), [f"-D{flag}" for flag in FLAGS]
    run(["cmake", "-S", str(source), "-B", build, "-DCMAKE_BUILD_TYPE=Release", *flags])
    run(["cmake", "--build", build, "--parallel", "--target", *TOOLS])
    return binaries


def model_file(name: str, tools: Path) -> Path:
    """The GGUF file of one of `--models`, made if it is missing."""
    model, kind = name.rsplit("-", 1)
    file = PEERS / "models" / f"{name}.gguf"
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    if model == "smollm2":
        origin = fetch_wheel_model(model)
        if kind == "q4_1":
            file.symlink_to(origin)
            return file
    else:
        origin = PEERS / "models" / f"{model}-f16.gguf"
        if not origin.exists():
            folder = models.build(model, PEERS / "models" / model)
            keys = {"tokenizer.ggml.pre": "gpt-2"}
            write_gguf(origin, folder, Kind.F16, tokenizer=folder, metadata=keys)
    tool = [str(tools / "llama-quantize"), "--allow-requantize", str(origin), str(file)]
    run([*tool, kind.upper()])
    return file


def contenders(file: Path, args: argparse.Namespace) -> Sequence[Contender]:
    """The rows in the order in which a round runs them."""
    return [Contender("llama.cpp"), *(Contender("manta", dtype) for dtype in args.dtypes)]


def measure_server(
    file: Path,
    contender: Contender,
    number: int,
    tools: Path,
    args: argparse.Namespace,
    results: Results,
) -> None:
    """Start one server, measure it at every concurrency, and stop it."""
    name = f"{file.stem} {contender.name} #{number + 1}"
    print(f"starting {name}", file=sys.stderr, flush=True)
    with start(file, contender, tools, args) as server:
        target = Target(server.base_url, file.stem, keeps_connections=False)
        for concurrency in args.concurrency:
            load = Workload(
                num_prompts=max(args.num_prompts, 2 * concurrency),
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
                f"  c{concurrency}: {report.output_tok_s:.0f} tok/s, TTFT "
                f"{report.ttft_ms.get('mean', 0):.0f} ms, TPOT {report.tpot_ms.get('mean', 0):.1f}"
                f" ms, {report.failed} failed",
                file=sys.stderr,
                flush=True,
            )
            results.setdefault(Cell(file.stem, concurrency, contender), []).append(report)


def start(file: Path, contender: Contender, tools: Path, args: argparse.Namespace) -> ManagedServer:
    """The contender's server for `file`; the caller enters it."""
    if contender.engine == "manta":
        overrides: dict[str, object] = {
            "model": file,
            "served_model_name": file.stem,
            "dtype": contender.dtype,
            "cpu_threads": len(args.cores),
            "max_model_len": MAX_MODEL_LEN,
            "max_running_requests": MAX_RUNNING,
            "max_total_tokens": MAX_RUNNING * MAX_MODEL_LEN,
        }
        return manta_server(overrides)
    port, threads = free_port(), str(len(args.cores))
    command = [str(tools / "llama-server"), "--model", str(file), "--alias", file.stem]
    command += ["--threads", threads, "--threads-batch", threads, "--parallel", str(MAX_RUNNING)]
    command += ["--ctx-size", str(MAX_RUNNING * MAX_MODEL_LEN), "--cont-batching", "--no-webui"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    return ManagedServer(command, dict(os.environ), port, timeout_s=300)


def compare(results: Results) -> list[dict[str, object]]:
    """Ratios Manta / llama.cpp for each pair of cells."""
    rows: list[dict[str, object]] = []
    for cell, reports in results.items():
        peer = cell._replace(contender=Contender("llama.cpp"))
        if cell.contender.engine != "manta" or peer not in results:
            continue
        ours, theirs = medians(reports), medians(results[peer])
        row: dict[str, object] = {name: ours[name] / theirs[name] for name in ours.keys() & theirs}
        cpu = [
            statistics.median(r.server_cpu_s or 0.0 for r in each)
            for each in (reports, results[peer])
        ]
        row |= {"model": cell.model, "concurrency": cell.concurrency, "manta": cell.contender.dtype}
        rows.append({**row, "cpu": cpu[0] / cpu[1] if cpu[1] else None})
    return rows


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = ["smollm2-q4_1", "smollm2-q8_0", "llama-88m-q4_0"]
    parser.add_argument("--models", type=words, default=names)
    parser.add_argument("--dtypes", type=words, default=["bfloat16"])
    parser.add_argument("--concurrency", type=positives, default=[1, 8, 32])
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--num-prompts", type=positive, default=8)
    parser.add_argument("--input-len", type=positive, default=256)
    parser.add_argument("--output-len", type=positive, default=64)
    parser.add_argument("--cores", type=naturals, default=sorted(os.sched_getaffinity(0)))
    parser.add_argument("--save", nargs="?", type=Path, const=SAVE_TO)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
