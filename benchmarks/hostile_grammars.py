"""Hostile grammars at a running server: how soon each is answered, how long other streams wait.

    python benchmarks/hostile_grammars.py          # a table, two minutes
    python benchmarks/hostile_grammars.py --save   # also results/hostile-grammars.json

Streams of free requests run all the time. The grammars come one after the other, so that a gap in
a stream belongs to one of them. Some may be compiled, and their requests then run; the others must
be refused with 400. At the end eight that take too long are sent at once. They are checked one
after the other, so the last ones wait for the first; the streams must not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import REPO_ROOT, completion_body, finish, print_table, save_result
from benchmarks.servers import ManagedServer, ServerError, exit_on_sigterm, manta_server
from benchmarks.stream_reader import Connection, connect
from engine.constraints import ConstraintSpec
from tests.support.hostile_grammars import MAY_PASS, NEVER_PASS

MAX_ANSWER_S = 2.0
MAX_GAP_S = 0.5
QUIET_S = 1.0
"""Time between two grammars. The first half of it still counts as the one's before."""
IDLE_S = 10.0
"""Time without grammars at the beginning, to see the streams' own gaps."""
FIRST = "the first of all, a good one"
"""Its request waits for the process that checks grammars to start."""
AT_ONCE = "eight large automata at once"
FIELDS = {"json_schema": "json", "lark": "grammar"}
RESULT = REPO_ROOT / "benchmarks" / "results" / "hostile-grammars.json"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=8, help="free requests all the time")
    parser.add_argument("--config", default="configs/llama.yaml")
    parser.add_argument("--save", action="store_true", help="write the result")
    args = parser.parse_args()
    exit_on_sigterm()
    try:
        with manta_server(config=args.config) as server:
            rows = asyncio.run(measure(server, args.streams))
    except ServerError as error:
        print(error, file=sys.stderr)
        finish({"benchmark": "hostile-grammars", "error": str(error)}, False)
        return 1
    print_table(
        ["grammar", "status", "answer s", "longest gap s", "ok"],
        [[r["grammar"], r["status"], r["answer_s"], r["gap_s"], str(r["ok"])] for r in rows],
    )
    ok = all(row["ok"] for row in rows)
    result = {
        "benchmark": "hostile-grammars",
        "streams": args.streams,
        "config": args.config,
        "rows": rows,
    }
    if args.save:
        save_result(RESULT, result, ok)
    finish(result, ok)
    return 0 if ok else 1


async def measure(server: ManagedServer, streams: int) -> list[dict[str, Any]]:
    """One row per grammar. Raises `StreamError` if one of the streams fails."""
    bodies = free_bodies()
    readers = [await connect(server.port, lambda: next(bodies)) for _ in range(streams)]
    rows = []
    try:
        async with httpx.AsyncClient(
            base_url=server.base_url, timeout=60, headers={"Content-Type": "application/json"}
        ) as client:
            began = time.monotonic()
            await asyncio.sleep(IDLE_S)
            rows.append(row("none", [], began, readers))
            for name, specs in cases().items():
                began = time.monotonic()
                replies = await asyncio.gather(*(answer(client, spec) for spec in specs))
                await asyncio.sleep(QUIET_S / 2)
                rows.append(row(name, replies, began, readers))
                await asyncio.sleep(QUIET_S / 2)
    finally:
        for reader in readers:
            reader.close()
    for reader in readers:
        reader.closed.result()
    return rows


def cases() -> dict[str, list[ConstraintSpec]]:
    """The grammars that are sent at once, by name."""
    first = ConstraintSpec("grammar", {"type": "regex", "value": "the first"})
    automaton = NEVER_PASS["a large automaton"].payload
    copies = [
        ConstraintSpec("grammar", {**automaton, "value": automaton["value"] + f"\nB: /{i}/"})
        for i in range(8)
    ]
    every = {name: [spec] for name, spec in {**MAY_PASS, **NEVER_PASS}.items()}
    return {FIRST: [first], **every, AT_ONCE: copies}


async def answer(client: httpx.AsyncClient, spec: ConstraintSpec) -> tuple[int, float]:
    """(status, seconds) of a request for one token."""
    began = time.monotonic()
    reply = await client.post("/v1/completions", content=body_of(spec))
    return reply.status_code, time.monotonic() - began


def body_of(spec: ConstraintSpec) -> bytes:
    kind, value = spec.payload["type"], spec.payload["value"]
    # A deep schema is JSON already; Python's encoder would refuse it.
    text = value if kind == "json_schema" else json.dumps(value)
    field = FIELDS.get(kind, kind)
    return (
        f'{{"model": "manta-small", "prompt": "def", "max_tokens": 1, '
        f'"structured_outputs": {{"{field}": {text}}}}}'
    ).encode()


def free_bodies() -> Iterator[bytes]:
    for i in itertools.count():
        prompt = [10 + i % 4000, *range(10, 20)]
        yield json.dumps(completion_body(prompt, 1000, model="manta-small")).encode()


def row(
    name: str,
    replies: Sequence[tuple[int, float]],
    began: float,
    readers: list[Connection],
) -> dict[str, Any]:
    answer_s = max((seconds for _, seconds in replies), default=0.0)
    gap_s = longest_gap(readers, began, time.monotonic())
    expected = {200} if name == FIRST else {200, 400} if name in MAY_PASS else {400}
    in_time = answer_s <= MAX_ANSWER_S or name in (FIRST, AT_ONCE)
    statuses = {status for status, _ in replies}
    return {
        "grammar": name,
        "status": "/".join(map(str, sorted(statuses))),
        "answer_s": answer_s,
        "gap_s": gap_s,
        "ok": statuses <= expected and in_time and gap_s <= MAX_GAP_S,
    }


def longest_gap(readers: list[Connection], began: float, ended: float) -> float:
    """The longest time between two arrivals of a stream, and from the last one to `ended`."""
    longest = 0.0
    for reader in readers:
        for stream in reader.streams:
            times = [stream.sent, *(at for at, count in stream.arrivals if count)]
            times.append(stream.ended or ended)
            gaps = (b - a for a, b in itertools.pairwise(times) if b > began and a < ended)
            longest = max(longest, max(gaps, default=0.0))
    return longest


if __name__ == "__main__":
    sys.exit(main())
