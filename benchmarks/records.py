"""What it costs that streams can be read on: the token path with records, beside without.

Two servers with a simulated device take turns: `request_store: none`, and `sqlite` with an id in
each event. Then the store by itself: 10^5 requests through a file with a limit.

    python benchmarks/records.py --save
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import REPO_ROOT, completion_body, finish, print_table, save_result
from benchmarks.servers import ManagedServer, exit_on_sigterm, manta_server
from benchmarks.stream_reader import connect
from benchmarks.token_load import Throughput, saturate
from deploy.http.records.sqlite_store import WAL_BYTES, SqliteStore
from deploy.http.records.store import Record

RESULT = REPO_ROOT / "benchmarks" / "results" / "records.json"
ACCEPT = "Accept: text/event-stream\r\n"
STREAMS, WARM_S, WINDOW_S = 64, 4.0, 10.0
OUTPUT_LENS = (128, 2000)
NUM_FIRSTS = 400
"""Requests of a few tokens, one by one, whose first token is timed."""
MIN_SPEED, MAX_ADDED_MS = 0.97, 1.0
STORE_BYTES, NUM_RECORDS, BODY_BYTES = 32 << 20, 100_000, 2000


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path, nargs="?", const=RESULT, metavar="FILE")
    args = parser.parse_args()
    exit_on_sigterm()
    figures: dict[str, Any] = {"benchmark": "records"}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/records.sqlite3"
        with serve(request_store="none") as without, serve(request_store_path=path) as records:
            servers = {"without": (without, ""), "with": (records, ACCEPT)}
            figures["path"], fast = token_path(servers, args.rounds)
            figures["first token"], soon = first_tokens(servers, args.rounds)
        figures["store"], small = asyncio.run(through_the_store(Path(folder)))
    ok = fast and soon and small
    if args.save:
        save_result(args.save, figures, ok)
    finish(figures, ok)
    return 0 if ok else 1


def serve(**store: str) -> ManagedServer:
    options = {"device": "simulated", "simulated": "{step_ms: 1.0}", "max_total_tokens": 262144}
    return manta_server(options | store)


def token_path(
    servers: dict[str, tuple[ManagedServer, str]], rounds: int
) -> tuple[list[dict[str, Any]], bool]:
    """Tokens/s and CPU time at saturation, medians over rounds."""
    found, ok = [], True
    for output_len in OUTPUT_LENS:
        runs: dict[str, list[Throughput]] = {name: [] for name in servers}
        for number in range(rounds + 1):
            names = list(servers)
            for name in names if number % 2 == 0 else reversed(names):
                server, headers = servers[name]
                run = saturate(
                    server, server.port, STREAMS, output_len, WARM_S, WINDOW_S, headers=headers
                )
                if number:  # the first warms up
                    runs[name].append(run)
        pairs = list(zip(runs["with"], runs["without"], strict=True))
        speed = statistics.median(a.tokens_s / b.tokens_s for a, b in pairs)
        cpu = statistics.median(a.cpu_us_per_token / b.cpu_us_per_token for a, b in pairs)
        ok = ok and speed >= MIN_SPEED
        row: dict[str, Any] = {"output_len": output_len, "tokens_s": speed, "cpu_per_token": cpu}
        row["runs"] = {name: [run._asdict() for run in each] for name, each in runs.items()}
        found.append(row)
    rows = [[row["output_len"], row["tokens_s"], MIN_SPEED, row["cpu_per_token"]] for row in found]
    print_table(["tokens", "with / without: tok/s", "at least", "CPU/tok"], rows)
    return found, ok


def first_tokens(
    servers: dict[str, tuple[ManagedServer, str]], rounds: int
) -> tuple[dict[str, Any], bool]:
    """Milliseconds to the first token of single requests, in turn; medians."""
    times: dict[str, list[float]] = {name: [] for name in servers}
    for _ in range(rounds):
        for name, (server, headers) in servers.items():
            times[name] += asyncio.run(_firsts(server.port, headers, NUM_FIRSTS // rounds))
    medians = {name: statistics.median(each) for name, each in times.items()}
    added = medians["with"] - medians["without"]
    print_table(
        ["first token, ms", "without", "with", "added", "at most"],
        [["p50", medians["without"], medians["with"], added, MAX_ADDED_MS]],
    )
    return {**medians, "added_ms": added}, added <= MAX_ADDED_MS


async def _firsts(port: int, headers: str, count: int) -> list[float]:
    bodies = iter([body_of(number) for number in range(count)])
    connection = await connect(port, lambda: next(bodies, None), headers)
    await connection.closed
    firsts = []
    for stream in connection.streams:
        at = next(at for at, chunks in stream.arrivals if chunks)
        firsts.append((at - stream.sent) * 1e3)
    return firsts


def body_of(number: int) -> bytes:
    """A request of four tokens."""
    prompt = [10 + number % 3000, 11, 12, 13]
    return json.dumps(completion_body(prompt, 4, user=str(number))).encode()


async def through_the_store(folder: Path) -> tuple[dict[str, Any], bool]:
    """Write and end 10^5 requests; the file stays within its limit."""
    path = folder / "many.sqlite3"
    store = SqliteStore(path, 3600.0, STORE_BYTES)
    most, cpu, began = 0, time.process_time(), time.monotonic()
    for number in range(NUM_RECORDS):
        record = Record(
            id=f"cmpl-{number:032x}",
            owner="",
            endpoint="completions",
            request_id=f"{number:032x}",
            seed=number,
            created=0,
            digest="0" * 32,
            body=b"x" * BODY_BYTES,
        )
        await store.add(record, 600.0)
        await store.end(record, age_s=600.0)
        if number % 500 == 0:
            files = [path.with_name(path.name + end) for end in ("", "-wal")]
            most = max(most, sum(file.stat().st_size for file in files if file.exists()))
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    await store.close()
    limit = int(1.05 * STORE_BYTES) + 2 * WAL_BYTES
    found = {
        "records": NUM_RECORDS,
        "largest_bytes": most,
        "limit_bytes": STORE_BYTES,
        "us_per_record": seconds / NUM_RECORDS * 1e6,
        "cpu_us_per_record": cpu / NUM_RECORDS * 1e6,
    }
    print_table(
        ["store", "us each", "CPU us each", "file MiB", "at most"],
        [["", found["us_per_record"], found["cpu_us_per_record"], most / 2**20, limit / 2**20]],
    )
    return found, most <= limit


if __name__ == "__main__":
    sys.exit(main())
