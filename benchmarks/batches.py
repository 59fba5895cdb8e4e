"""What requests notice of a batch beside them, and what it gets of the machine.

A whole server whose device is simulated, with steps as of a large model, so that two cores suffice
for all else. In each round requests come at random times: alone, beside a batch that never ends,
and then the batch has the server for itself. Time to the first token and gaps are the clients';
tokens are prompts' and outputs'.

    python benchmarks/batches.py --rounds 3          # a table, 15 minutes
    python benchmarks/batches.py --rounds 3 --save   # also results/batches.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import REPO_ROOT, completion_body, finish, print_table, save_result
from benchmarks.servers import ManagedServer, exit_on_sigterm, manta_server

RESULT = REPO_ROOT / "benchmarks" / "results" / "batches.json"
DEVICE = "{step_ms: 30.0, token_us: 100.0, context_ns: 20.0}"
"""A decode of few rows takes 30 ms, 512 tokens take 81 ms."""
OPTIONS = {
    "device": "simulated",
    "simulated": DEVICE,
    "max_total_tokens": 200_000,
    "max_running_requests": 64,
}
PATH = "/v1/completions"
LINES = 3_000
WARM_S, WINDOW_S = 10.0, 60.0
RATE = 1.0
"""Requests per second."""
MOST_TTFT, MOST_GAP, LEAST_SHARE = 1.1, 1.2, 0.9


@dataclass
class Noticed:
    """What clients and counters saw in one window."""

    ttft_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    own_tokens: int = 0
    """Of the clients' requests."""
    all_tokens: float = 0.0
    seconds: float = 0.0

    @property
    def batch_tokens_s(self) -> float:
        """Tokens per second that weren't the clients'."""
        return (self.all_tokens - self.own_tokens) / self.seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--save", action="store_true", help="write the result")
    args = parser.parse_args()
    exit_on_sigterm()
    with tempfile.TemporaryDirectory() as folder:
        store = {"request_store_path": f"{folder}/r.sqlite3", "file_store": f"{folder}/files"}
        with manta_server(OPTIONS | store) as server:
            rounds = asyncio.run(measure(server, args.rounds, args.rate))
    print_table(list(rounds[0]), [list(row.values()) for row in rounds])
    middle = {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}
    ok = (
        middle["ttft_p99_ratio"] <= MOST_TTFT
        and middle["gap_p99_ratio"] <= MOST_GAP
        and middle["share"] >= LEAST_SHARE
    )
    figures: dict[str, Any] = {"benchmark": "batches", "rate": args.rate, **middle}
    figures["rounds"] = rounds
    if args.save:
        save_result(RESULT, figures, ok)
    finish(figures, ok)
    return 0 if ok else 1


async def measure(server: ManagedServer, rounds: int, rate: float) -> list[dict[str, float]]:
    """The figures of each round."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(server.base_url, timeout=timeout) as http:
        found = []
        for number in range(rounds + 1):
            without = await window(http, rate, number, "without")
            batch = await begin(http, number)
            beside = await window(http, rate, number, "beside")
            alone = await window(http, 0.0, number, "alone")
            await end(http, batch)
            if number:  # the first warms up
                found.append(compared(without, beside, alone))
                print(found[-1], file=sys.stderr)
        return found


def compared(without: Noticed, beside: Noticed, alone: Noticed) -> dict[str, float]:
    """The figures of one round."""
    left = alone.batch_tokens_s - beside.own_tokens / beside.seconds
    before, after = (
        [np.quantile(n.ttft_s, 0.99), np.quantile(n.gap_s, 0.99)] for n in (without, beside)
    )
    return {
        "ttft_p99_ms": 1e3 * float(before[0]),
        "ttft_p99_ratio": float(after[0] / before[0]),
        "ttft_p50_ratio": float(np.median(beside.ttft_s) / np.median(without.ttft_s)),
        "gap_p99_ms": 1e3 * float(before[1]),
        "gap_p99_ratio": float(after[1] / before[1]),
        "gap_mean_ratio": float(np.mean(beside.gap_s) / np.mean(without.gap_s)),
        "alone_tokens_s": alone.batch_tokens_s,
        "share": beside.batch_tokens_s / left,
    }


def line(number: int) -> bytes:
    """A line of a batch."""
    rng = random.Random(number)
    line = {"custom_id": f"{number}", "method": "POST", "url": PATH, "body": request(rng, rng)}
    return json.dumps(line).encode() + b"\n"


def request(sizes: random.Random, words: random.Random) -> dict[str, Any]:
    """A body of 100 to 900 tokens in, 50 to 350 out; no other prompt begins like its own."""
    prompt = [words.randrange(10, 4000) for _ in range(sizes.randrange(100, 900))]
    return completion_body(prompt, sizes.randrange(50, 350))


async def begin(http: aiohttp.ClientSession, number: int) -> str:
    """Start a batch of lines of its own, and wait until it runs."""
    form = aiohttp.FormData({"purpose": "batch"})
    lines = range(number * LINES, (number + 1) * LINES)
    form.add_field("file", b"".join(map(line, lines)), filename="in.jsonl")
    async with http.post("/v1/files", data=form) as reply:
        file_id = (await reply.json())["id"]
    given = {"input_file_id": file_id, "endpoint": PATH, "completion_window": "24h"}
    async with http.post("/v1/batches", json=given) as reply:
        batch = await reply.json()
    while batch["request_counts"]["completed"] == 0:
        await asyncio.sleep(0.5)
        async with http.get(f"/v1/batches/{batch['id']}") as reply:
            batch = await reply.json()
    return str(batch["id"])


async def end(http: aiohttp.ClientSession, batch: str) -> None:
    """Cancel it, and wait until nothing of it runs."""
    async with http.post(f"/v1/batches/{batch}/cancel") as reply:
        await reply.read()
    status = ""
    while status != "cancelled":
        await asyncio.sleep(0.5)
        async with http.get(f"/v1/batches/{batch}") as reply:
            status = (await reply.json())["status"]
            assert status in ("cancelling", "cancelled"), "the batch was too short"


async def window(http: aiohttp.ClientSession, rate: float, number: int, name: str) -> Noticed:
    """Requests at random times, of the same sizes in each window of a round, and of other words."""
    rng, words, noticed = random.Random(f"{number}"), random.Random(f"{number} {name}"), Noticed()
    began = time.monotonic()
    opens, closes = began + WARM_S, began + WARM_S + WINDOW_S
    counting = asyncio.create_task(count(http, noticed, opens, closes))
    tasks = []
    at = began
    while rate and (at := at + rng.expovariate(rate)) < closes:
        body = request(rng, words)
        await asyncio.sleep(max(at - time.monotonic(), 0.0))
        tasks.append(asyncio.create_task(stream(http, body, noticed, opens, closes)))
    await asyncio.gather(counting, *tasks)
    return noticed


async def count(http: aiohttp.ClientSession, noticed: Noticed, opens: float, closes: float) -> None:
    """Tokens of all requests in the window, by the engine's counters."""
    before = 0.0
    for at in (opens, closes):
        await asyncio.sleep(max(at - time.monotonic(), 0.0))
        noticed.seconds, before = time.monotonic() - noticed.seconds, noticed.all_tokens
        noticed.all_tokens = await tokens(http) - before


async def tokens(http: aiohttp.ClientSession) -> float:
    async with http.get("/metrics") as reply:
        text = await reply.text()
    names = ("manta_engine_prompt_tokens_total{", "manta_engine_generation_tokens_total{")
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(names))


async def stream(
    http: aiohttp.ClientSession,
    body: dict[str, Any],
    noticed: Noticed,
    opens: float,
    closes: float,
) -> None:
    """One request; what falls into the window is noted."""
    sent, last = time.monotonic(), 0.0
    async with http.post(PATH, json={**body, "stream": True}) as reply:
        assert reply.status == 200, await reply.text()
        async for chunk in reply.content.iter_any():
            now, events = time.monotonic(), chunk.count(b'"text"')
            if events and opens <= now < closes:
                noticed.own_tokens += events + (0 if last else len(body["prompt"]))
                if last:
                    noticed.gap_s.append(now - last)
                else:
                    noticed.ttft_s.append(now - sent)
            if events:
                last = now


if __name__ == "__main__":
    sys.exit(main())
