"""`JsonRoute`: a route whose answer is computed at once, without generating."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from deploy.http.access.api_key import ApiKey
from deploy.http.body import json_response
from deploy.http.dialect import Route
from deploy.http.engine_client import EngineClient
from deploy.http.generation.endpoint import read_given


class JsonRoute(Route):
    """A route that reads JSON, if it has a body, and answers with JSON."""

    errors: ClassVar[tuple[int, ...]] = (400, 404, 408, 413, 415, 500, 503)

    async def handle(self, request: Request) -> Response:
        if self.body is None:
            given, name = None, request.query_params.get("model", "")
        else:
            given = await read_given(request, self.settings.server, self.body)
            name = self.model_named(given)
        key = request.scope["state"].get("key")
        answer = await self._answer(self.models_provider().of(name), given, key)
        return self._response(answer)

    def model_named(self, given: Any) -> str:
        """The name of the model in a request, whose type is `body`; "" if it names none."""
        return str(getattr(given, "model", ""))

    def _response(self, answer: Any) -> Response:
        return json_response(answer)

    @abstractmethod
    async def _answer(self, client: EngineClient, given: Any, key: ApiKey | None) -> Any:
        """The reply to `given`, whose type is `body`. `key`: None if the server has no keys. Raises
        `RequestError`."""
