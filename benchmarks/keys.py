"""Keys: what a flood of one costs another, and what keys, limits and metrics cost all.

    python benchmarks/keys.py          # a table, five minutes
    python benchmarks/keys.py --save   # also results/keys.json

1. Key A may run 16 of 32 rows and has 500 requests queued. The time to the first token of key B's
   requests is compared with that on the idle server.
2. Two servers, one plain, and one with keys, a quota, fair shares and vLLM's metric names beside
   ours, whose /metrics are read every second. They are loaded in turns with the same streams, and
   the tokens per second of each pair of turns are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import REPO_ROOT, completion_body, finish, print_table, save_result
from benchmarks.servers import ManagedServer, ServerError, exit_on_sigterm, manta_server
from benchmarks.stream_reader import StreamError, connect

ROWS, OF_A, QUEUED = 32, 16, 500
MAX_SLOWDOWN = 3.0
MIN_RATIO = 0.97
PROBES = 25
STREAMS, TOKENS, TURNS = 32, 200, 20
RESULT = REPO_ROOT / "benchmarks" / "results" / "keys.json"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="write the result")
    args = parser.parse_args()
    exit_on_sigterm()
    try:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            keyed = {
                "api_keys_file": write_keys(Path(folder) / "keys.yaml"),
                "max_running_requests": ROWS,
                "metrics_names": "vllm",
            }
            server = stack.enter_context(manta_server(keyed))
            flood = asyncio.run(measure_flood(server))
            plain = stack.enter_context(manta_server({"max_running_requests": ROWS}))
            ratios = asyncio.run(compare(plain, server))
    except (ServerError, StreamError) as error:
        print(error, file=sys.stderr)
        finish({"benchmark": "keys", "error": str(error)}, False)
        return 1
    ratio = statistics.median(ratios)
    print_table(
        ["key B's first token, ms", "idle", "beside A's 500", "ratio"],
        [
            [name, flood[f"idle_{name}_ms"], flood[f"busy_{name}_ms"], flood[f"{name}_ratio"]]
            for name in ("p50", "p90")
        ],
    )
    print(
        f"tokens/s with keys / without: {ratio:.3f} (turns {min(ratios):.3f} to {max(ratios):.3f})"
    )
    ok = flood["p50_ratio"] <= MAX_SLOWDOWN and ratio >= MIN_RATIO
    result = {"benchmark": "keys", **flood, "throughput_ratio": ratio, "turns": ratios}
    if args.save:
        save_result(RESULT, result, ok)
    finish(result, ok)
    return 0 if ok else 1


def write_keys(path: Path) -> str:
    limits = {"a": {"max_running": OF_A}, "b": {"tokens_per_minute": 10**9}, "m": {"role": "admin"}}
    entries = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **more}
        for name, more in limits.items()
    ]
    path.write_text(yaml.safe_dump({"keys": entries}))
    return str(path)


def bodies(tokens: int, start: int = 0) -> Iterator[bytes]:
    """Requests whose prompts of 64 tokens begin differently."""
    for i in itertools.count(start):
        prompt = [10 + i % 4000, 10 + i // 4000, *range(10, 72)]
        yield json.dumps(completion_body(prompt, tokens)).encode()


async def measure_flood(server: ManagedServer) -> dict[str, Any]:
    """Times to key B's first token, alone and beside key A's requests."""
    idle = await first_tokens(server, 10**6)
    source = bodies(400)
    readers = [
        await connect(server.port, lambda: next(source), "x-api-key: a\r\n") for _ in range(QUEUED)
    ]
    try:
        await asyncio.sleep(5.0)
        busy = await first_tokens(server, 2 * 10**6)
        waiting = sum(not reader.streams[-1].arrivals for reader in readers)
    finally:
        for reader in readers:
            reader.close()
    await asyncio.sleep(2.0)
    found: dict[str, Any] = {"waiting_of_a": waiting}
    for name, share in (("p50", 0.5), ("p90", 0.9)):
        pair = [sorted(times)[int(share * len(times))] * 1000 for times in (idle, busy)]
        found[f"idle_{name}_ms"], found[f"busy_{name}_ms"] = pair
        found[f"{name}_ratio"] = pair[1] / pair[0]
    return found


async def first_tokens(server: ManagedServer, start: int) -> list[float]:
    """Seconds from a request of key B until its first token, one after the other."""
    source = bodies(1, start)
    times = []
    async with httpx.AsyncClient(base_url=server.base_url, headers={"x-api-key": "b"}) as client:
        for _ in range(PROBES):
            began = time.monotonic()
            headers = {"Content-Type": "application/json"}
            reply = await client.post(
                "/v1/completions", content=next(source), headers=headers, timeout=60
            )
            times.append(time.monotonic() - began)
            reply.raise_for_status()
            await asyncio.sleep(0.1)
    return times[3:]


async def compare(plain: ManagedServer, keyed: ManagedServer) -> list[float]:
    """Tokens per second with keys, as a fraction of without, for each pair of turns."""
    ratios = []
    for turn in range(TURNS + 1):
        speeds = {}
        for name in ("plain", "keyed") if turn % 2 else ("keyed", "plain"):
            server, key = (plain, "") if name == "plain" else (keyed, "x-api-key: b\r\n")
            speeds[name] = await load(server, key, turn)
        if turn:  # the first turn warms both up
            ratios.append(speeds["keyed"] / speeds["plain"])
    return ratios


async def load(server: ManagedServer, headers: str, turn: int) -> float:
    """Tokens per second of `STREAMS` streams, from the first token to the last."""
    left = itertools.islice(bodies(TOKENS, turn * 1000), STREAMS)
    readers = [
        await connect(server.port, lambda: next(left, None), headers) for _ in range(STREAMS)
    ]
    scraper = asyncio.create_task(scrape(server)) if headers else None
    await asyncio.gather(*(reader.closed for reader in readers))
    if scraper is not None:
        scraper.cancel()
    streams = [stream for reader in readers for stream in reader.streams]
    began = min(stream.arrivals[0][0] for stream in streams)
    return sum(stream.tokens for stream in streams) / (max(s.ended for s in streams) - began)


async def scrape(server: ManagedServer) -> None:
    async with httpx.AsyncClient(base_url=server.base_url, headers={"x-api-key": "m"}) as client:
        while True:
            (await client.get("/metrics")).raise_for_status()
            await asyncio.sleep(1.0)


if __name__ == "__main__":
    sys.exit(main())
