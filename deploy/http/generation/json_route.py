"""`JsonRoute`: a route that answers a JSON body without generating."""

# No `from __future__ import annotations`: FastAPI reads the annotations of the handler.
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from fastapi import Request, Response
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from deploy.http.body import encode_json
from deploy.http.engine_client import EngineClient
from deploy.http.generation.endpoint import CLIENT_GONE, check_content_type, read_body
from deploy.http.settings import ApiSettings


class JsonRoute(ABC):
    """One route. Ray Serve ships it to each ingress replica."""

    body: ClassVar[type[BaseModel]]
    reply: ClassVar[type[BaseModel]]

    def __init__(self, client_provider: Callable[[], EngineClient], settings: ApiSettings) -> None:
        self._client_provider = client_provider
        self._settings = settings

    async def handle(self, request: Request) -> Response:
        """The HTTP handler. Raises `RequestError`, which the application answers."""
        check_content_type(request.headers)
        try:
            body = await read_body(request, self._settings.max_body_bytes)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        answer = await self._answer(self._client_provider(), body)
        return Response(encode_json(answer), media_type="application/json")

    @abstractmethod
    async def _answer(self, client: EngineClient, body: bytes) -> dict[str, Any]:
        """The reply. Raises `RequestError`."""
