"""The routes of OpenAI's Batch API."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
import re
import secrets
import time
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from deploy.http.access.api_key import owner_of
from deploy.http.batches.driver import (
    BATCHES,
    CANCELLED,
    END_STATUSES,
    Asked,
    cancel_id,
    cancelled_at,
)
from deploy.http.batches.lines import LineError, Source, model_of
from deploy.http.body import json_response
from deploy.http.dialect import Route
from deploy.http.files.file_store import FileStore, new_id
from deploy.http.files.routes import AGES_S, option_with_none
from deploy.http.generation.endpoint import check_same_site, read_given
from deploy.http.paging import AFTER, PageQuery, limit_parameter
from deploy.http.records.store import Record, RecordStore
from engine.errors import RequestError

MAX_WINDOW_S = 30 * 24 * 3600
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
BATCH_ID = {
    "name": "batch_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "maxLength": 64},
}
BatchEndpoint = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
    "/score",
]
BATCH_ENDPOINTS: tuple[str, ...] = BatchEndpoint.__args__  # type: ignore[attr-defined]


class ExpiresAfter(BaseModel):
    """When the files of a batch's output expire."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=AGES_S[0], le=AGES_S[1])


class BatchRequest(BaseModel):
    """Body of `POST /v1/batches`."""

    input_file_id: str = Field(max_length=64)
    endpoint: BatchEndpoint
    completion_window: str = Field(pattern=r"^[1-9][0-9]{0,6}[smhd]$")
    """As `24h`; at most 30 days."""
    metadata: (
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None
    ) = Field(None, max_length=16)
    output_expires_after: ExpiresAfter | None = None


class RequestCounts(BaseModel):
    """Lines of a batch."""

    total: int
    completed: int
    failed: int


class BatchUsage(BaseModel):
    """Tokens of all lines."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class BatchError(BaseModel):
    """What is wrong with a batch."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(BaseModel):
    """What is wrong with a batch."""

    object: Literal["list"]
    data: list[BatchError]


class Batch(BaseModel):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage | None
    metadata: dict[str, str] | None


class BatchList(BaseModel):
    """Batches of a key."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class _Route(Route):
    """A route of batches."""

    reply: ClassVar[type[BaseModel] | None] = Batch
    errors: ClassVar[tuple[int, ...]] = (400, 404, 503)

    def kept(self, request: Request) -> tuple[RecordStore, FileStore, str]:
        """Where batches are, and whose the request may see. Raises `RequestError`."""
        if self.store is None or self.files is None:
            option = option_with_none(self.store)
            raise RequestError(f"This server runs no batches ({option}: none).")
        return self.store, self.files, owner_of(request.scope["state"].get("key"))

    async def named(self, request: Request) -> tuple[RecordStore, Record]:
        """The batch in the path. Raises `RequestError`."""
        store, _, owner = self.kept(request)
        batch_id = request.path_params["batch_id"]
        try:
            return store, await store.find(batch_id, owner, BATCHES)
        except RequestError as error:
            if error.status != 404:
                raise
            message = f"No batch found with id '{batch_id[:100]}'."
            raise RequestError(message, "batch_id", status=404, code="batch_not_found") from None

    async def shown(self, store: RecordStore, record: Record) -> dict[str, Any]:
        """The batch as the API shows it. Raises `RequestError`."""
        batch = record.response
        assert batch is not None
        if batch["status"] in END_STATUSES:
            return batch
        since = await cancelled_at(store, record)
        if since is not None:
            batch = {**batch, "status": "cancelling", "cancelling_at": since}
        served = {client.model_info.digest for client in self.models_provider()}
        if msgspec.json.decode(record.body, type=Asked).digest not in served:
            waits = {
                "code": "other_model",
                "message": "It was begun with another model or configuration than is served now. "
                "It waits until that is served again.",
                "line": None,
                "param": None,
            }
            batch = {**batch, "errors": {"object": "list", "data": [waits]}}
        return batch


class CreateBatchRoute(_Route):
    """`POST /v1/batches`."""

    paths = ("/v1/batches",)
    description = "As OpenAI's `POST /v1/batches`, with the fields below."
    body = BatchRequest
    errors = (400, 404, 408, 413, 415, 503)

    async def handle(self, request: Request) -> Response:
        store, files, owner = self.kept(request)
        given = await read_given(request, self.settings.server, BatchRequest)
        window = window_s(given.completion_window)
        longest = min(self.settings.server.request_store_max_age_s, files.max_age_s)
        if window > longest:
            raise RequestError(
                f"completion_window may be {longest:g} s at most on this server: nothing is kept "
                "longer.",
                "completion_window",
            )
        file = await files.get(given.input_file_id, owner)
        if file.expires_at < time.time() + window:
            raise RequestError(
                "The file expires before the completion_window is over.", "input_file_id"
            )
        if file.purpose != "batch":
            raise RequestError(
                f"The file's purpose must be batch, not {file.purpose}.", "input_file_id"
            )
        model = await self._model(files, file.id, owner, given.endpoint)
        info = self.models_provider().of(model).model_info
        now, expiry = int(time.time()), given.output_expires_after
        age_s = None if expiry is None else expiry.seconds
        batch: dict[str, Any] = {
            "id": new_id("batch_"),
            "object": "batch",
            "endpoint": given.endpoint,
            "model": model or info.name,
            "errors": None,
            "input_file_id": file.id,
            "completion_window": given.completion_window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "in_progress_at": None,
            "expires_at": now + window,
            "finalizing_at": None,
            "completed_at": None,
            "failed_at": None,
            "expired_at": None,
            "cancelling_at": None,
            "cancelled_at": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "usage": None,
            "metadata": given.metadata,
        }
        record = Record(
            id=batch["id"],
            owner=owner,
            endpoint=BATCHES,
            request_id=request.scope["state"]["request_id"],
            seed=secrets.randbits(128),
            created=now,
            digest="",
            body=msgspec.json.encode(Asked(info.digest, age_s)),
            response=batch,
            is_background=True,
        )
        await store.add(record, lease=True)
        assert self.runner is not None
        self.runner.answer(record)
        return json_response(batch)

    async def _model(self, files: FileStore, file_id: str, owner: str, endpoint: str) -> str:
        """The model of the file's first line; "" if it can't be read, of which the batch tells."""
        limit, opened = self.settings.server.max_body_bytes, partial(files.open_now, file_id, owner)
        source = Source(opened, limit, (endpoint,), files.in_thread)
        async with aclosing(source.several()) as lines:
            async for found in lines:
                try:
                    return model_of(source.read(*found[0]))
                except LineError:
                    break
        return ""


class ListBatchesRoute(_Route):
    """`GET /v1/batches`."""

    paths = ("/v1/batches",)
    methods = ("GET",)
    parameters = (limit_parameter(), AFTER)
    description = "As OpenAI's `GET /v1/batches`: the API key's batches, the last one first."
    reply = BatchList

    async def handle(self, request: Request) -> Response:
        store, _, owner = self.kept(request)
        asked = PageQuery.of(request.query_params)
        found = await store.page(owner, BATCHES, after=asked.after, limit=asked.limit + 1)
        return json_response(asked.shown([await self.shown(store, record) for record in found]))


class RetrieveBatchRoute(_Route):
    """`GET /v1/batches/{batch_id}`."""

    paths = ("/v1/batches/{batch_id}",)
    methods = ("GET",)
    parameters = (BATCH_ID,)
    description = "As OpenAI's `GET /v1/batches/{batch_id}`."

    async def handle(self, request: Request) -> Response:
        return json_response(await self.shown(*await self.named(request)))


class CancelBatchRoute(_Route):
    """`POST /v1/batches/{batch_id}/cancel`."""

    paths = ("/v1/batches/{batch_id}/cancel",)
    parameters = (BATCH_ID,)
    description = (
        "As OpenAI's `POST /v1/batches/{batch_id}/cancel`: what was answered by then is in the "
        "output's files."
    )

    async def handle(self, request: Request) -> Response:
        check_same_site(request.headers)  # there is no body that says that it isn't a form
        store, record = await self.named(request)
        batch = await self.shown(store, record)
        if batch["status"] in END_STATUSES:
            raise RequestError(f"The batch has the status {batch['status']}.", status=400)
        now = int(time.time())
        if batch["status"] != "cancelling":
            mark = msgspec.structs.replace(
                record,
                id=cancel_id(record),
                endpoint=CANCELLED,
                body=b"",
                response=None,
                created=now,
                is_background=False,
                has_ended=True,
            )
            await store.add(mark)
        return json_response({**batch, "status": "cancelling", "cancelling_at": now})


def window_s(window: str) -> int:
    """Seconds of a `completion_window`. Raises `RequestError` if it is too long."""
    found = re.fullmatch(r"(\d+)([smhd])", window)
    assert found is not None  # it was checked
    seconds = int(found[1]) * _UNITS_S[found[2]]
    if seconds > MAX_WINDOW_S:
        raise RequestError("completion_window may be 30 days at most.", "completion_window")
    return seconds
