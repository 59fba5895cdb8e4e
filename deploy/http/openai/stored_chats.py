"""Routes of chat completions that are kept: listed, read, changed and deleted.

A stream that can be read on is kept, too. Only those that were asked for with `store: true` have a
reply in the store, once they have ended, and are listed.
"""

# No `from __future__ import annotations`: pydantic reads the annotations of the request.
import re
from typing import Any, ClassVar

from pydantic import Field
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from deploy.http.access.api_key import owner_of
from deploy.http.body import Strict, json_response, parse_body
from deploy.http.dialect import Route
from deploy.http.generation.arguments import as_text
from deploy.http.generation.endpoint import read_given
from deploy.http.generation.read_on import (
    RECORD_ID,
    ForgetRoute,
    KeptRoute,
    ReadOnRoute,
    wants_stream,
)
from deploy.http.openai import replies
from deploy.http.openai.chat import ChatCompletionRequest, ChatEndpoint
from deploy.http.openai.messages import ChatMessage, ToolCall
from deploy.http.openai.request import Metadata
from deploy.http.paging import PAGE_PARAMETERS, PageQuery
from deploy.http.records.store import Record, RecordStore, no_record

_AT_ONCE = 16
"""Records that are read together: they hold their requests, which may be large."""
_METADATA = re.compile(r"metadata\[(.*)\]", re.DOTALL)


class ListChatsRoute(Route):
    """`GET /v1/chat/completions`."""

    paths = ChatEndpoint.paths
    methods = ("GET",)
    description = (
        "As OpenAI's `GET /v1/chat/completions`: the completions that were stored, the first one "
        "first unless `order` is `desc`."
    )
    parameters = (
        *PAGE_PARAMETERS,
        {"name": "model", "in": "query", "schema": {"type": "string"}},
        {
            "name": "metadata",
            "in": "query",
            "style": "deepObject",
            "schema": {"type": "object", "additionalProperties": {"type": "string"}},
        },
    )
    reply = replies.ChatCompletions
    errors: ClassVar[tuple[int, ...]] = (400, 404, 503)

    async def handle(self, request: Request) -> Response:
        query = request.query_params
        page = PageQuery.of(query, newest_first=False)
        owner = owner_of(request.scope["state"].get("key"))
        found: list[dict[str, Any]] = []
        if self.store is not None:
            found = await _found(self.store, owner, page, query)
        elif page.after is not None:
            raise no_record(page.after, "after")
        return json_response(page.shown(found))


class _StoredRoute(KeptRoute):
    """A route of one completion that is stored."""

    endpoint = ChatEndpoint
    errors: ClassVar[tuple[int, ...]] = (400, 404, 503)

    async def stored(self, request: Request) -> tuple[RecordStore, Record, dict[str, Any]]:
        """The completion that the path names, and its reply. Raises `RequestError`."""
        store, record = await self.kept(request)
        if record.response is None:
            raise no_record(record.id)
        return store, record, record.response


class ReadChatRoute(ReadOnRoute):
    """`GET /v1/chat/completions/{record_id}`."""

    endpoint = ChatEndpoint
    description = (
        "As OpenAI's `GET /v1/chat/completions/{completion_id}`: a completion that was stored, as "
        "it was given. The reply to another one whose stream was begun with this id is made once "
        "more: the same text. With `stream` its events, behind the place that `Last-Event-ID` or "
        "`starting_after` names."
    )

    async def handle(self, request: Request) -> Response:
        _, record = await self.kept(request)
        if record.response is not None and not wants_stream(request):
            return json_response(record.response)
        return self.read_on(request, record)


class MetadataUpdate(Strict):
    """Body of `POST /v1/chat/completions/{record_id}`."""

    metadata: Metadata = Field(default_factory=dict)


class UpdateChatRoute(_StoredRoute):
    """`POST /v1/chat/completions/{record_id}`."""

    paths = (f"{ChatEndpoint.paths[0]}/{{record_id}}",)
    methods = ("POST",)
    description = (
        "As OpenAI's `POST /v1/chat/completions/{completion_id}`: gives a stored completion other "
        "metadata."
    )
    body = MetadataUpdate
    reply = replies.ChatCompletion
    errors = (400, 404, 408, 413, 415, 503)

    async def handle(self, request: Request) -> Response:
        given = await read_given(request, self.settings.server, MetadataUpdate)
        store, record, reply = await self.stored(request)
        reply = reply | {"metadata": given.metadata}
        await store.amend(record, reply)
        return json_response(reply)


class ForgetChatRoute(ForgetRoute):
    """`DELETE /v1/chat/completions/{record_id}`."""

    endpoint = ChatEndpoint
    object_name = "chat.completion"


class MessagesRoute(_StoredRoute):
    """`GET /v1/chat/completions/{record_id}/messages`."""

    paths = (f"{ChatEndpoint.paths[0]}/{{record_id}}/messages",)
    methods = ("GET",)
    parameters = (RECORD_ID, *PAGE_PARAMETERS)
    description = (
        "As OpenAI's `GET /v1/chat/completions/{completion_id}/messages`: what a stored completion "
        "was asked, the first message first unless `order` is `desc`."
    )
    reply = replies.StoredMessages

    async def handle(self, request: Request) -> Response:
        page = PageQuery.of(request.query_params, newest_first=False)
        _, record, _ = await self.stored(request)
        given = await parse_body(record.body, ChatCompletionRequest)
        shown = [_shown(m, f"{record.id}-{n}") for n, m in enumerate(given.messages)]
        return json_response(page.within(shown))


async def _found(
    store: RecordStore, owner: str, page: PageQuery, query: QueryParams
) -> list[dict[str, Any]]:
    """The completions of a page, and one more if there is one."""
    model = query.get("model")
    named = [_METADATA.fullmatch(key) for key in query]
    metadata = {match[1]: query[match[0]] for match in named if match}

    def matches(reply: dict[str, Any]) -> bool:
        noted = reply["metadata"]
        alike = all(noted.get(key) == value for key, value in metadata.items())
        return alike and model in (None, reply["model"])

    found: list[dict[str, Any]] = []
    after = page.after
    while len(found) <= page.limit:
        records = await store.page(
            *(owner, ChatEndpoint.name),
            after=after,
            limit=_AT_ONCE,
            newest_first=page.newest_first,
        )
        answers = [record.response for record in records if record.response is not None]
        found += filter(matches, answers)
        if len(records) < _AT_ONCE:
            break
        after = records[-1].id
    return found


def _shown(message: ChatMessage, message_id: str) -> dict[str, Any]:
    """The message in the form that OpenAI's API has for reading."""
    content = message.content
    parts = None if isinstance(content, str) else [part.model_dump() for part in content]
    more = {
        "refusal": message.refusal,
        "reasoning_content": message.reasoning_content or message.reasoning,
        "tool_calls": [_call(call) for call in message.tool_calls],
        "tool_call_id": message.tool_call_id,
    }
    return {
        "id": message_id,
        "role": message.role,
        "content": content if parts is None else None,
        "content_parts": parts,
        "name": message.name,
        **{key: value for key, value in more.items() if value},
    }


def _call(call: ToolCall) -> dict[str, Any]:
    shown: dict[str, Any] = {"id": call.id or "", "type": call.type}
    if call.custom is not None:
        return shown | {"custom": call.custom.model_dump()}
    assert call.function is not None
    arguments = as_text(call.function.arguments)
    return shown | {"function": {"name": call.function.name, "arguments": arguments}}
