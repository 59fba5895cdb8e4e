"""Routes that act on the engines: `/abort_request`, `/flush_cache` and `/health_generate`.

Web pages of other sites are refused: `/flush_cache` takes requests that browsers send anywhere.
"""

# No `from __future__ import annotations`: pydantic reads the annotations of the request.
from typing import Any

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from deploy.http.access.api_key import ApiKey
from deploy.http.body import Strict, json_response, refusal
from deploy.http.dialect import Route
from deploy.http.engine_client import EngineClient
from deploy.http.generation.endpoint import check_same_site
from deploy.http.generation.json_route import JsonRoute
from deploy.http.sglang.replies import Aborted, HealthReply
from engine.errors import RequestError

HEALTH_TIMEOUT_S = 20.0
"""An engine replica has this time for a token."""


class AbortFields(Strict):
    """Body of `POST /abort_request`."""

    rid: str = Field("", max_length=512)
    """The `rid` or `request_id` of a request, its `X-Request-Id` if it has none, or the `id` of its
    reply."""
    abort_all: bool = False

    @model_validator(mode="after")
    def _check(self) -> "AbortFields":
        if not self.rid and not self.abort_all:
            raise refusal("Give a rid, or abort_all.", "rid")
        return self


class AbortRoute(JsonRoute):
    """Ends a request, or all."""

    paths = ("/abort_request",)
    description = (
        "As SGLang's `POST /abort_request`. A request that waits or runs ends with what it has and "
        "finish reason abort, in every API. Unknown ids are ignored, and so are those of requests "
        "with another API key, unless the key's role is admin."
    )
    body = AbortFields
    reply = Aborted
    errors = (400, 403, 413, 415, 500, 503)

    async def handle(self, request: Request) -> Response:
        check_same_site(request.headers)
        return await super().handle(request)

    async def _answer(
        self, client: EngineClient, given: AbortFields, key: ApiKey | None
    ) -> dict[str, Any]:
        owner = None if key is None or key.role == "admin" else key.name
        await client.abort(None if given.abort_all else given.rid, owner)
        return {"success": True}


class FlushCacheRoute(Route):
    """Empties the prefix caches."""

    paths = ("/flush_cache",)
    methods = ("GET", "POST")
    description = (
        "As SGLang's `/flush_cache`. 400 if an engine replica has requests; the others' caches are "
        "empty then."
    )
    for_admins = True
    reply = None
    errors = (400, 403, 500, 503)

    async def handle(self, request: Request) -> Response:
        check_same_site(request.headers)
        refusals = await self.models_provider().flush_cache()
        if refusals:
            raise RequestError(f"Not every cache was flushed: {'; '.join(refusals)}.")
        return Response("Cache flushed.\n", media_type="text/plain")


class HealthGenerateRoute(Route):
    """Whether every engine replica generates."""

    paths = ("/health_generate",)
    methods = ("GET",)
    description = (
        "As SGLang's `GET /health_generate`: every engine replica generates a token within "
        f"{HEALTH_TIMEOUT_S:g} s, or goes on with other requests, else 503."
    )
    reply = HealthReply
    errors = (403, 404, 500, 503)

    async def handle(self, request: Request) -> Response:
        check_same_site(request.headers)
        models, name = self.models_provider(), request.query_params.get("model", "")
        asked = models.of(name) if name else models
        health = await asked.check_generate(HEALTH_TIMEOUT_S)
        if not health.ok:
            raise RequestError(health.detail, status=503)
        return json_response({"status": "ok"})
