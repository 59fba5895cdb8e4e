"""Routes of responses that are kept: read, deleted, and what they were asked."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from deploy.http.body import encode_json
from deploy.http.dialect import Route
from deploy.http.openai.responses import replies
from deploy.http.openai.responses.keeper import owner_of
from deploy.http.records.store import RecordStore, ResponseRecord, no_record
from engine.errors import RequestError

MAX_ITEMS = 100
_ID = {
    "name": "response_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "maxLength": 256},
}
_PARTS = {"user": "input_text", "system": "input_text", "developer": "input_text"}
"""Types of a message's text, by its role; an assistant's is `output_text`."""


class _Kept(NamedTuple):
    """A response that a request names, which may not be there."""

    store: RecordStore
    record_id: str
    owner: str
    query: QueryParams

    async def record(self) -> ResponseRecord:
        """Raises `RequestError`."""
        return await self.store.get(self.record_id, self.owner)


class _KeptRoute(Route):
    """A route of one response, which answers with JSON."""

    parameters: ClassVar[tuple[dict[str, Any], ...]] = (_ID,)
    errors = (400, 404, 503)

    async def handle(self, request: Request) -> Response:
        record_id = str(request.path_params["response_id"])
        if self.store is None or len(record_id) > 256:
            raise no_record(record_id)
        owner = owner_of(request.scope["state"].get("key"))
        answer = await self._answer(_Kept(self.store, record_id, owner, request.query_params))
        return Response(encode_json(answer), media_type="application/json")

    @abstractmethod
    async def _answer(self, kept: _Kept) -> dict[str, Any]:
        """The reply. Raises `RequestError`."""


class RetrieveResponseRoute(_KeptRoute):
    """`GET /v1/responses/{response_id}`."""

    paths = ("/v1/responses/{response_id}",)
    methods = ("GET",)
    description = (
        "As OpenAI's `GET /v1/responses/{response_id}`: the response as it was given; while it is "
        "computed, its `status` is `in_progress`."
    )
    reply = replies.Response

    async def _answer(self, kept: _Kept) -> dict[str, Any]:
        if kept.query.get("stream", "false") not in ("false", "0"):
            raise RequestError("stream is not supported here yet.", "stream")
        return (await kept.record()).response


class DeleteResponseRoute(_KeptRoute):
    """`DELETE /v1/responses/{response_id}`."""

    paths = ("/v1/responses/{response_id}",)
    methods = ("DELETE",)
    description = (
        "As OpenAI's `DELETE /v1/responses/{response_id}`. Responses that go on from it can't be "
        "continued any more."
    )
    reply = replies.DeletedResponse

    async def _answer(self, kept: _Kept) -> dict[str, Any]:
        await kept.store.delete(kept.record_id, kept.owner)
        return {"id": kept.record_id, "object": "response", "deleted": True}


class InputItemsRoute(_KeptRoute):
    """`GET /v1/responses/{response_id}/input_items`."""

    paths = ("/v1/responses/{response_id}/input_items",)
    methods = ("GET",)
    parameters = (
        _ID,
        {
            "name": "limit",
            "in": "query",
            "schema": {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS},
        },
        {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
        {"name": "after", "in": "query", "schema": {"type": "string"}},
    )
    description = (
        "As OpenAI's `GET /v1/responses/{response_id}/input_items`: the items of the request's "
        "`input`, the last one first unless `order` is `asc`."
    )
    reply = replies.InputItems

    async def _answer(self, kept: _Kept) -> dict[str, Any]:
        query = kept.query
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError("order must be asc or desc.", "order")
        limit = query.get("limit", "20")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 4) or not (
            1 <= int(limit) <= MAX_ITEMS
        ):
            raise RequestError(f"limit must be a number from 1 to {MAX_ITEMS}.", "limit")
        items = _shown(await kept.record())
        if order == "desc":
            items.reverse()
        if "after" in query:
            ids = [item["id"] for item in items]
            if query["after"] not in ids:
                raise RequestError("after must be the id of an item.", "after")
            items = items[ids.index(query["after"]) + 1 :]
        page = items[: int(limit)]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }


class CancelRoute(_KeptRoute):
    """`POST /v1/responses/{response_id}/cancel`."""

    paths = ("/v1/responses/{response_id}/cancel",)
    description = (
        "As OpenAI's `POST /v1/responses/{response_id}/cancel`. Only responses in the background "
        "can be cancelled, and there are none yet: whoever closes the connection cancels one."
    )
    reply = replies.Response

    async def _answer(self, kept: _Kept) -> dict[str, Any]:
        await kept.record()
        raise RequestError("Only responses in the background can be cancelled.", "response_id")


def _shown(record: ResponseRecord) -> list[dict[str, Any]]:
    """The items with ids and in the form that OpenAI's API has for reading."""
    found = []
    for number, item in enumerate(record.items):
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
