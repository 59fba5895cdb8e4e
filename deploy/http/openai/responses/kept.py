"""Routes of responses that are kept: read, deleted, and what they were asked."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from deploy.http.body import json_response
from deploy.http.generation.read_on import (
    RECORD_ID,
    KeptRoute,
    ReadOnRoute,
    wants_stream,
)
from deploy.http.openai.responses import replies
from deploy.http.openai.responses.endpoint import ResponsesEndpoint
from deploy.http.openai.responses.history import items_of
from deploy.http.paging import PAGE_PARAMETERS, PageQuery
from deploy.http.records.store import Record, RecordStore
from engine.errors import RequestError

_PARTS = {"user": "input_text", "system": "input_text", "developer": "input_text"}
"""Types of a message's text, by its role; an assistant's is `output_text`."""


class _Kept(NamedTuple):
    """A response that a request names."""

    store: RecordStore
    record: Record
    query: QueryParams

    @property
    def response(self) -> dict[str, Any]:
        """As the API shows it."""
        assert self.record.response is not None
        return self.record.response


class _KeptRoute(KeptRoute):
    """A route of one response, which answers with JSON."""

    endpoint = ResponsesEndpoint
    errors = (400, 404, 503)

    async def handle(self, request: Request) -> Response:
        store, record = await self.kept(request)
        answer = await self._answer(_Kept(store, record, request.query_params))
        return json_response(answer)

    @abstractmethod
    async def _answer(self, kept: _Kept) -> dict[str, Any]:
        """The reply. Raises `RequestError`."""

    async def _abort(self, record: Record) -> None:
        """Stop making the answer, in whichever process."""
        for client in self.models_provider():
            await client.abort(record.id, record.owner)


class RetrieveResponseRoute(ReadOnRoute):
    """`GET /v1/responses/{record_id}`."""

    endpoint = ResponsesEndpoint
    description = (
        "As OpenAI's `GET /v1/responses/{response_id}`: the response as it was given; while it is "
        "made, its `status` is `in_progress`. With `stream` its events, made once more, behind "
        "the `sequence_number` that `starting_after` has, or the place of `Last-Event-ID`."
    )

    async def handle(self, request: Request) -> Response:
        _, record = await self.kept(request)
        if wants_stream(request):
            status = (record.response or {}).get("status")
            if record.has_ended and status in ("cancelled", "failed"):
                raise RequestError(f"The response has {status}; it has no events.", "stream")
            return self.read_on(request, record)
        return json_response(record.response)


class DeleteResponseRoute(_KeptRoute):
    """`DELETE /v1/responses/{response_id}`."""

    methods = ("DELETE",)
    description = (
        "As OpenAI's `DELETE /v1/responses/{response_id}`. Responses that go on from it can't be "
        "continued any more."
    )
    reply = replies.DeletedResponse

    async def _answer(self, kept: _Kept) -> dict[str, Any]:
        record = kept.record
        await kept.store.delete(record.id, record.owner)
        if record.is_background and not record.has_ended:
            await self._abort(record)
        return {"id": record.id, "object": "response", "deleted": True}


class InputItemsRoute(_KeptRoute):
    """`GET /v1/responses/{response_id}/input_items`."""

    paths = ("/v1/responses/{record_id}/input_items",)
    methods = ("GET",)
    parameters = (RECORD_ID, *PAGE_PARAMETERS)
    description = (
        "As OpenAI's `GET /v1/responses/{response_id}/input_items`: the items of the request's "
        "`input`, the last one first unless `order` is `asc`."
    )
    reply = replies.InputItems

    async def _answer(self, kept: _Kept) -> dict[str, Any]:
        return PageQuery.of(kept.query, newest_first=True).within(_shown(kept.record))


class CancelRoute(_KeptRoute):
    """`POST /v1/responses/{response_id}/cancel`."""

    paths = ("/v1/responses/{record_id}/cancel",)
    methods = ("POST",)
    description = (
        "As OpenAI's `POST /v1/responses/{response_id}/cancel`. Only responses in the background "
        "can be cancelled: whoever closes the connection cancels another one."
    )
    reply = replies.Response

    async def _answer(self, kept: _Kept) -> dict[str, Any]:
        record, response = kept.record, kept.response
        if not record.is_background:
            raise RequestError("Only responses in the background can be cancelled.", "record_id")
        if response["status"] == "cancelled":
            return response
        if not record.has_ended:
            await kept.store.end(record, {**response, "status": "cancelled"})
            await self._abort(record)
            # It may have ended meanwhile.
            record = await kept.store.get(record.id, record.owner)
            response = kept._replace(record=record).response
        if response["status"] != "cancelled":
            raise RequestError("The response has ended already.", "record_id")
        return response


def _shown(record: Record) -> list[dict[str, Any]]:
    """The items with ids and in the form that OpenAI's API has for reading."""
    found = []
    for number, item in enumerate(items_of(record)):
        kind = item.get("type", "message")
        shown = {"id": f"{kind}_{record.id}_{number}", "status": "completed", **item, "type": kind}
        if kind == "message" and isinstance(item.get("content"), str):
            part: dict[str, Any] = {"type": _PARTS.get(item["role"], "output_text")}
            part["text"] = item["content"]
            if part["type"] == "output_text":
                part["annotations"] = []
            shown["content"] = [part]
        found.append(shown)
    return found
