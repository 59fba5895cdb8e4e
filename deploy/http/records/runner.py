"""`RecordRunner`: makes the answers that go on though no client waits for them.

Answers whose client left go on for a while. The others must be there in the end: responses in the
background, kept responses whose process was lost, and batches. Each has a lease in the store.
Whoever makes its answer renews it; when it has ended, the next process that looks takes the record
up and begins again, which gives the same tokens.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from deploy.http.errors import failure_of
from deploy.http.files.file_store import FileStore
from deploy.http.records.store import LEASE_S, Record, RecordStore
from deploy.http.records.token_log import TokenLog
from engine.errors import MantaError, RequestError

logger = logging.getLogger(__name__)

PERIOD_S = LEASE_S / 5
SWEEP_S = 3600.0
"""How often files are looked at whose time is over."""
NOT_NOW = (429, 503)
"""Statuses of errors that pass."""
RETRY_S = 5.0
"""After this time an answer is tried again that the engines couldn't make."""
NO_WORKER_S = 300.0
"""After this time a process looks again that makes no answers of a kind: another one may."""


class RecordWorker(ABC):
    """Makes the answers of some records."""

    @abstractmethod
    async def run(self, record: Record) -> None:
        """Make the answer, which the store then has. Raises what `failure_of` words, also if the
        owner's key is valid no longer."""

    @abstractmethod
    async def fail(self, record: Record, failure: RequestError) -> None:
        """Have the store say that there will be none. Raises `RequestError`."""


class RecordRunner:
    """Of one process. It works from `start` on."""

    def __init__(
        self,
        store: RecordStore,
        files: FileStore | None,
        digests: Callable[[], Sequence[str]],
        workers: Mapping[str, RecordWorker],
        on_taken_up: Callable[[], None],
        stream_age_s: float,
    ) -> None:
        """`files`: None if there are none. `digests` gives those of the models served here.
        `workers`: by endpoint. `on_taken_up` is called for each record that is. `stream_age_s`: how
        long the record of a stream is there behind the last that was heard of it."""
        self._digests = digests
        self._on_taken_up = on_taken_up
        self._store = store
        self._files = files
        self._workers = workers
        self._looking: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._answers: set[asyncio.Task[None]] = set()
        self.token_log = TokenLog(store, stream_age_s or None)
        self._left: dict[tuple[str, str], asyncio.Task[None]] = {}

    def start(self) -> None:
        """Begin to look for records that nobody answers. To be called in the loop."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
            # Not in the same one: slow files must not keep leases from being renewed.
            if self._files is not None:
                self._sweeping = asyncio.create_task(self._sweep(self._files))

    async def stop(self) -> None:
        """What isn't ready is left to other processes, or to this one's next life."""
        beside = filter(None, (self._looking, self._sweeping))
        tasks = [*self._answers, *self._left.values(), *beside]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.token_log.stop()

    def answer(self, record: Record) -> None:
        """Make the answer to a record whose lease this process has."""
        task = asyncio.get_running_loop().create_task(self._answer(record))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    @property
    def num_left(self) -> int:
        """Answers that go on here though their clients left."""
        return len(self._left)

    def may_go_on(self, record: Record) -> bool:
        """Whether no answer to this record goes on here without its client."""
        return (record.owner, record.id) not in self._left

    def go_on(self, record: Record, work: Coroutine[Any, Any, None]) -> None:
        """Let an answer go on whose client left. `may_go_on` must hold."""
        named = record.owner, record.id
        self._left[named] = task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda _: self._left.pop(named))

    async def _look(self) -> None:
        failed = False
        while True:
            try:
                for record in await self._store.take_up(["", *self._digests()]):
                    logger.info("request %s is taken up", record.id)
                    self._on_taken_up()
                    self.answer(record)
                failed = False
            except MantaError as error:  # the store has said why
                if not failed:
                    logger.error("nobody looks for unanswered requests: %s", error)
                failed = True
            await asyncio.sleep(PERIOD_S)

    async def _sweep(self, files: FileStore) -> None:
        while True:
            try:
                await files.remove_expired()
            except RequestError:
                logger.error("expired files aren't removed")
            await asyncio.sleep(SWEEP_S)

    async def _answer(self, record: Record) -> None:
        worker = self._workers.get(record.endpoint)
        if worker is None:  # a batch from when there were files
            await self._leave(record, NO_WORKER_S)
            return
        try:
            await worker.run(record)
            return
        except Exception as error:  # whatever it is, somebody waits for this answer
            failure = failure_of(error, record.request_id)
        if failure.status not in NOT_NOW:
            try:
                await worker.fail(record, failure)
                return
            except Exception as error:  # the record must not stay held by nobody
                failure_of(error, record.request_id)
        await self._leave(record, RETRY_S)

    async def _leave(self, record: Record, again_in_s: float) -> None:
        try:
            await self._store.leave(record, again_in_s=again_in_s)
        except RequestError:  # its lease ends, as it isn't renewed any more
            logger.error("request %s waits for its lease to end", record.id)
