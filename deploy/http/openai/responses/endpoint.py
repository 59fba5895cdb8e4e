"""The routes of OpenAI's Responses API."""

from __future__ import annotations

from typing import Any

import msgspec

from deploy.http.access.api_key import ApiKey
from deploy.http.engine_client import EngineClient
from deploy.http.generation.endpoint import Endpoint
from deploy.http.generation.generation import Generation
from deploy.http.generation.json_route import JsonRoute
from deploy.http.generation.plan import plan_chat
from deploy.http.generation.request import Incoming
from deploy.http.openai.responses.generation import ResponseGeneration
from deploy.http.openai.responses.history import with_history
from deploy.http.openai.responses.replies import InputTokens, Response, ResponseEvent
from deploy.http.openai.responses.request import ResponsesRequest
from deploy.http.records.keeper import Keeper
from deploy.http.records.store import Record
from engine.errors import RequestError


class ResponsesEndpoint(Endpoint):
    """`POST /v1/responses`."""

    name = "responses"
    paths = ("/v1/responses",)
    description = "As OpenAI's `POST /v1/responses`, with the fields below."
    body = ResponsesRequest
    reply = Response
    events = (ResponseEvent,)
    names_events = True

    async def prepare(
        self,
        client: EngineClient,
        given: ResponsesRequest,
        incoming: Incoming,
    ) -> Generation[Any]:
        if given.background and self.store is None:
            raise RequestError(
                "This server keeps no responses (request_store: none), so that none can be made in "
                "the background.",
                "background",
            )
        whole = await with_history(self.store, given, incoming.key)
        # Clients choose the id of a request, and may give several the same.
        request = whole.translate(
            f"resp_{incoming.seed:032x}", client.model_info, given_id=incoming.id
        )
        plan = await plan_chat(client, self.settings.server, request, incoming)
        return ResponseGeneration(client, given, plan, incoming.tracker)

    def keeps(self, given: ResponsesRequest, generation: Generation[Any]) -> bool:
        return self.store is not None and given.store is not False

    def keeper(self, given: ResponsesRequest, record: Record) -> Keeper:
        assert self.store is not None
        record = msgspec.structs.replace(
            record, previous=given.previous_response_id, is_background=given.background
        )
        return Keeper(self.store, record, must=given.store is True or given.background)


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
