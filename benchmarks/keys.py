"""Keys: what a flood of one costs another, and what keys, limits and metrics cost all.

    python benchmarks/keys.py          # a table, 20 minutes
    python benchmarks/keys.py --save   # also results/keys.json

1. Key A may run 16 of 32 rows and has 500 requests queued. The time to the first token of key B's
   requests is compared with that on the idle server.
2. Two servers, one plain, and one with keys, a quota, fair shares and vLLM's metric names beside
   ours, whose /metrics are read every second. They are loaded in turns with the same streams.
   Tokens per second and CPU time per token (of all processes) of each pair of turns are compared.
   Both are started several times, because two plain servers also differ by some percent.
3. The same with a simulated device of 1 ms steps: what the path of a token costs.
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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

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
STARTS, TURNS = 5, 4
Settings = dict[str, object]
"""Of a server, as `manta_server` takes them."""
RESULT = REPO_ROOT / "benchmarks" / "results" / "keys.json"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="write the result")
    args = parser.parse_args()
    exit_on_sigterm()
    try:
        with tempfile.TemporaryDirectory() as folder:
            keys = write_keys(Path(folder) / "keys.yaml")
            keyed = {"api_keys_file": keys, "metrics_names": "vllm"}
            rows = {"max_running_requests": ROWS}
            path = {
                "device": "simulated",
                "simulated": "{step_ms: 1.0}",
                "max_total_tokens": 262144,
            }
            with manta_server(rows | keyed) as server:
                flood = asyncio.run(measure_flood(server))
            model = compare(rows, keyed, Load(streams=32, tokens=640))
            simulated = compare(path, keyed, Load(streams=64, tokens=2000))
    except (ServerError, StreamError) as error:
        print(error, file=sys.stderr)
        finish({"benchmark": "keys", "error": str(error)}, False)
        return 1
    print_table(
        ["key B's first token, ms", "idle", "beside A's 500", "ratio"],
        [
            [name, flood[f"idle_{name}_ms"], flood[f"busy_{name}_ms"], flood[f"{name}_ratio"]]
            for name in ("p50", "p90")
        ],
    )
    compared = {"model": model, "token_path": simulated}
    print_table(
        ["with keys / without", "tok/s", "lowest turn", "highest turn", "CPU/tok"],
        [
            [
                name,
                found["tokens_s_ratio"],
                min(found["tokens_s_of_turns"]),
                max(found["tokens_s_of_turns"]),
                found["cpu_ratio"],
            ]
            for name, found in compared.items()
        ],
    )
    ok = flood["p50_ratio"] <= MAX_SLOWDOWN and all(
        found["tokens_s_ratio"] >= MIN_RATIO for found in compared.values()
    )
    result = {"benchmark": "keys", **flood, **compared}
    if args.save:
        save_result(RESULT, result, ok)
    finish(result, ok)
    return 0 if ok else 1


class Load(NamedTuple):
    """Streams that run at once, once each, and the tokens of each."""

    streams: int
    tokens: int


class Turn(NamedTuple):
    """What a server did in a turn. CPU time is of all its processes."""

    tokens_s: float
    cpu_us_per_token: float


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


def compare(plain: Settings, keyed: Settings, load: Load) -> dict[str, Any]:
    """With the settings of `keyed` too, as fractions of without: medians over pairs of turns, and
    each pair's."""
    pairs: list[tuple[Turn, Turn]] = []
    for start in range(STARTS):
        settings = {"plain": plain, "keyed": plain | keyed}
        names = ("plain", "keyed") if start % 2 else ("keyed", "plain")
        with ExitStack() as stack:
            servers = {name: stack.enter_context(manta_server(settings[name])) for name in names}
            pairs += asyncio.run(take_turns(servers, load))
    speeds = [keyed.tokens_s / plain.tokens_s for keyed, plain in pairs]
    cpu = [keyed.cpu_us_per_token / plain.cpu_us_per_token for keyed, plain in pairs]
    return {
        "load": load._asdict(),
        "tokens_s_with_keys": statistics.median(keyed.tokens_s for keyed, _ in pairs),
        "tokens_s_without": statistics.median(plain.tokens_s for _, plain in pairs),
        "tokens_s_ratio": statistics.median(speeds),
        "tokens_s_of_turns": speeds,
        "cpu_ratio": statistics.median(cpu),
        "cpu_of_turns": cpu,
    }


async def take_turns(servers: Mapping[str, ManagedServer], load: Load) -> list[tuple[Turn, Turn]]:
    """Pairs of turns with keys and without."""
    pairs: list[tuple[Turn, Turn]] = []
    for turn in range(TURNS + 1):
        found = {}
        for name in ("plain", "keyed") if turn % 2 else ("keyed", "plain"):
            headers = "" if name == "plain" else "x-api-key: b\r\n"
            found[name] = await run_turn(servers[name], headers, load, turn)
        if turn:  # the first turn warms both up
            pairs.append((found["keyed"], found["plain"]))
    return pairs


async def run_turn(server: ManagedServer, headers: str, load: Load, turn: int) -> Turn:
    """From the first token to the last."""
    left = itertools.islice(bodies(load.tokens, turn * 1000), load.streams)
    scraper = asyncio.create_task(scrape(server)) if headers else None
    cpu = server.cpu_seconds()
    readers = [
        await connect(server.port, lambda: next(left, None), headers) for _ in range(load.streams)
    ]
    await asyncio.gather(*(reader.closed for reader in readers))
    cpu = server.cpu_seconds() - cpu
    if scraper is not None:
        scraper.cancel()
    streams = [stream for reader in readers for stream in reader.streams]
    tokens = sum(stream.tokens for stream in streams)
    began = min(stream.arrivals[0][0] for stream in streams)
    return Turn(tokens / (max(s.ended for s in streams) - began), cpu / tokens * 1e6)


async def scrape(server: ManagedServer) -> None:
    async with httpx.AsyncClient(base_url=server.base_url, headers={"x-api-key": "m"}) as client:
        while True:
            (await client.get("/metrics")).raise_for_status()
            await asyncio.sleep(1.0)


if __name__ == "__main__":
    sys.exit(main())
