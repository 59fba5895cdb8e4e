"""What adapters cost Manta and vLLM (CPU build) in serving: each beside itself without any.

    python benchmarks/peers/lora.py --save

Each engine is started without adapters and with eight, in turn, for several rounds. A load keeps 32
requests open: all for the base model, for one adapter, or for all eight. An engine's loss is its
tokens per second without adapters by those with them. Same model, adapters, threads, dtype, prompts
and output lengths; greedy.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx

from benchmarks.common import PEERS, REPO_ROOT, finish, print_table, save_result
from benchmarks.lora import NUM_ADAPTERS, write_adapter
from benchmarks.peers import models, vllm_cpu
from benchmarks.servers import ManagedServer, exit_on_sigterm, manta_server
from engine.checkpoint.model_config import ModelConfig

SAVE_TO = REPO_ROOT / "benchmarks" / "results" / "peers-lora.json"
ROWS, WAVES = 32, 1
INPUT_LEN, OUTPUT_LEN = 64, 128
RANK, PAGE_SIZE, MAX_MODEL_LEN = 16, 32, 512
KV_GIB, MAX_TOTAL_TOKENS = 2, 32_768
START_TIMEOUT_S = 900.0
MIXES = {"base": 0, "one adapter": 1, "eight adapters": NUM_ADAPTERS}
"""Adapters of a load's requests, in turn."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", default="vllm,manta", help="comma-separated, order in a round")
    parser.add_argument("--save", action="store_true", help="write the result")
    args = parser.parse_args(argv)
    exit_on_sigterm()
    cores = list(range(args.threads + 1))
    os.sched_setaffinity(0, cores)  # the servers started from here inherit it
    model = models.build("llama-88m", PEERS / "models" / "llama-88m")
    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        shape = ModelConfig.from_pretrained(model)
        adapters = {
            f"a{n}": write_adapter(Path(folder) / f"a{n}", shape, RANK, n)
            for n in range(NUM_ADAPTERS)
        }
        for number in range(args.rounds):
            for engine in args.engines.split(","):
                for held in ({}, adapters):
                    measure(engine, model, held, number, args, found)
    rows = losses(found)
    print_table(["engine", "load", "tok/s without adapters", "tok/s", "loss"], rows)
    ok = all(len(values) == args.rounds for values in found.values())
    figures: dict[str, Any] = {
        "benchmark": "peers-lora",
        "vllm_cpu": vllm_cpu.VERSION,
        "model": model.name,
        "rank": RANK,
        "threads": args.threads,
        "dtype": args.dtype,
        "open_requests": ROWS,
        "input_len": INPUT_LEN,
        "output_len": OUTPUT_LEN,
        "tok_s": [{"engine": e, "load": m, "rounds": r} for (e, m), r in found.items()],
        "losses": [{"engine": row[0], "load": row[1], "loss": row[4]} for row in rows],
    }
    if args.save:
        save_result(SAVE_TO, figures, ok)
    finish(figures, ok)


def measure(
    engine: str,
    model: Path,
    adapters: dict[str, Path],
    number: int,
    args: argparse.Namespace,
    found: dict[tuple[str, str], list[float]],
) -> None:
    """One start of an engine, with or without adapters, and its loads."""
    mixes = MIXES if adapters else {"without": 0}
    print(f"starting {engine}, {len(adapters)} adapters, round {number + 1}", file=sys.stderr)
    with start(engine, model, adapters, args) as server:
        asyncio.run(load(server, [model.name, *adapters], 8, 4))  # warm-up: each is read once
        for mix, count in mixes.items():
            names = [f"a{n}" for n in range(count)] or [model.name]
            tok_s = asyncio.run(load(server, names, 1000 * number + count, OUTPUT_LEN))
            print(f"  {mix}: {tok_s:.0f} tok/s", file=sys.stderr, flush=True)
            found.setdefault((engine, mix), []).append(tok_s)


async def load(server: ManagedServer, names: list[str], seed: int, output_len: int) -> float:
    """Output tokens per second of `ROWS` open requests, which name the models in turn."""
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=ROWS)

    async def ask(client: httpx.AsyncClient, row: int) -> int:
        done = 0
        for _ in range(WAVES):
            body = {
                "model": names[row % len(names)],
                "prompt": [rng.randrange(10, 8000) for _ in range(INPUT_LEN)],
                "max_tokens": output_len,
                "temperature": 0,
                "ignore_eos": True,
            }
            reply = await client.post("/v1/completions", json=body)
            reply.raise_for_status()
            done += reply.json()["usage"]["completion_tokens"]
        return done

    async with httpx.AsyncClient(base_url=server.base_url, timeout=900, limits=limits) as client:
        started = time.perf_counter()
        counts = await asyncio.gather(*(ask(client, row) for row in range(ROWS)))
        seconds = time.perf_counter() - started
    if sum(counts) != ROWS * WAVES * output_len:
        raise SystemExit(f"error: {sum(counts)} tokens instead of {ROWS * WAVES * output_len}")
    return sum(counts) / seconds


def start(
    engine: str, model: Path, adapters: dict[str, Path], args: argparse.Namespace
) -> ManagedServer:
    """The engine's server; the caller enters it."""
    if engine == "manta":
        overrides: dict[str, object] = {
            "model": model,
            "served_model_name": model.name,
            "dtype": args.dtype,
            "cpu_threads": args.threads,
            "page_size": PAGE_SIZE,
            "max_model_len": MAX_MODEL_LEN,
            "max_running_requests": ROWS,
            "max_total_tokens": MAX_TOTAL_TOKENS,
        }
        if adapters:
            overrides |= {
                "lora_adapters": {name: str(at) for name, at in adapters.items()},
                "max_loras": NUM_ADAPTERS,
                "max_lora_rank": RANK,
            }
        return manta_server(overrides, timeout_s=START_TIMEOUT_S)
    more: list[str] = []
    if adapters:
        more += ["--enable-lora", "--max-loras", str(NUM_ADAPTERS)]
        more += ["--max-lora-rank", str(RANK), "--lora-modules"]
        more += [f"{name}={at}" for name, at in adapters.items()]
    return vllm_cpu.server(
        PEERS / "vllm",
        model,
        bind="auto",
        kv_gib=KV_GIB,
        timeout_s=START_TIMEOUT_S,
        more=more,
        dtype=args.dtype,
        block_size=PAGE_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=ROWS,
    )


def losses(found: dict[tuple[str, str], list[float]]) -> list[list[Any]]:
    """Engine, load, tokens per second without and with, and their quotient; medians of rounds."""
    rows: list[list[Any]] = []
    for (engine, mix), values in found.items():
        if mix == "without":
            continue
        plain = found[engine, "without"]
        quotients = [p / v for p, v in zip(plain, values, strict=True)]
        middle = statistics.median
        rows.append([engine, mix, middle(plain), middle(values), middle(quotients)])
    return rows


if __name__ == "__main__":
    main()
