"""Several streams of one request as one, without leaving a task or an open stream behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def merge(
    streams: Sequence[AsyncIterator[list[T]]],
) -> AsyncGenerator[list[tuple[int, T]], None]:
    """Items of all streams with their stream's number, in batches of what is there already.

    A stream gives lists of items. Ends when all streams have; the first error of one ends all.
    However it ends, every stream is closed before control returns, so use it within
    `contextlib.aclosing`.
    """
    if len(streams) == 1:  # no task between the engine and the client
        try:
            async for items in streams[0]:
                yield [(0, item) for item in items]
        finally:
            await _close(streams[0])
        return

    ready: list[tuple[int, T]] = []
    ended: list[asyncio.Task[None]] = []
    wake = asyncio.Event()

    async def pump(index: int, stream: AsyncIterator[list[T]]) -> None:
        try:
            async for items in stream:
                ready.extend((index, item) for item in items)
                wake.set()
        finally:
            await _close(stream)

    def on_end(task: asyncio.Task[None]) -> None:
        ended.append(task)
        wake.set()

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(on_end)
    try:
        while True:
            await wake.wait()
            wake.clear()
            if ready:
                batch = ready.copy()
                ready.clear()
                yield batch
            for task in ended:
                if not task.cancelled() and (error := task.exception()) is not None:
                    raise error
            if len(ended) == len(tasks) and not ready:
                return
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _close(stream: AsyncIterator[Any]) -> None:
    # Plain iterators have nothing to close; EngineClient's do, and closing aborts the request.
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()
    elif (aclose := getattr(stream, "aclose", None)) is not None:
        await aclose()
