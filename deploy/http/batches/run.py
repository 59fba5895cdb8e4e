"""`BatchRun`: answers the lines of a batch that have no answer yet, many at once.

What it knows is in its output's parts. So it may be stopped anywhere, and another one goes on: a
line may run twice, and both times its answer is the same.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from deploy.http.batches.line_asker import LineAsker
from deploy.http.batches.lines import BatchLine, Source
from deploy.http.batches.output import PART_BYTES, BatchOutput
from deploy.http.engine_client import EngineClient
from engine.errors import RequestError

logger = logging.getLogger(__name__)

FLUSH_S, SELDOM_S = 2.0, 60.0
"""Answers are kept after the first time at the beginning, later more seldom, so that there are not
too many parts; after the second at the latest."""
NOT_NOW = (408, 429, 503)
"""Statuses of errors that pass: the line is asked again."""
RETRY_S = 1.0
MAX_FAILURES = 3
"""Times that a line may end with 500."""


class _Slots:
    """How many lines are asked at once. Additive increase, multiplicative decrease: half as many
    when a line is told to come again, one more whenever as many were answered (TCP's rule)."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._limit = float(most)
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._halved_at = -RETRY_S

    async def take(self) -> None:
        """Wait for one."""
        if self._taken < int(self._limit):
            self._taken += 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        await mine

    def give_back(self, *, was_refused: bool) -> None:
        """One is free again."""
        now = time.monotonic()
        if not was_refused:
            self._limit = min(self._limit + 1 / self._limit, self.most)
        elif now - self._halved_at >= RETRY_S:  # one refusal stands for those of the same time
            self._halved_at, self._limit = now, max(self._limit / 2, 1.0)
        self._taken -= 1
        while self._waiting and self._taken < int(self._limit):
            mine = self._waiting.popleft()
            if not mine.done():
                self._taken += 1
                mine.set_result(None)


class BatchRun:
    """Of one batch in one process."""

    def __init__(
        self,
        source: Source,
        output: BatchOutput,
        asker: LineAsker,
        width: int,
        on_flush: Callable[[], Awaitable[None]],
    ) -> None:
        """`width`: lines that are asked at once. `on_flush` is called every `FLUSH_S`, and when
        answers were kept; what it raises ends the run."""
        self._source = source
        self._output = output
        self._asker = asker
        self._slots = _Slots(width)
        self._on_flush = on_flush

    async def run(self) -> None:
        """Return when every line has an answer that is kept. Raises `StopBatch`, `RequestError` of
        what keeps the answers, and what `on_flush` raises; then what was answered is kept, if it
        can be."""
        flushing = asyncio.create_task(self._flush_on())
        reading = asyncio.create_task(self._read())
        try:
            done, _ = await asyncio.wait((flushing, reading), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (flushing, reading):
                task.cancel()
            await asyncio.gather(flushing, reading, return_exceptions=True)
            await self._output.flush()
        await self._on_flush()

    def widen(self, width: int) -> None:
        """So many lines may be asked at once from now on."""
        self._slots.most = width

    async def _read(self) -> None:
        """Ask every line that has no answer."""
        async with aclosing(self._source.several()) as lines:
            try:
                async with asyncio.TaskGroup() as asked:
                    async for found in lines:
                        for number, raw in found:
                            if self._output.has(number):
                                continue
                            await self._slots.take()
                            asked.create_task(self._answer(self._source.read(number, raw)))
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None

    async def _answer(self, line: BatchLine) -> None:
        """Ask a line, which has a slot, until it has an answer."""
        failures = 0
        while True:
            reply = await self._asker.ask(line)
            is_refused = reply.status in NOT_NOW
            failures += reply.status >= 500 and not is_refused
            self._slots.give_back(was_refused=is_refused)
            if not is_refused and (reply.status < 500 or failures == MAX_FAILURES):
                break
            await asyncio.sleep(RETRY_S)
            await self._slots.take()
        self._output.add(self._asker.answer(line, reply))
        if self._output.waiting_bytes > PART_BYTES:
            await self._flush()

    async def _flush_on(self) -> None:
        began = flushed = time.monotonic()
        while True:
            await asyncio.sleep(FLUSH_S)
            now = time.monotonic()
            if now - flushed >= min(math.sqrt(now - began), SELDOM_S):
                flushed = now
                await self._flush()
            else:
                await self._on_flush()

    async def _flush(self) -> None:
        try:
            await self._output.flush()
        except RequestError as error:  # it stays in the output, and is tried again
            if self._output.waiting_bytes > 16 * PART_BYTES:
                raise
            logger.error("answers of a batch can't be kept yet: %s", error)
        await self._on_flush()


async def width_of(client: EngineClient) -> int:
    """Lines that are asked at once: those that may run in all engines, and as many that wait."""
    engines = max(len(await client.stats()), 1)
    return 2 * client.model_info.resolved.engine.max_running_requests * engines
