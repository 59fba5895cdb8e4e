"""The conversation that a response goes on from, of responses that are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from deploy.http.access.api_key import ApiKey, owner_of
from deploy.http.body import parse_request
from deploy.http.openai.responses.request import ResponsesRequest
from deploy.http.records.store import Record, RecordStore
from engine.errors import RequestError

CONTINUABLE = ("completed", "incomplete")
"""Statuses of responses that others may go on from."""


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
    # All bodies are parsed anew.
    return await asyncio.to_thread(lambda: given.behind(history_of(records)))


def history_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The items of a conversation: what was asked and answered. Raises `RequestError` if an answer
    isn't there."""
    items: list[dict[str, Any]] = []
    for record in records:
        response = record.response or {}
        if response.get("status") not in CONTINUABLE:
            raise RequestError(
                f"Response '{record.id}' has not ended, so that nothing can go on from it.",
                "previous_response_id",
            )
        items += [*items_of(record), *response["output"]]
    return items


def items_of(record: Record) -> list[dict[str, Any]]:
    """What a response was asked: the items of its request's `input`."""
    given = parse_request(record.body, ResponsesRequest)
    dumped = given.model_dump(mode="json", by_alias=True, include={"input"})
    items: list[dict[str, Any]] = dumped["input"]
    return items
