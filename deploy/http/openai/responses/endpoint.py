"""The routes of OpenAI's Responses API."""

from __future__ import annotations

import uuid
from typing import Any

from deploy.http.access.api_key import ApiKey
from deploy.http.engine_client import EngineClient
from deploy.http.generation.endpoint import Endpoint
from deploy.http.generation.generation import Generation
from deploy.http.generation.json_route import JsonRoute
from deploy.http.generation.plan import plan_chat
from deploy.http.generation.request import Incoming
from deploy.http.openai.responses.generation import ResponseGeneration
from deploy.http.openai.responses.keeper import Keeper, with_history
from deploy.http.openai.responses.replies import InputTokens, Response, ResponseEvent
from deploy.http.openai.responses.request import ResponsesRequest


class ResponsesEndpoint(Endpoint):
    """`POST /v1/responses`."""

    name = "responses"
    paths = ("/v1/responses",)
    description = "As OpenAI's `POST /v1/responses`, with the fields below."
    body = ResponsesRequest
    reply = Response
    events = (ResponseEvent,)

    async def prepare(
        self,
        client: EngineClient,
        given: ResponsesRequest,
        incoming: Incoming,
    ) -> Generation[Any]:
        whole = await with_history(self.store, given, incoming.key)
        # Clients choose the id of a request, and may give several the same.
        response_id = f"resp_{uuid.uuid4().hex}"
        request = whole.translate(response_id, client.model_info, given_id=incoming.id)
        plan = await plan_chat(client, self.settings.server, request, incoming.key)
        generation = ResponseGeneration(client, given, plan, incoming.tracker)
        if self.store is not None and given.store is not False:
            generation.keeper = Keeper(self.store, given, incoming.key)
        return generation


class InputTokensRoute(JsonRoute):
    """`POST /v1/responses/input_tokens`."""

    paths = ("/v1/responses/input_tokens",)
    description = "As OpenAI's `POST /v1/responses/input_tokens`."
    body = ResponsesRequest
    reply = InputTokens

    async def _answer(
        self, client: EngineClient, given: ResponsesRequest, key: ApiKey | None
    ) -> dict[str, Any]:
        given = await with_history(self.store, given, key)
        request = given.translate("", client.model_info)
        ids = await client.render_chat(request.chat)
        return {"object": "response.input_tokens", "input_tokens": len(ids)}
