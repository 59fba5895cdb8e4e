"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from typing import Any

from deploy.http.access.api_key import ApiKey
from deploy.http.anthropic.generation import MessageGeneration
from deploy.http.anthropic.replies import AnthropicError, MessageEvent, MessageReply, TokenCount
from deploy.http.anthropic.request import CountTokensRequest, MessagesRequest
from deploy.http.engine_client import EngineClient
from deploy.http.generation.endpoint import Endpoint
from deploy.http.generation.generation import Generation
from deploy.http.generation.json_route import JsonRoute
from deploy.http.generation.plan import plan_chat
from deploy.http.generation.read_on import ForgetRoute, ReadOnRoute
from deploy.http.generation.request import Incoming


class MessagesEndpoint(Endpoint):
    """`POST /v1/messages`."""

    name = "messages"
    paths = ("/v1/messages",)
    description = "As Anthropic's `POST /v1/messages`, with the fields below."
    body = MessagesRequest
    reply = MessageReply
    events = (MessageEvent, AnthropicError)
    names_events = True

    async def prepare(
        self,
        client: EngineClient,
        given: MessagesRequest,
        incoming: Incoming,
    ) -> Generation[Any]:
        request = given.translate(f"msg_{incoming.id}", client.model_info)
        applied_edits = await given.edit(client, request)
        plan = await plan_chat(client, self.settings.server, request, incoming)
        return MessageGeneration(client, given, plan, incoming.tracker, applied_edits)


class ReadMessageRoute(ReadOnRoute):
    """`GET /v1/messages/{record_id}`."""

    endpoint = MessagesEndpoint


class ForgetMessageRoute(ForgetRoute):
    """`DELETE /v1/messages/{record_id}`."""

    endpoint = MessagesEndpoint
    object_name = "message"


class CountTokensRoute(JsonRoute):
    """`POST /v1/messages/count_tokens`."""

    paths = ("/v1/messages/count_tokens",)
    description = "As Anthropic's `POST /v1/messages/count_tokens`."
    body = CountTokensRequest
    reply = TokenCount

    async def _answer(
        self, client: EngineClient, given: CountTokensRequest, key: ApiKey | None
    ) -> dict[str, Any]:
        request = given.translate("", client.model_info)
        if given.context_management is None:
            return {"input_tokens": len(await client.render_chat(request.chat))}
        original = len(await client.render_chat(request.chat))
        await given.edit(client, request)
        return {
            "input_tokens": len(await client.render_chat(request.chat)),
            "context_management": {"original_input_tokens": original},
        }
