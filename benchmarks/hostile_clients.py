"""Hostile clients at a running server: what they do to 64 streams, to memory and to processes.

    python benchmarks/hostile_clients.py          # a table, three minutes
    python benchmarks/hostile_clients.py --save   # also results/hostile-clients.json

64 streams run all the time. The attacks (hostile_attacks.py) come one after the other, so that a
gap in a stream belongs to one of them. Thresholds: no stream is lost, no gap is longer than 1 s,
the memory of ingress and tokenizer grows by at most 300 MB, two seconds after an attack nothing of
it runs or waits, and at the end no page is held and no process is busy.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import REPO_ROOT, completion_body, finish, print_table, save_result
from benchmarks.hostile_attacks import ATTACKS
from benchmarks.servers import (
    ManagedServer,
    ServerError,
    exit_on_sigterm,
    manta_server,
)
from benchmarks.stream_reader import Connection, StreamError, connect
from tests.support.processes import actor_pids, cpu_seconds_by_process, launch_mark, resident_mib

MAX_GAP_S = 1.0
MAX_GROWTH_MIB = 300
MAX_BUSY_S = 0.15
"""CPU seconds that all processes may take more in two seconds at the end than before all."""
TOKENS = 2000
"""Of a stream. The time until a stream's first token is no gap between tokens."""
AFTER_S = 2.0
QUIET_S = 1.0
IDLE_S = 10.0
WATCHED = ("ServeReplica:llm:ingress", "TokenizerActor")
RESULT = REPO_ROOT / "benchmarks" / "results" / "hostile-clients.json"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--config", default="configs/llama.yaml")
    parser.add_argument("--save", action="store_true", help="write the result")
    args = parser.parse_args()
    exit_on_sigterm()
    try:
        room = {"max_total_tokens": args.streams * 2560}
        with manta_server(room, args.config) as server:
            rows, end = asyncio.run(measure(server, args.streams))
    except (ServerError, StreamError) as error:
        print(error, file=sys.stderr)
        finish({"benchmark": "hostile-clients", "error": str(error)}, False)
        return 1
    columns = ("attack", "answers", "seconds", "gap_s", "growth_mib", "left", "ok")
    print_table(
        ["attack", "answers", "seconds", "longest gap s", "memory +MiB", "left after 2 s", "ok"],
        [[str(row[c]) if c == "ok" else row[c] for c in columns] for row in rows],
    )
    ok = all(row["ok"] for row in rows) and end["ok"]
    result = {
        "benchmark": "hostile-clients",
        "streams": args.streams,
        "config": args.config,
        "rows": rows,
        "end": end,
    }
    if args.save:
        save_result(RESULT, result, ok)
    finish(result, ok)
    return 0 if ok else 1


async def measure(
    server: ManagedServer, streams: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One row per attack, and the state at the end. Raises `StreamError` if a stream is lost."""
    mark = launch_mark(server.pid)
    pids = [pid for name in WATCHED for pid in actor_pids(mark, name)]
    await asyncio.sleep(5.0)  # the end of the start
    idle_s = await cpu_seconds(server)
    bodies = free_bodies()
    readers = [await connect(server.port, lambda: next(bodies)) for _ in range(streams)]
    rows = []
    async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
        try:
            for name in ("none", *ATTACKS):
                rows.append(await attack(server, client, name, readers, pids))
                await asyncio.sleep(QUIET_S)
                for reader in readers:
                    if reader.closed.done():
                        reader.closed.result()
        finally:
            for reader in readers:
                reader.close()
        for reader in readers:
            reader.closed.result()
        began = time.monotonic()
        while (held := await metric(client, "manta_engine_num_running")) > 0:
            if time.monotonic() - began > AFTER_S:
                break
            await asyncio.sleep(0.05)
        free_s = time.monotonic() - began
        pages = await metric(client, "manta_engine_kv_used_tokens")  # cached ones are free
    await asyncio.sleep(3.0)  # the end of 64 streams is work, too
    busy_s = await cpu_seconds(server)
    fine = held == 0 and pages == 0 and busy_s - idle_s <= MAX_BUSY_S
    state = {"free_s": free_s, "held_tokens": pages, "idle_cpu_s": idle_s, "end_cpu_s": busy_s}
    return rows, {**state, "ok": fine}


async def cpu_seconds(server: ManagedServer) -> float:
    """What all processes of the server take in `AFTER_S`."""
    before = cpu_seconds_by_process(server.pid)
    await asyncio.sleep(AFTER_S)
    after = cpu_seconds_by_process(server.pid)
    return sum(after.values()) - sum(before.get(name, 0.0) for name in after)


def free_bodies() -> Iterator[bytes]:
    for i in itertools.count():
        prompt = [10 + i % 4000, *range(10, 20)]
        yield json.dumps(completion_body(prompt, TOKENS)).encode()


def longest_gap(readers: list[Connection], began: float, ended: float) -> float:
    """The longest time between two tokens of a stream, and from the last one to `ended`."""
    longest = 0.0
    for reader in readers:
        for stream in reader.streams:
            times = [at for at, count in stream.arrivals if count]
            times += [stream.ended or ended] if times else []
            gaps = (b - a for a, b in itertools.pairwise(times) if b > began and a < ended)
            longest = max(longest, max(gaps, default=0.0))
    return longest


async def attack(
    server: ManagedServer,
    client: httpx.AsyncClient,
    name: str,
    readers: list[Connection],
    pids: list[int],
) -> dict[str, Any]:
    before = sum(map(resident_mib, pids))
    peak, began = before, time.monotonic()
    answers = ""
    if name == "none":
        await asyncio.sleep(IDLE_S)
    else:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(REPO_ROOT / "benchmarks/hostile_attacks.py"),
            name,
            f"--port={server.port}",
            f"--pid={server.pid}",
            stdout=asyncio.subprocess.PIPE,
        )
        said = asyncio.create_task(process.communicate())
        while not said.done():
            await asyncio.wait([said], timeout=0.1)
            peak = max(peak, sum(map(resident_mib, pids)))
        found = json.loads(said.result()[0] or b'{"failed": 1}')
        answers = ", ".join(f"{count}x {status}" for status, count in found.items())
    seconds = time.monotonic() - began
    await asyncio.sleep(AFTER_S)
    gap_s = longest_gap(readers, began, time.monotonic())
    left = await metric(client, "manta_engine_num_running") - len(readers)
    left += await metric(client, "manta_engine_num_waiting")
    growth = max(peak, sum(map(resident_mib, pids))) - before
    fine = gap_s <= MAX_GAP_S and growth <= MAX_GROWTH_MIB and left <= 0 and "failed" not in answers
    return {
        "attack": name,
        "answers": answers,
        "seconds": seconds,
        "gap_s": gap_s,
        "growth_mib": growth,
        "left": left,
        "ok": fine,
    }


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """Sum of a metric's series."""
    text = (await client.get("/metrics")).text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M))


if __name__ == "__main__":
    sys.exit(main())
