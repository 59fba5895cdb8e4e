"""`Keeper`: keeps the record of one request while it is answered."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from deploy.http.records.store import Record, RecordStore
from deploy.http.records.token_log import AnswerTokens, TokenLog
from engine.errors import RequestError

logger = logging.getLogger(__name__)

BEGIN_S = 2.0
"""A store that does nothing for so long is done without, where that can be. While it does what
others asked for, a request waits for its turn."""
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
        in the store: then it is answered again. `stream_age_s`: how long the record is kept behind
        its end if it has no response then; None: it has one from the beginning. Those with a
        response are kept as long as any."""
        self.record = record
        self.is_new = is_new
        self.is_kept = not is_new
        """Whether it is in the store, as far as is known."""
        self._log: TokenLog | None = None
        self._tokens: AnswerTokens | None = None
        self._store = store
        self._must = must
        self._age_s = stream_age_s
        self._tasks: list[asyncio.Task[Any]] = []

    def keep_tokens(self, tokens: AnswerTokens, log: TokenLog) -> None:
        """Have these tokens written, once it has begun."""
        self._tokens, self._log = tokens, log

    async def begin(self, response: dict[str, Any] | None = None) -> bool:
        """As `_begin`; then its tokens are kept, too."""
        self.is_kept = await self._begin(response)
        if self.is_kept and self._tokens is not None and self._log is not None:
            self._log.open(self._tokens)
        return self.is_kept

    async def _begin(self, response: dict[str, Any] | None = None) -> bool:
        """Keep the request, which is to be answered, and its response so far. False if that fails
        and the request doesn't insist on it; else it raises `RequestError`."""
        is_stream = self._age_s is not None
        if not self.is_new:
            if is_stream:  # it is kept as long as there is more of it
                try:
                    await self._store.leave(self.record, None, self._age_s, is_reader=True)
                except RequestError:
                    logger.error("request %s is read on, and may expire", self.record.id)
            return True
        self.record = record = msgspec.structs.replace(self.record, response=response)
        age_s = UNENDED_AGE_S if is_stream else None
        add = partial(self._store.add, record, age_s, lease=not is_stream)
        if self._must:
            await add()
            return True
        if self._store.is_away:
            return False
        adding = asyncio.create_task(add())
        try:
            while not (await asyncio.wait((adding,), timeout=BEGIN_S))[0]:
                if self._store.silent_s >= BEGIN_S:
                    self._store.note_away()
                    return False
            adding.result()
        except RequestError:  # the store has said why
            return False
        finally:
            adding.cancel()
        return True

    def begin_beside(self, then: Callable[[bool], None]) -> asyncio.Task[bool]:
        """As `begin`, of a stream; `then` gets what that returns."""

        async def run() -> bool:
            is_kept = await self.begin()
            then(is_kept)
            return is_kept

        self._tasks.append(task := asyncio.create_task(run()))
        return task

    async def end(self, response: dict[str, Any] | None = None) -> None:
        """The answer is complete. If that can't be kept, the client gets it all the same. Its last
        tokens aren't written: few read an answer again that they have, and each write costs."""
        self._drop_tokens()
        await self._end(response)

    async def _end(self, response: dict[str, Any] | None) -> None:
        age_s = self._age_s if response is None or self._age_s is None else math.inf
        try:
            await self._store.end(self.record, response, age_s)
        except RequestError:
            logger.error("request %s was answered, which couldn't be kept", self.record.id)

    def end_later(self) -> None:
        """As `end`, of a stream."""
        self._drop_tokens()
        self._beside(self._end(None))

    def leave(self, response: dict[str, Any] | None = None) -> None:
        """The client left, and may come back. If the answer must be there, a process makes it."""
        self._end_tokens()
        if self._age_s == 0.0:
            self.forget()
        elif self.is_new or self._age_s is not None:
            again_in_s = 0.0 if self.record.is_background else None
            self._beside(
                self._store.leave(
                    *(self.record, response, self._age_s),
                    again_in_s=again_in_s,
                    is_reader=not self.is_new,
                )
            )

    def forget(self) -> None:
        """There will be no answer."""
        self._drop_tokens()
        if self.is_new:
            self._beside(self._store.forget(self.record))

    def _drop_tokens(self) -> None:
        if self._tokens is not None and self._log is not None:
            self._log.drop(self._tokens)

    def _end_tokens(self) -> None:
        """Have the rest of the tokens written."""
        tokens, log = self._tokens, self._log
        if tokens is None or log is None:
            return

        async def write() -> None:
            if self.is_kept:
                await log.close(tokens)

        self._beside(write())

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        earlier = list(self._tasks)

        async def run() -> None:
            if earlier:  # what is told the store is told in order
                await asyncio.wait(earlier)
            try:
                await work
            except RequestError as error:
                logger.error("request %s stays unended in the store: %s", self.record.id, error)

        self._tasks.append(asyncio.create_task(run()))

    async def settle(self) -> None:
        """Return when all is done."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        for task in self._tasks:
            if not task.cancelled():
                task.result()
