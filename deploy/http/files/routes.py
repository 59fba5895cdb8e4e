"""The routes of OpenAI's Files API."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import closing
from typing import IO, Any, ClassVar, Literal, get_args

from pydantic import BaseModel
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from deploy.http.access.api_key import owner_of
from deploy.http.body import json_response
from deploy.http.dialect import Route
from deploy.http.files.file_store import BLOCK, FileStore, too_much
from deploy.http.generation.endpoint import check_same_site
from deploy.http.paging import AFTER, ORDER, PageQuery, limit_parameter
from deploy.http.records.store import RecordStore
from engine.errors import RequestError

MAX_FILES = 10_000
"""Of a page."""
MAX_NAME = 255
"""Characters of a file's name."""
AGES_S = (3600, 2_592_000)
"""That `expires_after` may have."""
FORM_BYTES = 64 * 1024
"""Of a form besides its file."""
Purpose = Literal["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]
FILE_ID = {
    "name": "file_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "maxLength": 64},
}


class FileObject(BaseModel):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(BaseModel):
    """Files of a key."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    """Reply of `DELETE`."""

    id: str
    object: Literal["file"]
    deleted: bool


class FilesRoute(Route):
    """A route that needs the files."""

    errors: ClassVar[tuple[int, ...]] = (400, 404, 503)

    def kept(self, request: Request) -> tuple[FileStore, str]:
        """The files, and whose the request may see. Raises `RequestError`."""
        if self.files is None:
            option = option_with_none(self.store)
            raise RequestError(f"This server keeps no files ({option}: none).")
        return self.files, owner_of(request.scope["state"].get("key"))


def option_with_none(store: RecordStore | None) -> str:
    """The option for which a server has no files and batches."""
    return "request_store" if store is None else "file_store"


class UploadRoute(FilesRoute):
    """`POST /v1/files`."""

    paths = ("/v1/files",)
    description = (
        "As OpenAI's `POST /v1/files`: a form with `file`, `purpose` and, if wanted, "
        "`expires_after[anchor]` and `expires_after[seconds]`."
    )
    form: ClassVar[dict[str, Any] | None] = {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {
            "file": {"type": "string", "format": "binary"},
            "purpose": {"enum": list(get_args(Purpose))},
            "expires_after[anchor]": {"enum": ["created_at"]},
            "expires_after[seconds]": {
                "type": "integer",
                "minimum": AGES_S[0],
                "maximum": AGES_S[1],
            },
        },
    }
    reply = FileObject
    errors = (400, 403, 408, 413, 415, 503)

    async def handle(self, request: Request) -> Response:
        check_same_site(request.headers)  # browsers send forms to any site
        files, owner = self.kept(request)
        media_type, options = parse_options_header(request.headers.get("content-type", ""))
        is_form = media_type == b"multipart/form-data" and b"boundary" in options
        if not is_form or options.get(b"charset", b"utf-8").lower() != b"utf-8":
            raise RequestError(
                "The body must be multipart/form-data in UTF-8.",
                status=415,
                code="unsupported_media_type",
            )
        form = await self._form(request, await files.room(owner), files.max_bytes)
        try:
            given = form.get("file")
            if not isinstance(given, UploadFile):
                raise RequestError("file is required, and must be a file.", "file")
            file = await files.add(
                owner,
                given.file,
                filename=(given.filename or "file").encode(errors="replace").decode()[:MAX_NAME],
                purpose=_purpose(form),
                age_s=_age_s(form),
            )
        finally:
            await form.close()
        return json_response(file.shown())

    async def _form(self, request: Request, room: int, most: int) -> FormData:
        """What was sent, its file on disk. `room`: bytes that the key may still have of `most`.
        Raises `RequestError` and `ClientDisconnect`."""
        server = self.settings.server
        limit, wait_s = min(server.max_file_bytes, room), server.body_timeout_s
        larger = too_much(most) if limit == room else _too_large(limit)
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > limit + FORM_BYTES:
            raise larger

        async def chunks() -> AsyncGenerator[bytes, None]:
            size = 0
            stream = request.stream()
            while True:
                try:
                    async with asyncio.timeout(wait_s):
                        chunk = await anext(stream, None)
                except TimeoutError:
                    raise RequestError(
                        f"Nothing more of the file came for {wait_s:g} s.",
                        status=408,
                        code="request_timeout",
                    ) from None
                if chunk is None:
                    return
                size += len(chunk)
                if size > limit + FORM_BYTES:
                    raise larger
                yield chunk

        parser = MultiPartParser(request.headers, chunks(), max_files=1, max_fields=16)
        try:
            form = await parser.parse()
        except (MultiPartException, FormParserError) as error:
            raise RequestError(f"The form can't be read: {error}.") from error
        return form


class ListFilesRoute(FilesRoute):
    """`GET /v1/files`."""

    paths = ("/v1/files",)
    methods = ("GET",)
    parameters = (
        limit_parameter(MAX_FILES),
        ORDER,
        AFTER,
        {"name": "purpose", "in": "query", "schema": {"type": "string"}},
    )
    description = "As OpenAI's `GET /v1/files`: the API key's files, the last one first."
    reply = FileList

    async def handle(self, request: Request) -> Response:
        files, owner = self.kept(request)
        asked = PageQuery.of(request.query_params, most=MAX_FILES, default=MAX_FILES)
        purpose = request.query_params.get("purpose")
        found = await files.page(
            owner,
            after=asked.after,
            limit=asked.limit + 1,
            newest_first=asked.newest_first,
            purpose=purpose,
        )
        answer = asked.shown([file.shown() for file in found])
        return json_response(answer)


class RetrieveFileRoute(FilesRoute):
    """`GET /v1/files/{file_id}`."""

    paths = ("/v1/files/{file_id}",)
    methods = ("GET",)
    parameters = (FILE_ID,)
    description = "As OpenAI's `GET /v1/files/{file_id}`."
    reply = FileObject

    async def handle(self, request: Request) -> Response:
        files, owner = self.kept(request)
        file = await files.get(request.path_params["file_id"], owner)
        return json_response(file.shown())


class FileContentRoute(FilesRoute):
    """`GET /v1/files/{file_id}/content`."""

    paths = ("/v1/files/{file_id}/content",)
    methods = ("GET",)
    parameters = (FILE_ID,)
    description = "As OpenAI's `GET /v1/files/{file_id}/content`: the file itself."
    reply = None

    async def handle(self, request: Request) -> Response:
        files, owner = self.kept(request)
        file = await files.get(request.path_params["file_id"], owner)
        content = await files.open(file.id, owner)
        headers = {"content-length": str(file.bytes)}
        return StreamingResponse(
            _blocks(files, content), media_type="application/octet-stream", headers=headers
        )


class DeleteFileRoute(FilesRoute):
    """`DELETE /v1/files/{file_id}`."""

    paths = ("/v1/files/{file_id}",)
    methods = ("DELETE",)
    parameters = (FILE_ID,)
    description = "As OpenAI's `DELETE /v1/files/{file_id}`."
    reply = DeletedFile

    async def handle(self, request: Request) -> Response:
        files, owner = self.kept(request)
        file_id = request.path_params["file_id"]
        await files.delete(file_id, owner)
        answer = {"id": file_id, "object": "file", "deleted": True}
        return json_response(answer)


async def _blocks(files: FileStore, content: IO[bytes]) -> AsyncIterator[bytes]:
    with closing(content):
        while block := await files.in_thread(content.read, BLOCK):
            yield block


def _purpose(form: FormData) -> str:
    given = form.get("purpose")
    if given not in get_args(Purpose):
        named = ", ".join(get_args(Purpose))
        raise RequestError(f"purpose is required, and must be one of {named}.", "purpose")
    return str(given)


def _age_s(form: FormData) -> float | None:
    """How long the file is to be kept; None: the default."""
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise RequestError("expires_after[anchor] must be created_at.", "expires_after")
    text = str(seconds)
    if not (text.isascii() and text.isdigit() and AGES_S[0] <= int(text[:9]) <= AGES_S[1]):
        raise RequestError(
            f"expires_after[seconds] must be a number from {AGES_S[0]} to {AGES_S[1]}.",
            "expires_after",
        )
    return float(text)


def _too_large(limit: int) -> RequestError:
    message = f"The file is larger than {limit} bytes (max_file_bytes)."
    return RequestError(message, "file", status=413, code="request_too_large")
