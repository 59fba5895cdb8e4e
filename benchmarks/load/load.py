"""The load of a serving benchmark: what the prompts are and when they are sent."""

from __future__ import annotations

import asyncio
import random
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks.load.client import RequestRecord, stream

CHARS_PER_TOKEN = 4
"""Rough length of a token in source code, for text prompts where no tokenizer is given."""

Prompt = list[int] | str


@dataclass(frozen=True)
class Workload:
    """Requests of one run. Lengths are tokens; a prompt is a shared prefix plus its own part."""

    num_prompts: int
    input_len: int
    output_len: int
    dataset: str = "random"
    """`random`: token ids drawn from [min_token_id, vocab_size). `stdlib-text`: source text."""
    prefix_len: int = 0
    num_prefixes: int = 1
    min_token_id: int = 16
    vocab_size: int = 2048
    request_rate: float = float("inf")
    """Requests per second offered; infinite sends all at once, up to `concurrency`."""
    burstiness: float = 1.0
    concurrency: int | None = None
    """Requests in flight at most; None is no limit."""


def make_prompts(load: Workload, seed: int) -> list[Prompt]:
    """`load.num_prompts` prompts; request i starts with prefix i modulo `load.num_prefixes`."""
    if load.dataset == "stdlib-text":
        return list(_text_prompts(load, seed))
    return list(_token_prompts(load, seed))


def arrival_offsets(load: Workload, seed: int) -> list[float]:
    """Seconds from the start at which each request is due.

    Gaps are gamma distributed with shape `burstiness`: 1 is a Poisson process, less comes in
    bursts, more is steadier (the definition of vLLM's and SGLang's clients).
    """
    if load.request_rate == float("inf"):
        return [0.0] * load.num_prompts
    gaps = np.random.default_rng(seed).gamma(
        shape=load.burstiness,
        scale=1.0 / (load.request_rate * load.burstiness),
        size=load.num_prompts,
    )
    return [float(offset) for offset in np.cumsum(gaps) - gaps[0]]


async def run_requests(
    session: aiohttp.ClientSession,
    url: str,
    bodies: Sequence[dict[str, object]],
    offsets: Sequence[float],
    concurrency: int | None,
) -> list[RequestRecord]:
    """Send `bodies`, each due `offsets` seconds after the start, at most `concurrency` at a time.

    A request that waits for others to end is sent late; its record says when it was due.
    """
    gate = asyncio.Semaphore(concurrency or max(1, len(bodies)))
    start = time.perf_counter()

    async def one(body: dict[str, object], record: RequestRecord) -> None:
        await asyncio.sleep(max(0.0, record.due - time.perf_counter()))
        async with gate:
            await stream(session, url, body, record)

    records = [RequestRecord(due=start + offset) for offset in offsets]
    await asyncio.gather(*(one(b, r) for b, r in zip(bodies, records, strict=True)))
    return records


def _token_prompts(load: Workload, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    ids = range(load.min_token_id, load.vocab_size)
    prefixes = [rng.choices(ids, k=load.prefix_len) for _ in range(load.num_prefixes)]
    return [
        prefixes[i % load.num_prefixes] + rng.choices(ids, k=load.input_len)
        for i in range(load.num_prompts)
    ]


def _text_prompts(load: Workload, seed: int) -> list[str]:
    """Stretches of the standard library's source, `CHARS_PER_TOKEN` characters for each token."""
    rng = random.Random(seed)
    corpus = _stdlib_corpus()

    def stretch(tokens: int) -> str:
        start = rng.randrange(len(corpus) - tokens * CHARS_PER_TOKEN)
        return corpus[start : start + tokens * CHARS_PER_TOKEN]

    prefixes = [stretch(load.prefix_len) for _ in range(load.num_prefixes)]
    return [
        prefixes[i % load.num_prefixes] + stretch(load.input_len) for i in range(load.num_prompts)
    ]


def _stdlib_corpus() -> str:
    """The top-level modules of the running Python's standard library, about 6 MB."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return "".join(
        path.read_text(encoding="utf-8", errors="replace") for path in sorted(root.glob("*.py"))
    )
