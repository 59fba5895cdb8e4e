"""Loads for a token path: the most tokens that it carries, and tokens at an engine's own pace."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import uvloop

from benchmarks.common import completion_body
from benchmarks.servers import ManagedServer
from benchmarks.stream_reader import Connection, Stream, connect

PROMPT_LEN = 16
VOCAB = range(10, 4000)
PAUSE_S = 0.5
"""Time after the last stream begins, and before the first one ends, left out of paced figures."""


class Throughput(NamedTuple):
    """What a saturated path carried. CPU times are of all server processes, in microseconds."""

    tokens_s: float
    """Chunks with text per second."""
    cpu_us_per_token: float
    server_cores: float
    client_cores: float
    tokens_per_chunk: float
    """Mean over the streams that ended. It is above 1 if a token has no text of its own, or if a
    path that is behind sends several tokens as one chunk. These count as one token."""


class Spread(NamedTuple):
    """Percentiles in ms."""

    p1: float
    p50: float
    p99: float
    worst: float


@dataclass
class Delays:
    """Tokens of paced streams, from the end of their engine step to the client."""

    tokens: int
    added: Spread
    client_gap: Spread
    """Time between two tokens of a stream at the client."""
    engine_gap: Spread
    """Time between the steps of the same tokens."""


def saturate(
    server: ManagedServer,
    port: int,
    streams: int,
    output_len: int,
    warm_s: float,
    window_s: float,
    *,
    headers: str = "",
) -> Throughput:
    """Keep `streams` requests of `output_len` tokens open and measure for `window_s`. `headers`: as
    in `Connection`.

    `tokens_per_chunk` is taken from all streams of the run that finished.
    """
    return uvloop.run(_saturate(server, port, streams, output_len, warm_s, window_s, headers))


async def _saturate(
    server: ManagedServer,
    port: int,
    streams: int,
    output_len: int,
    warm_s: float,
    window_s: float,
    headers: str,
) -> Throughput:
    bodies = _bodies(output_len)
    connections = [await connect(port, lambda: next(bodies), headers) for _ in range(streams)]
    try:
        await _run_for(connections, warm_s)
        started, server_cpu, client_cpu = (
            time.monotonic(),
            server.cpu_seconds(),
            time.process_time(),
        )
        await _run_for(connections, window_s)
        ended = time.monotonic()
        server_cpu = server.cpu_seconds() - server_cpu
        client_cpu = time.process_time() - client_cpu
    finally:
        for connection in connections:
            connection.close()
    every = [stream for connection in connections for stream in connection.streams]
    tokens = sum(n for stream in every for at, n in stream.arrivals if started <= at < ended)
    seconds = ended - started
    whole = [stream for stream in every if stream.tokens]
    return Throughput(
        tokens / seconds,
        server_cpu / tokens * 1e6,
        server_cpu / seconds,
        client_cpu / seconds,
        sum(stream.tokens for stream in whole) / max(1, sum(stream.chunks for stream in whole)),
    )


async def _run_for(connections: Sequence[Connection], seconds: float) -> None:
    """Let the streams run for `seconds`. Raises `StreamError` if one fails."""
    with _no_collection():
        done, _ = await asyncio.wait([c.closed for c in connections], timeout=seconds)
        for closed in done:
            closed.result()


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: the record of arrivals grows by many small objects."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def pace(
    port: int, streams: int, output_len: int, stagger_s: float, **more: object
) -> list[Stream]:
    """Run each stream once, `stagger_s` after the one before it; `more` goes into each request.

    Raises `StreamError` if one fails.
    """
    return uvloop.run(_pace(port, streams, output_len, stagger_s, more))


async def _pace(
    port: int, streams: int, output_len: int, stagger_s: float, more: dict[str, object]
) -> list[Stream]:
    bodies = _bodies(output_len, **more)
    connections = []
    with _no_collection():
        for _ in range(streams):
            once = iter([next(bodies)])
            connections.append(await connect(port, lambda once=once: next(once, None)))
            await asyncio.sleep(stagger_s)
        await asyncio.gather(*(connection.closed for connection in connections))
    return [connection.streams[0] for connection in connections]


def delays(streams: Sequence[Stream], steps: Sequence[float], firsts: Sequence[int]) -> Delays:
    """Delays of the tokens that came while all streams ran.

    `steps` is the monotonic time at which each engine step ended. `firsts` is the index into
    `steps` of each stream's first token; each later token is one step later. Raises `ValueError` if
    the streams never all ran at once.
    """
    times = [np.repeat(*map(np.asarray, zip(*s.arrivals, strict=True))) for s in streams]
    begin = max(t[0] for t in times) + PAUSE_S
    end = min(t[-1] for t in times) - PAUSE_S
    added, client, engine = [], [], []
    for first, came in zip(firsts, times, strict=True):
        made = np.asarray(steps[first : first + len(came)])
        chosen = (came >= begin) & (came < end)
        added.append((came - made)[chosen])
        client.append(np.diff(came[chosen]))
        engine.append(np.diff(made[chosen]))
    if not any(len(some) for some in added):
        raise ValueError("the streams never ran all at once")
    every = np.concatenate(added)
    return Delays(
        len(every), _spread(every), _spread(np.concatenate(client)), _spread(np.concatenate(engine))
    )


def _bodies(output_len: int, **more: object) -> Iterator[bytes]:
    rng = random.Random(0)
    for number in itertools.count():
        prompt = rng.choices(VOCAB, k=PROMPT_LEN)
        yield json.dumps(completion_body(prompt, output_len, user=str(number), **more)).encode()


def _spread(seconds: np.ndarray) -> Spread:
    return Spread(*(float(p) for p in np.percentile(seconds * 1e3, [1, 50, 99, 100])))
