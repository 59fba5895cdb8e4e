"""What a streamed token costs between the engine and the client, beside Ray Serve's own way.

Manta with a simulated device (scheduler, worker, tokenizer and ingress are the real ones) against
an ingress and an engine deployment that stream through Ray Serve's handle (`ray_streaming.py`),
each with Serve's Python proxy and with HAProxy; then a real model through HTTP and in process.

    python benchmarks/token_path.py                      # about ten minutes
    python benchmarks/token_path.py --parts paced        # one part
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import (
    PEERS,
    REPO_ROOT,
    StolenTime,
    finish,
    print_table,
    save_result,
)
from benchmarks.peers import models
from benchmarks.servers import ManagedServer, exit_on_sigterm, free_port, manta_server
from benchmarks.stream_reader import Stream
from benchmarks.token_load import Delays, Spread, Throughput, delays, pace, saturate
from deploy.start import haproxy
from deploy.start.folder import launch_folder
from deploy.start.ports import PortBlock

RESULT = REPO_ROOT / "benchmarks" / "results" / "token-path.json"
MODES = {"fastest": "HAProxy", "default": "Python proxy"}
STREAMS, STEP_MS, OUTPUT_LEN = 64, 1.0, 2000
WARM_S, WINDOW_S = 4.0, 8.0
COMPARED = {
    "fastest": ("fastest", "fastest"),
    "as started": ("fastest", "default"),
    "Python proxy": ("default", "default"),
}
"""Manta's mode and Ray's. "as started": `make serve` has HAProxy, `serve run` hasn't."""
MIN_TOKENS_S = {"fastest": 2.5, "as started": 5.0}
MAX_CPU = {"fastest": 0.4, "as started": 0.25}

PACED_STREAMS, PACED_STEP_MS, PACED_OUTPUT_LEN = 48, 20.0, 600
STAGGER_S = 0.05
MAX_ADDED_P50_MS, MAX_ADDED_P99_MS = 3.0, 15.0
MAX_GAP_EXCESS_MS = 10.0
"""By how much the 99th percentile of gaps at the client may exceed that of the engine."""

MODEL_STREAMS, MODEL_OUTPUT_LEN, MODEL_ROUNDS = 32, 128, 3
MAX_MODEL_COST = 0.10


def main() -> int:
    parts = {"saturated": saturated, "paced": paced, "model": real_model}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="of the saturated and the paced comparison"
    )
    parser.add_argument("--parts", default=",".join(parts), help="comma-separated")
    parser.add_argument("--save", type=Path, nargs="?", const=RESULT, metavar="FILE")
    args = parser.parse_args()
    exit_on_sigterm()
    figures: dict[str, object] = {"benchmark": "token_path"}
    ok = True
    for name in args.parts.split(","):
        figures[name], passed = parts[name](args)
        ok = ok and passed
        print()
    if args.save:
        save_result(args.save, figures, ok)
    finish(figures, ok)
    return 0 if ok else 1


# --- saturated: the most tokens that the path carries


def saturated(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Both ways in both modes, in turn; medians over rounds are compared."""
    cases = [(who, mode) for mode in MODES for who in ("manta", "ray")]
    measured: dict[tuple[str, str], list[Throughput]] = {case: [] for case in cases}
    for number in range(args.rounds):
        for who, mode in cases if number % 2 == 0 else reversed(cases):
            print(f"saturated, round {number + 1}: {who}, {mode} ...", file=sys.stderr, flush=True)
            with serve(who, mode, STEP_MS) as server:
                port = server.port
                result = saturate(server, port, STREAMS, OUTPUT_LEN, WARM_S, WINDOW_S)
                measured[who, mode].append(result)
    medians = {
        case: Throughput(*(statistics.median(v) for v in zip(*runs, strict=True)))
        for case, runs in measured.items()
    }
    headers = [
        "saturated",
        "mode",
        "tok/s",
        "CPU us/tok",
        "server cores",
        "client cores",
        "tok/chunk",
    ]
    print_table(
        headers,
        [[who, f"{mode} ({MODES[mode]})", *medians[who, mode]] for who, mode in cases],
    )
    ratios, ok = {}, True
    for name, (our_mode, their_mode) in COMPARED.items():
        ours, theirs = medians["manta", our_mode], medians["ray", their_mode]
        speed = ours.tokens_s / theirs.tokens_s
        cpu = ours.cpu_us_per_token / theirs.cpu_us_per_token
        ratios[name] = {"tokens_s": speed, "cpu_per_token": cpu}
        if name in MIN_TOKENS_S:
            ok = ok and speed >= MIN_TOKENS_S[name] and cpu <= MAX_CPU[name]
    print_table(
        ["manta / ray", "tok/s", "at least", "CPU/tok", "at most"],
        [
            [name, r["tokens_s"], MIN_TOKENS_S.get(name), r["cpu_per_token"], MAX_CPU.get(name)]
            for name, r in ratios.items()
        ],
    )
    runs = {f"{who} {mode}": [r._asdict() for r in measured[who, mode]] for who, mode in cases}
    return {"streams": STREAMS, "step_ms": STEP_MS, "runs": runs, "ratios": ratios}, ok


# --- paced: the delay from the end of a step to the client


def paced(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Delays with HAProxy and a lightly loaded engine; both ways in turn, medians of rounds."""
    rounds: dict[str, list[Delays]] = {"manta": [], "ray": []}
    stolen: dict[str, list[float]] = {"manta": [], "ray": []}
    for number in range(args.rounds):
        for who in rounds:
            print(f"paced, round {number + 1}: {who} ...", file=sys.stderr, flush=True)
            with serve(who, "fastest", PACED_STEP_MS) as server:
                time_stolen = StolenTime()
                rounds[who].append(measure_delays(who, server))
                stolen[who].append(time_stolen.share)
    results = {who: median_delays(found) for who, found in rounds.items()}
    rows: list[list[object]] = []
    for who, found in results.items():
        for what in ("added", "client_gap", "engine_gap"):
            rows.append([f"{who} {what}", *getattr(found, what)])
    print_table(["paced, ms", "p1", "p50", "p99", "worst"], rows)
    shares = [f"{who} {' '.join(f'{share:.1%}' for share in stolen[who])}" for who in stolen]
    print(f"CPU time taken by the machine's host, by round: {', '.join(shares)}")
    ours = results["manta"]
    ok = (
        ours.added.p50 <= MAX_ADDED_P50_MS
        and ours.added.p99 <= MAX_ADDED_P99_MS
        and ours.client_gap.p99 <= ours.engine_gap.p99 + MAX_GAP_EXCESS_MS
    )
    figures = {
        who: {
            "tokens": found.tokens,
            "added_ms": found.added._asdict(),
            "client_gap_ms": found.client_gap._asdict(),
            "engine_gap_ms": found.engine_gap._asdict(),
            "added_ms_of_rounds": [delays.added._asdict() for delays in rounds[who]],
            "stolen_of_rounds": stolen[who],
        }
        for who, found in results.items()
    }
    return {"streams": PACED_STREAMS, "step_ms": PACED_STEP_MS, **figures}, ok


def median_delays(rounds: list[Delays]) -> Delays:
    """Medians over rounds of each percentile."""

    def median(what: str) -> Spread:
        spreads = [getattr(delays, what) for delays in rounds]
        return Spread(*(statistics.median(values) for values in zip(*spreads, strict=True)))

    tokens = sum(delays.tokens for delays in rounds)
    return Delays(tokens, median("added"), median("client_gap"), median("engine_gap"))


def measure_delays(who: str, server: ManagedServer) -> Delays:
    """One run of the paced streams. Manta sends a chunk for every token, even without text."""
    more = {"return_token_ids": True} if who == "manta" else {}
    pace(server.port, 2, 50, 0.0, **more)
    began = time.monotonic()
    streams = pace(server.port, PACED_STREAMS, PACED_OUTPUT_LEN, STAGGER_S, **more)
    for stream in streams:
        if stream.chunks != stream.tokens:
            raise RuntimeError(f"{stream.tokens} tokens came in {stream.chunks} chunks")
    steps, firsts = (
        manta_steps(server, streams, began) if who == "manta" else ray_steps(server, streams)
    )
    return delays(streams, steps, firsts)


def manta_steps(
    server: ManagedServer, streams: list[Stream], began: float
) -> tuple[list[float], list[int]]:
    """Ends of the engine's steps, and each stream's first step, in which its row joined.

    Rows join in the order of the requests, one step or more apart, and stay until the first
    stream ends.
    """
    trace = httpx.get(f"{server.base_url}/debug/trace?last=8192", timeout=30).json()
    to_monotonic = time.monotonic() - time.time()
    origin = trace["otherData"]["first_event_us"]
    ended: dict[int, float] = {}
    rows: dict[int, int] = {}
    for event in trace["traceEvents"]:
        if event["ph"] != "X":
            continue
        step, until = event["args"]["step"], event["ts"] + event["dur"]
        if event["name"].startswith("step"):
            ended[step] = (origin + until) / 1e6 + to_monotonic
        elif event["name"] == "schedule":
            rows[step] = event["args"]["rows"]
    steps = [step for step in sorted(ended) if ended[step] > began and step in rows]
    firsts = [
        next(i for i, step in enumerate(steps) if rows[step] > number)
        for number in range(len(streams))
    ]
    return [ended[step] for step in steps], firsts


def ray_steps(server: ManagedServer, streams: list[Stream]) -> tuple[list[float], list[int]]:
    """The same for the fake engine, which records it. Streams are named by number."""
    ended, first = httpx.get(f"{server.base_url}/steps", timeout=30).json()
    return ended, [first[str(number)] for number in range(len(streams))]


# --- a real model, through HTTP and in process


def real_model(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Output tokens/s of the 88 M-parameter Llama, through HTTP and in process, in turn."""
    from engine import LLM, SamplingParams  # first: it sets how torch's threads wait

    folder = models.build("llama-88m", PEERS / "models" / "llama-88m")
    config = {"model": str(folder), "max_total_tokens": 16384, "max_running_requests": 64}
    rng = random.Random(1)
    through, within = [], []
    print("real model ...", file=sys.stderr, flush=True)
    with manta_server(config) as server, LLM(**config) as llm:
        params = SamplingParams(max_tokens=MODEL_OUTPUT_LEN, temperature=0.0, ignore_eos=True)
        for number in range(MODEL_ROUNDS + 1):
            prompts = [rng.choices(range(10, 8000), k=64) for _ in range(MODEL_STREAMS)]
            started = time.monotonic()
            results = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.monotonic() - started
            made = sum(len(result.outputs[0].token_ids) for result in results)
            streams = pace(server.port, MODEL_STREAMS, MODEL_OUTPUT_LEN, 0.0)
            took = max(s.ended for s in streams) - min(s.sent for s in streams)
            if number:  # the first warms up
                within.append(made / seconds)
                through.append(sum(s.tokens for s in streams) / took)
    cost = 1 - statistics.median(through) / statistics.median(within)
    print_table(
        ["real model", "out tok/s", "runs"],
        [
            ["in process", statistics.median(within), " ".join(f"{v:.0f}" for v in within)],
            ["through HTTP", statistics.median(through), " ".join(f"{v:.0f}" for v in through)],
        ],
    )
    print(f"HTTP costs {cost:.1%} (at most {MAX_MODEL_COST:.0%})")
    figures = {"concurrency": MODEL_STREAMS, "http": through, "in_process": within, "cost": cost}
    return figures, cost <= MAX_MODEL_COST


# --- servers


@contextmanager
def serve(who: str, mode: str, step_ms: float) -> Iterator[ManagedServer]:
    """Manta or the Ray Serve application on a simulated engine of `step_ms` steps."""
    if who == "ray":
        with ray_server(mode, step_ms) as server:
            yield server
        return
    overrides = {
        "device": "simulated",
        "simulated": f"{{step_ms: {step_ms}}}",
        "max_total_tokens": 262144,
    }
    with manta_server(overrides, haproxy=mode == "fastest") as server:
        yield server


@contextmanager
def ray_server(mode: str, step_ms: float) -> Iterator[ManagedServer]:
    """`serve run` of `ray_streaming`, in Ray's default mode or its fastest."""
    port = free_port()
    http_options: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": port,
        "request_timeout_s": 3600,
    }
    app = {
        "name": "streaming",
        "route_prefix": "/",
        "import_path": "benchmarks.ray_streaming:build_app",
        "args": {"step_ms": step_ms},
    }
    env = {
        **os.environ,
        "RAY_worker_niceness": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }
    with ExitStack() as stack:
        if mode == "fastest":
            binary = haproxy.binary()
            if binary is None:
                raise RuntimeError("the comparison needs HAProxy, which Ray brings on Linux only")
            folder = stack.enter_context(launch_folder()).path
            ports = stack.enter_context(PortBlock())
            env |= haproxy.environment(binary, folder, http_options, ports)
            env["RAY_SERVE_THROUGHPUT_OPTIMIZED"] = "1"
        file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".yaml"))
        yaml.safe_dump({"http_options": http_options, "applications": [app]}, file)
        file.flush()
        command = [sys.executable, "-m", "ray.serve.scripts", "run"]
        command += ["--app-dir", str(REPO_ROOT), file.name]
        yield stack.enter_context(ManagedServer(command, env, port, timeout_s=180.0))


if __name__ == "__main__":
    sys.exit(main())
