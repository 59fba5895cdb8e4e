"""Time to first token with and without a prefix cache hit, through the whole server.

    python benchmarks/prefix_cache.py [--base-url URL] [--save FILE]

For each round a fresh 1,500-token prefix is sent once (miss), then with another tail (hit).
`ok`: median TTFT of misses >= 3 x that of hits, and `cached_tokens` says so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import completion_body, finish, print_table, save_result
from benchmarks.load.client import RequestRecord, analyse, stream
from benchmarks.servers import manta_server

PREFIX, TAIL, ROUNDS, VOCAB = 1500, 8, 15, 4096


async def first_token(
    session: aiohttp.ClientSession, url: str, prompt: list[int]
) -> tuple[float, int]:
    """(seconds until the first text chunk, cached tokens that the reply reports)."""
    body = completion_body(prompt, 2, return_token_ids=True)
    record = RequestRecord()
    await stream(session, f"{url}/v1/completions", body, record)
    result = analyse(record, expected_tokens=2)
    if result.error is not None:
        raise RuntimeError(result.error)
    return result.ttft, result.cached_tokens


async def measure(url: str) -> tuple[list[float], list[float], bool]:
    """TTFT of misses and hits in seconds, and whether `cached_tokens` was right throughout."""
    rng = random.Random(0)
    misses, hits, right = [], [], True
    async with aiohttp.ClientSession() as session:
        await first_token(session, url, [rng.randrange(6, VOCAB) for _ in range(PREFIX)])
        for _ in range(ROUNDS):
            prefix = [rng.randrange(6, VOCAB) for _ in range(PREFIX)]
            for times, expected in ((misses, 0), (hits, PREFIX // 16 * 16)):
                tail = [rng.randrange(6, VOCAB) for _ in range(TAIL)]
                ttft, cached = await first_token(session, url, prefix + tail)
                times.append(ttft)
                right = right and cached == expected
    return misses, hits, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base-url", help="a running server with page size 16")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = options.base_url or stack.enter_context(manta_server()).base_url
        misses, hits, right = asyncio.run(measure(url))
    miss, hit = statistics.median(misses) * 1e3, statistics.median(hits) * 1e3
    print_table(
        ["", "TTFT median ms", "min", "max"],
        [
            ["miss", round(miss, 1), round(min(misses) * 1e3, 1), round(max(misses) * 1e3, 1)],
            ["hit", round(hit, 1), round(min(hits) * 1e3, 1), round(max(hits) * 1e3, 1)],
            ["ratio", round(miss / hit, 2), "", ""],
        ],
    )
    figures: dict[str, object] = {
        "benchmark": "prefix_cache",
        "prefix_tokens": PREFIX,
        "rounds": ROUNDS,
        "ttft_miss_ms": miss,
        "ttft_hit_ms": hit,
        "ratio": miss / hit,
        "cached_tokens_right": right,
    }
    ok = right and miss >= 3 * hit
    if options.save:
        save_result(options.save, figures, ok)
    finish(figures, ok)


if __name__ == "__main__":
    main()
