"""Routes that go on with the stream of a request that is kept, wherever it was begun."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from deploy.http.access.api_key import owner_of
from deploy.http.body import json_response
from deploy.http.dialect import Route, RouteParts
from deploy.http.generation.endpoint import Endpoint
from deploy.http.generation.event_numbers import LAST_EVENT_ID, Place, read_last, read_place
from deploy.http.records.store import MAX_ID, Record, RecordStore, no_record
from engine.errors import RequestError

RECORD_ID = {
    "name": "record_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "maxLength": MAX_ID},
}
STREAM = {"name": "stream", "in": "query", "schema": {"type": "boolean"}}
STARTING_AFTER = {"name": "starting_after", "in": "query", "schema": {"type": "string"}}
PLACE = {"name": LAST_EVENT_ID, "in": "header", "schema": {"type": "string"}}


class Forgotten(BaseModel):
    """Reply of `DELETE`."""

    id: str
    object: str
    deleted: bool


class KeptRoute(Route):
    """A route of one request that is kept."""

    parameters: ClassVar[tuple[dict[str, Any], ...]] = (RECORD_ID,)
    endpoint: ClassVar[type[Endpoint]]
    """Where the request came to. The path is that of its first one, with an id, unless the route
    says another."""

    def __init_subclass__(cls) -> None:
        if "endpoint" in cls.__dict__ and "paths" not in cls.__dict__:
            cls.paths = (f"{cls.endpoint.paths[0]}/{{record_id}}",)

    async def kept(self, request: Request) -> tuple[RecordStore, Record]:
        """The record that the path names. Raises `RequestError` if there is none."""
        record_id = str(request.path_params["record_id"])
        if self.store is None:
            raise no_record(record_id)
        owner = owner_of(request.scope["state"].get("key"))
        return self.store, await self.store.find(record_id, owner, self.endpoint.name)


class ForgetRoute(KeptRoute):
    """`DELETE` of a request that is kept."""

    methods = ("DELETE",)
    description = "Forgets a request that was begun with this id. Its stream can't be read on then."
    reply = Forgotten
    errors = (404, 503)

    async def handle(self, request: Request) -> Response:
        store, record = await self.kept(request)
        await store.delete(record.id, record.owner)
        answer = {"id": record.id, "object": f"{self.object_name}.deleted", "deleted": True}
        return json_response(answer)

    object_name: ClassVar[str]
    """Of what is deleted."""


class ReadOnRoute(KeptRoute):
    """`GET` of a request that is kept answers it once more, whole or from a place on, in the shapes
    of its endpoint."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.reply, cls.events, cls.done = (
            *(cls.endpoint.reply, cls.endpoint.events),
            cls.endpoint.done,
        )

    methods: ClassVar[tuple[Literal["GET", "POST", "DELETE"], ...]] = ("GET",)
    parameters = (RECORD_ID, STREAM, STARTING_AFTER, PLACE)
    description = (
        "The answer to a request whose stream was begun with this id, made once more: the same "
        "text. With `stream` its events, behind the place that `Last-Event-ID` or "
        "`starting_after` names."
    )
    errors: ClassVar[tuple[int, ...]] = (400, 404, 409, 429, 500, 503)

    def __init__(self, parts: RouteParts) -> None:
        super().__init__(parts)
        self._endpoint = self.endpoint(parts)

    async def handle(self, request: Request) -> Response:
        _, record = await self.kept(request)
        return self.read_on(request, record)

    def read_on(self, request: Request, record: Record) -> Response:
        """The answer to a record, as the request wants it. Raises `RequestError`."""
        is_stream = wants_stream(request)
        place = read_from(request, record) if is_stream else None
        return self._endpoint.again(record, place, is_stream=is_stream)


def wants_stream(request: Request) -> bool:
    """Raises `RequestError`."""
    given = request.query_params.get("stream", "false").lower()
    if given not in ("true", "1", "false", "0"):
        raise RequestError("stream must be true or false.", "stream")
    return given in ("true", "1")


def read_from(request: Request, record: Record) -> Place | None:
    """Where the reader goes on; None: from the beginning. Raises `RequestError`."""
    after = request.query_params.get("starting_after")
    if after is not None:
        place = read_place(after, "starting_after")
        if not record.is_response:
            return place
        # A `sequence_number`, and they begin with 0.
        return place._replace(counts=tuple(count + 1 for count in place.counts))
    last = request.headers.get(LAST_EVENT_ID, "")
    return read_last(last, record) if last else None
