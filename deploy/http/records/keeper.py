"""`Keeper`: keeps the record of one request while it is answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from deploy.http.records.store import Record, RecordStore
from engine.errors import RequestError

logger = logging.getLogger(__name__)

UNENDED_AGE_S = 24 * 3600.0
"""Of the record of a stream whose process was lost, if it isn't read on."""


class Keeper:
    """Of one answer. What isn't awaited is done beside it, also if its client leaves."""

    def __init__(
        self,
        store: RecordStore,
        record: Record,
        *,
        must: bool = False,
        is_new: bool = True,
        stream_age_s: float | None = None,
    ) -> None:
        """`must`: the request isn't answered if it can't be kept. `is_new`: False if the record is
        in the store: then it is answered again. `stream_age_s`: how long the record of a stream is
        kept behind its end; None: it has a response, which is kept as long as any."""
        self.record = record
        self.is_new = is_new
        self._store = store
        self._must = must
        self._age_s = stream_age_s
        self._tasks: list[asyncio.Task[Any]] = []

    async def begin(self, response: dict[str, Any] | None = None) -> bool:
        """Keep the request, which is to be answered, and its response so far. False if that fails
        and the request doesn't insist on it; else it raises `RequestError`."""
        if not self.is_new:
            return True
        is_stream = self._age_s is not None
        self.record = record = msgspec.structs.replace(self.record, response=response)
        try:
            age_s = UNENDED_AGE_S if is_stream else None
            await self._store.add(record, age_s, lease=not is_stream)
        except RequestError:
            if self._must:
                raise
            return False
        return True

    def begin_beside(self, then: Callable[[bool], None]) -> asyncio.Task[None]:
        """As `begin`, of a stream; `then` gets what that returns."""

        async def run() -> None:
            then(await self.begin())

        self._tasks.append(task := asyncio.create_task(run()))
        return task

    async def end(self, response: dict[str, Any] | None = None) -> None:
        """The answer is complete. If that can't be kept, the client gets it all the same."""
        try:
            await self._store.end(self.record, response, self._age_s)
        except RequestError:
            logger.error("request %s was answered, which couldn't be kept", self.record.id)

    def end_later(self) -> None:
        """As `end`, of a stream."""
        self._beside(self.end())

    def leave(self, response: dict[str, Any] | None = None) -> None:
        """The client left, and may come back. If the answer must be there, a process makes it."""
        if self.is_new:
            again_in_s = 0.0 if self.record.is_background else None
            self._beside(
                self._store.leave(self.record, response, self._age_s, again_in_s=again_in_s)
            )

    def forget(self) -> None:
        """There will be no answer."""
        if self.is_new:
            self._beside(self._store.delete(self.record.id, self.record.owner))

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            try:
                await work
            except RequestError as error:
                if error.status != 404:
                    logger.error("request %s stays unended in the store: %s", self.record.id, error)

        self._tasks.append(asyncio.create_task(run()))

    async def settle(self) -> None:
        """Return when all is done."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        for task in self._tasks:
            if not task.cancelled():
                task.result()
