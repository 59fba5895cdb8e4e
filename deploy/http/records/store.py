"""`RecordStore`: keeps responses for later requests. `ResponseRecord`: one of them.

A record is written before its response is computed, so that its id means something from the start,
and again when the response has ended. Records hold prompts and answers (docs/security.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.errors import RequestError

MAX_CHAIN = 2048
"""Responses that a conversation may have."""
MAX_CHAIN_BYTES = 32 << 20
"""Of all that its records hold."""


class ResponseRecord(msgspec.Struct, kw_only=True):
    """A response of `POST /v1/responses`, as the API shows it, and what it was asked."""

    id: str
    owner: str
    """Name of the API key that may see it; "" if the server has none."""
    previous: str | None
    """The response that it goes on from."""
    items: list[dict[str, Any]]
    """Of the request's `input`."""
    response: dict[str, Any]


class RecordStore(ABC):
    """Its methods raise `RequestError`: 404 for a record that isn't there or is another key's, 503
    if the store can't be used."""

    @abstractmethod
    async def add(self, record: ResponseRecord) -> None:
        """Keep a new record. 413 if it is too large."""

    @abstractmethod
    async def finish(self, record: ResponseRecord) -> None:
        """Keep the response of a record. Nothing happens if it was deleted meanwhile."""

    @abstractmethod
    async def get(self, record_id: str, owner: str) -> ResponseRecord:
        """The record of this id."""

    @abstractmethod
    async def delete(self, record_id: str, owner: str) -> None:
        """Forget a record."""

    @abstractmethod
    async def conversation(self, record_id: str, owner: str) -> list[ResponseRecord]:
        """The record and those that it goes on from, the first one first. 404 if one isn't there
        any more, 400 if there are too many."""

    @abstractmethod
    async def close(self) -> None:
        """Wait until everything is kept."""


def no_record(record_id: str, field: str = "response_id") -> RequestError:
    """Nobody learns whether a record is another key's."""
    message = f"Response with id '{record_id[:100]}' not found."
    return RequestError(message, field, status=404, code="response_not_found")


def history_of(records: Sequence[ResponseRecord]) -> list[dict[str, Any]]:
    """The items of a conversation: what was asked and answered. Raises `RequestError` if an answer
    isn't there yet."""
    for record in records:
        if record.response["status"] == "in_progress":
            raise RequestError(
                f"Response '{record.id}' has not ended, so that nothing can go on from it.",
                "previous_response_id",
            )
    return [item for record in records for item in (*record.items, *record.response["output"])]
