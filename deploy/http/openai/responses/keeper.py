"""`Keeper`: keeps one response in the store while it is computed and when it has ended."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from deploy.http.access.api_key import ApiKey
from deploy.http.openai.responses.request import ResponsesRequest
from deploy.http.records.store import RecordStore, ResponseRecord, history_of
from engine.errors import RequestError

logger = logging.getLogger(__name__)


def owner_of(key: ApiKey | None) -> str:
    """Who may see what is kept for a request with this key."""
    return "" if key is None else key.name


async def with_history(
    store: RecordStore | None, given: ResponsesRequest, key: ApiKey | None
) -> ResponsesRequest:
    """The request with the conversation before it that it names. Raises `RequestError`."""
    if given.previous_response_id is None:
        return given
    if store is None:
        raise RequestError(
            "This server keeps no responses (request_store: none); send the whole conversation in "
            "input.",
            "previous_response_id",
        )
    records = await store.conversation(given.previous_response_id, owner_of(key))
    return given.behind(history_of(records))


class Keeper:
    """Of one response."""

    def __init__(self, store: RecordStore, given: ResponsesRequest, key: ApiKey | None) -> None:
        """`given`: the request without the conversation before it."""
        self._store, self._owner = store, owner_of(key)
        self._previous, self._must = given.previous_response_id, given.store is True
        dumped = given.model_dump(mode="json", by_alias=True, include={"input"})
        self._items: list[dict[str, Any]] = dumped["input"]
        self._record: ResponseRecord | None = None

    async def begin(self, response: dict[str, Any]) -> bool:
        """Keep the response, which is to be computed. False if that fails and the request doesn't
        insist on it; else it raises `RequestError`."""
        self._record = ResponseRecord(
            id=response["id"],
            owner=self._owner,
            previous=self._previous,
            items=self._items,
            response=response,
        )
        try:
            await self._store.add(self._record)
        except RequestError:
            if self._must:
                raise
            return False
        return True

    async def end(self, response: dict[str, Any]) -> None:
        """Keep it as it has ended. If that fails, the client gets it all the same; nothing can go
        on from it."""
        assert self._record is not None
        try:
            await self._store.finish(msgspec.structs.replace(self._record, response=response))
        except RequestError:
            logger.error("response %s was given but couldn't be kept", response["id"])

    def forget(self) -> None:
        """There will be no response. Its client may be gone, so nobody waits for this."""
        record = self._record
        if record is None:
            return

        async def remove() -> None:
            try:
                await self._store.delete(record.id, record.owner)
            except RequestError as error:
                if error.status != 404:
                    logger.error("response %s stays unfinished in the store: %s", record.id, error)

        task = asyncio.get_running_loop().create_task(remove())
        _running.add(task)
        task.add_done_callback(_running.discard)


_running: set[asyncio.Task[None]] = set()
