"""Answers that no client waits for: of responses in the background, and of lines of batches."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

from starlette.types import Message

from deploy.http.access.api_key import ApiKey
from deploy.http.access.key_file import KeyFile, key_of
from deploy.http.generation.endpoint import Again, Endpoint, GenerationResponse
from deploy.http.records.runner import RecordWorker
from deploy.http.records.store import Record, RecordStore
from engine.errors import RequestError


class Unattended(NamedTuple):
    """What an endpoint answered."""

    status: int
    body: bytes


async def answer_of(endpoint: Endpoint, again: Again, key: ApiKey | None) -> Unattended:
    """Has an endpoint answer a request that didn't come over HTTP."""
    reply = _Reply()
    state = {"request_id": again.record.request_id, "send": reply.send, "key": key}
    scope = {"type": "http", "headers": [], "state": state}
    await GenerationResponse(endpoint, again)(scope, _nobody_leaves, reply.send)
    return Unattended(reply.status, bytes(reply.body))


class BackgroundAnswers(RecordWorker):
    """Makes those of one endpoint, which the store gets as a response."""

    def __init__(self, store: RecordStore, endpoint: Endpoint, keys: KeyFile | None) -> None:
        """`keys`: None if the server has none."""
        self._store = store
        self._endpoint = endpoint
        self._keys = keys

    async def run(self, record: Record) -> None:
        key = key_of(self._keys, record.owner)
        status, body = await answer_of(self._endpoint, Again(record, is_stream=False), key)
        if status >= 400:
            raise RequestError(json.loads(body)["error"]["message"], status=status)

    async def fail(self, record: Record, failure: RequestError) -> None:
        failed: dict[str, Any] = {"code": "server_error", "message": failure.message}
        response = {**(record.response or {}), "status": "failed", "error": failed}
        await self._store.end(record, response)


class _Reply:
    def __init__(self) -> None:
        self.status = 503  # until there is one
        self.body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message["body"]


async def _nobody_leaves() -> Message:
    await asyncio.Event().wait()
    raise AssertionError
