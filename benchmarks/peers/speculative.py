"""What n-gram speculation gains, in Manta and in vLLM (CPU build).

    python benchmarks/peers/speculative.py            # sets up what is missing, then measures

One server at a time: each engine without drafts, and with `{"method": "ngram"}` and the same
numbers. All get the same prompts (`editing`, `extraction` and `plain` of
`benchmarks/speculative.py`, for each of its models), greedy, and the same compute threads. Every
prompt was sent before.
`gain` is tokens/s with drafts by tokens/s without. ok: in every cell our gain is at least vLLM's,
and our tokens/s with drafts are at least vLLM's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import urllib.request
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import PEERS, REPO_ROOT, finish, print_table, save_result
from benchmarks.load.arguments import positive
from benchmarks.peers import models, vllm_cpu
from benchmarks.servers import (
    ManagedServer,
    ServerError,
    exit_on_sigterm,
    manta_server,
)
from benchmarks.speculative import COMPLETIONS, Load, completions, model_folder, prompts_of, send
from benchmarks.speculative_parts import CARRIED

SAVE_TO = REPO_ROOT / "benchmarks" / "results" / "speculative-peers.json"
MODULES = ("bisect", "heapq", "shlex", "csv", "calendar", "difflib", "textwrap", "statistics")
CONCURRENCY = (1, 8, 32)
REQUESTS = 4
"""Requests of a round for each that is sent at once, at least."""
PAGE_SIZE = 32
MAX_MODEL_LEN = 2048
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 5,
    "prompt_lookup_min": 2,
}


class Contender(NamedTuple):
    """An engine, with drafts or without."""

    engine: str
    drafts: bool


def main() -> int:
    """Exit status: 1 if a threshold does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output-len", type=positive, default=96)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--save", action="store_true", help=f"write {SAVE_TO.name}")
    parser.add_argument("--models", default=f"{CARRIED.name},{models.COPYING}")
    args = parser.parse_args()
    exit_on_sigterm()
    rows: list[dict[str, Any]] = []
    error = ""
    for name in args.models.split(","):
        try:
            rows += compare(name, args)
        except (ServerError, vllm_cpu.PeerSetupError, RuntimeError) as failure:
            error = str(failure)
            print(f"FAILED: {error}", file=sys.stderr)
    columns = ["model", "concurrency", "vllm tok/s", "with drafts", "gain"]
    print_table(
        [*columns, "manta tok/s", "with drafts", "gain"],
        [
            [
                row["model"],
                row["concurrency"],
                *(
                    f"{row[engine][key]:.3g}"
                    for engine in ("vllm", "manta")
                    for key in ("plain", "drafts", "gain")
                ),
            ]
            for row in rows
        ],
    )
    ok = not error and all(row["ok"] for row in rows)
    figures = {
        "benchmark": "speculative-peers",
        "vllm_cpu": vllm_cpu.VERSION,
        "speculative_config": DRAFTS,
        "threads": args.threads,
        "dtype": args.dtype,
        "rows": rows,
        "error": error,
    }
    if args.save:
        save_result(SAVE_TO, figures, ok)
    finish(figures, ok)
    return 0 if ok else 1


def compare(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Cells of all contenders with one model."""
    model = model_folder(name)
    texts = prompts_of(model, MODULES)
    ids = [prompt for group in zip(*texts.values(), strict=True) for prompt in group]
    bodies = completions(ids, args.output_len, model=name)
    speeds: dict[Contender, dict[int, list[float]]] = {}
    acceptance: dict[str, float] = {}
    for contender in (Contender(e, d) for e in ("vllm", "manta") for d in (False, True)):
        with start(contender, model, args) as server:
            speeds[contender] = measure(server, bodies, args.rounds)
            if contender.drafts:
                acceptance[contender.engine] = accepted(server)
    return [{"model": name, **row, "acceptance": acceptance} for row in cells(speeds)]


def start(contender: Contender, model: Path, args: argparse.Namespace) -> ManagedServer:
    """The contender's server; the caller enters it."""
    if contender.engine == "manta":
        config: dict[str, object] = {
            "model": model,
            "served_model_name": model.name,
            "dtype": args.dtype,
            "cpu_threads": args.threads,
            "page_size": PAGE_SIZE,
            "max_running_requests": 32,
            "max_model_len": MAX_MODEL_LEN,
            "max_total_tokens": 65536,
        }
        if contender.drafts:
            config["speculative_config"] = json.dumps(DRAFTS)
        return manta_server(config)
    return vllm_cpu.server(
        PEERS / "vllm",
        model,
        bind=",".join(map(str, sorted(os.sched_getaffinity(0))[: args.threads])),
        kv_gib=2,
        timeout_s=300.0,
        more=["--speculative-config", json.dumps(DRAFTS)] if contender.drafts else [],
        dtype=args.dtype,
        block_size=PAGE_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=32,
    )


def measure(
    server: ManagedServer, bodies: list[dict[str, Any]], rounds: int
) -> dict[int, list[float]]:
    """Tokens per second by concurrency."""
    found: dict[int, list[float]] = {}
    for concurrency in CONCURRENCY:
        # Several requests for each place: they end at different times.
        count = max(len(bodies), REQUESTS * concurrency)
        load = Load("", COMPLETIONS, list(islice(cycle(bodies), count)), concurrency)
        asyncio.run(send(server.base_url, load))
        found[concurrency] = []
        for _ in range(rounds):
            seconds, answers = asyncio.run(send(server.base_url, load))
            found[concurrency].append(sum(a.num_tokens for a in answers) / seconds)
        print(f"{concurrency}: {found[concurrency]}", file=sys.stderr, flush=True)
    return found


def accepted(server: ManagedServer) -> float:
    """Accepted drafts by drafts, as the server counts them."""
    totals = {"draft_tokens": 0.0, "accepted_tokens": 0.0}
    with urllib.request.urlopen(server.base_url + "/metrics") as reply:
        for line in reply.read().decode().splitlines():
            name = line.partition("{")[0]
            for key in totals:
                if "spec_decode" in name and name.endswith(f"{key}_total"):
                    totals[key] += float(line.rsplit(" ", 1)[1])
    return totals["accepted_tokens"] / max(totals["draft_tokens"], 1.0)


def cells(speeds: dict[Contender, dict[int, list[float]]]) -> list[dict[str, Any]]:
    """Medians and gains by concurrency."""
    rows = []
    for concurrency in CONCURRENCY:
        row: dict[str, Any] = {"concurrency": concurrency}
        for engine in ("vllm", "manta"):
            plain, drafts = (
                statistics.median(speeds[Contender(engine, d)][concurrency]) for d in (False, True)
            )
            row[engine] = {"plain": plain, "drafts": drafts, "gain": drafts / plain}
        ours, theirs = row["manta"], row["vllm"]
        row["ok"] = ours["gain"] >= theirs["gain"] and ours["drafts"] >= theirs["drafts"]
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
