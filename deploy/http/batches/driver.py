"""`BatchDriver`: makes what a batch asks for, in whichever process has its record's lease.

The record's response is the batch as the API shows it; the answers are in the parts of its output.
A process that takes the batch up after another one's death needs no more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing, closing
from functools import partial
from typing import Any

import msgspec

from deploy.http.access.key_file import KeyFile, key_of
from deploy.http.batches.line_asker import LineAsker, StopBatch
from deploy.http.batches.lines import LineProblem, Source, check_lines
from deploy.http.batches.output import PART_BYTES, BatchOutput
from deploy.http.batches.run import BatchRun, width_of
from deploy.http.engine_client import EngineClient
from deploy.http.files.file_store import FileStore, StoredFile, new_id
from deploy.http.generation.endpoint import Endpoint
from deploy.http.records.runner import RecordWorker
from deploy.http.records.store import Record, RecordStore
from deploy.http.served_models import ServedModels
from engine.errors import RequestError

logger = logging.getLogger(__name__)

BATCHES = "batches"
"""The endpoint of their records."""
CANCELLED = "batches.cancelled"
"""The endpoint of the record beside a batch's that says that it is to be cancelled: any process may
write it while another one writes the batch's."""
END_STATUSES = ("completed", "failed", "expired", "cancelled")
MAX_AT_ONCE = 4
"""Batches that a process runs; others wait."""
LOOK_S = 20.0
"""How often engines are counted, of which there may be more or less by then."""


class BatchDriver(RecordWorker):
    """Of one process."""

    def __init__(
        self,
        store: RecordStore,
        files: FileStore,
        endpoints: Mapping[str, Endpoint],
        models_provider: Callable[[], ServedModels],
        keys: KeyFile | None,
        on_lines: Callable[[int, int], None],
    ) -> None:
        """`endpoints`: by path. `keys`: None if the server has none. `on_lines` gets how many lines
        were answered well and not, when that is kept."""
        self.store = store
        self.files = files
        self.endpoints = endpoints
        self.models_provider = models_provider
        self.keys = keys
        self.on_lines = on_lines
        self.num_running = 0
        self._places = asyncio.Semaphore(MAX_AT_ONCE)

    async def run(self, record: Record) -> None:
        """Go on with a batch to its end, or until another process has it."""
        key_of(self.keys, record.owner)
        async with self._places:
            self.num_running += 1
            try:
                await _Drive(self, record).run()
            except _LostLease:
                logger.info("batch %s is run by another process", record.id)
            finally:
                self.num_running -= 1

    async def fail(self, record: Record, failure: RequestError) -> None:
        try:
            await _Drive(self, record).fail(failure)
        except _LostLease:
            logger.info("batch %s is run by another process", record.id)


class _LostLease(Exception):
    pass


class _Cancelled(Exception):
    pass


class _Expired(Exception):
    pass


class Asked(msgspec.Struct):
    """What the driver needs of a request that the API has checked: the body of its record. The
    record itself has no digest, so that any process takes it up: to end it, no model is needed."""

    digest: str
    """`ModelInfo.digest` of the model that it was begun with."""
    output_age_s: int | None = None
    """How long the files of its output are kept; None: as long as any."""


class _Drive:
    """Of one batch, in one process."""

    def __init__(self, driver: BatchDriver, record: Record) -> None:
        self._store, self._files = driver.store, driver.files
        self._driver = driver
        self._record = record
        assert record.response is not None
        self._batch: dict[str, Any] = record.response
        self._asked = msgspec.json.decode(record.body, type=Asked)
        self._output = BatchOutput(self._files, record.id, record.owner)
        self._told = (0, 0)
        self._look_at = time.monotonic() + LOOK_S
        endpoint = driver.endpoints[self._batch["endpoint"]]
        self._limit = endpoint.settings.server.max_body_bytes

    async def run(self) -> None:
        if self._batch["status"] in END_STATUSES:
            await self._end()
            return
        try:
            file = await self._files.get(self._batch["input_file_id"], self._record.owner)
        except RequestError as error:
            if error.status != 404:
                raise
            await self.fail(error)
            return
        opened = partial(self._files.open_now, file.id, self._record.owner)
        urls = (self._batch["endpoint"],)
        source = Source(opened, self._limit, urls, self._files.in_thread)
        if self._batch["status"] == "validating":
            checked = await check_lines(source)
            if checked.problems:
                await self._store.end(self._record, failed(self._batch, checked.problems))
                return
            self._batch["request_counts"]["total"] = checked.num_requests
            await self._turn("in_progress")
        await self._output.load()
        self._told = self._output.completed, self._output.failed
        asker = LineAsker(
            self._driver.endpoints,
            self._asked.digest,
            file.created_at,
            file.digest,
            self._record.owner,
        )
        status = await self._answer(source, asker)
        if status == "expired":
            await self._expire(source, asker)
        await self._finish(status)

    async def fail(self, failure: RequestError) -> None:
        """End the batch. What was answered is in its files."""
        problem = LineProblem(failure.code or "server_error", failure.message)
        self._batch = failed(self._batch, [problem])
        await self._output.load()
        await self._finish("failed")

    async def _answer(self, source: Source, asker: LineAsker) -> str:
        """Have the lines answered; returns how the batch ends."""
        if self._batch["status"] != "in_progress":
            return "completed"

        async def flushed() -> None:
            await self._flushed(asker)
            if time.monotonic() > self._look_at:
                self._look_at = time.monotonic() + LOOK_S
                work.widen(await self._width(client))

        try:
            await self._flushed(asker)  # it may be cancelled, or its time over
            client = self._client()
            width = await self._width(client)
            work = BatchRun(source, self._output, asker, width, flushed)
            await work.run()
        except _Cancelled:
            return "cancelled"
        except _Expired:
            return "expired"
        return "completed"

    def _client(self) -> EngineClient:
        """The engines. Raises `StopBatch` if they aren't those that it was begun with."""
        client = self._driver.models_provider().find(self._batch["model"])
        if client is None or client.model_info.digest != self._asked.digest:
            raise StopBatch("another model or configuration is served than the batch began with")
        return client

    async def _width(self, client: EngineClient) -> int:
        """Lines that are asked at once: this batch's part of them."""
        return max(await width_of(client) // max(self._driver.num_running, 1), 1)

    async def _flushed(self, asker: LineAsker) -> None:
        """Answers were kept: the store learns how many, and this process whether to go on."""
        output, batch = self._output, self._batch
        completed, failed_ = self._told
        self._driver.on_lines(output.completed - completed, output.failed - failed_)
        self._told = output.completed, output.failed
        batch["request_counts"] |= {"completed": output.completed, "failed": output.failed}
        asker.key = key_of(self._driver.keys, self._record.owner)
        try:
            await self._keep()
            if await cancelled_at(self._store, self._record) is not None:
                raise _Cancelled
        except RequestError as error:
            logger.error("the progress of batch %s isn't kept: %s", self._record.id, error)
        if time.time() > batch["expires_at"]:
            raise _Expired

    async def _keep(self) -> None:
        """Raises `_LostLease`, and `RequestError` if the store can't be used."""
        if not await self._store.progress(self._record, self._batch):
            raise _LostLease

    async def _turn(self, status: str) -> None:
        """The batch has another status from now on."""
        self._batch["status"] = status
        self._batch[f"{status}_at"] = self._batch[f"{status}_at"] or int(time.time())
        await self._keep()

    async def _expire(self, source: Source, asker: LineAsker) -> None:
        """Lines that have no answer get one that says why."""
        message = "This request could not be executed before the completion window expired."
        async with aclosing(source.several()) as lines:
            async for found in lines:
                for number, raw in found:
                    if not self._output.has(number):
                        line = source.read(number, raw)
                        self._output.add(asker.no_answer(line, "batch_expired", message))
                if self._output.waiting_bytes > PART_BYTES:
                    await self._output.flush()
        await self._output.flush()

    async def _finish(self, status: str) -> None:
        """Make the files and end the batch."""
        batch, output = self._batch, self._output
        if status == "completed":
            await self._turn("finalizing")
        with closing(await output.assemble()) as whole:
            if whole.completed + whole.failed < output.completed + output.failed:
                raise _LostLease  # another process has ended it, and removed its parts
            for good, kind, count in (
                (True, "output", whole.completed),
                (False, "error", whole.failed),
            ):
                await self._keep()  # whoever has the lease makes the files
                if count:
                    file = await self._made(kind, whole.lines(good))
                    batch[f"{kind}_file_id"] = file.id
            batch["request_counts"] |= {"completed": whole.completed, "failed": whole.failed}
            batch["usage"] = {
                "input_tokens": whole.tokens.input,
                "output_tokens": whole.tokens.output,
                "total_tokens": sum(whole.tokens),
            }
        batch["status"] = status
        batch[f"{status}_at"] = int(time.time())
        if status == "cancelled":
            batch["cancelling_at"] = await cancelled_at(self._store, self._record)
        await self._keep()
        await self._end()

    async def _end(self) -> None:
        """Everything is made, and the store has it."""
        await self._files.remove_parts(self._record.id, self._record.owner)
        await self._store.end(self._record, self._batch)

    async def _made(self, kind: str, lines: Iterable[bytes]) -> StoredFile:
        """A file of the batch's output; made again, it is the same one."""
        record = self._record
        return await self._files.add(
            record.owner,
            lines,
            filename=f"{record.id}_{kind}.jsonl",
            purpose="batch_output",
            age_s=self._asked.output_age_s,
            file_id=new_id("file-", f"{record.id} {kind}", self._batch["created_at"]),
        )


async def cancelled_at(store: RecordStore, record: Record) -> int | None:
    """When somebody asked for that, as Unix time; None: nobody has."""
    try:
        return (await store.find(cancel_id(record), record.owner, CANCELLED)).created
    except RequestError as error:
        if error.status != 404:
            raise
        return None


def cancel_id(record: Record) -> str:
    """Of the record that says that the batch is to be cancelled."""
    return f"{record.id}.cancelled"


def failed(batch: dict[str, Any], problems: Iterable[LineProblem]) -> dict[str, Any]:
    """The batch, ended by what is wrong with it."""
    errors = {"object": "list", "data": [msgspec.to_builtins(problem) for problem in problems]}
    return {**batch, "status": "failed", "failed_at": int(time.time()), "errors": errors}
