"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them."""

# No `from __future__ import annotations`: pydantic reads the annotations of the request.
from typing import Any

from pydantic import Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from deploy.http.body import Strict, parse_body
from deploy.http.dialect import Route
from deploy.http.engine_client import EngineClient
from deploy.http.generation.endpoint import (
    CLIENT_GONE,
    check_content_type,
    check_same_site,
    read_body,
)


class LoadAdapterFields(Strict):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)
    """Folder of the adapter on the server, absolute."""
    load_inplace: bool = False
    """Take the place of an adapter of this name. Running streams end on the one they began with."""


class UnloadAdapterFields(Strict):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: int | None = None
    """Means nothing here."""


class _AdapterRoute(Route):
    """A route of administrators that answers with a sentence."""

    for_admins = True
    reply = None
    errors = (400, 403, 404, 413, 415, 500, 503)

    async def handle(self, request: Request) -> Response:
        check_same_site(request.headers)
        check_content_type(request.headers)
        try:
            body = await read_body(request, self.settings.server)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        assert self.body is not None
        given = await parse_body(body, self.body)
        said = await self._act(self.client_provider(), given)
        return Response(f"{said}\n", media_type="text/plain")

    async def _act(self, client: EngineClient, given: Any) -> str:
        raise NotImplementedError


class LoadAdapterRoute(_AdapterRoute):
    """Serves one more adapter."""

    paths = ("/v1/load_lora_adapter",)
    description = (
        "As vLLM's. The folder must lie below one of `lora_load_folders`. The answer comes when "
        "every engine replica has the adapter, or names those that don't. It is kept over restarts "
        "of any process and for new replicas."
    )
    body = LoadAdapterFields

    async def _act(self, client: EngineClient, given: LoadAdapterFields) -> str:
        lacking = await client.load_adapter(
            given.lora_name, given.lora_path, replace=given.load_inplace
        )
        if lacking:
            return (
                f"LoRA adapter '{given.lora_name}' is served, but not everywhere yet: "
                f"{'; '.join(lacking)}."
            )
        return f"Success: LoRA adapter '{given.lora_name}' added successfully."


class UnloadAdapterRoute(_AdapterRoute):
    """Serves an adapter no more."""

    paths = ("/v1/unload_lora_adapter",)
    description = "As vLLM's. Requests that run with the adapter go on to their ends."
    body = UnloadAdapterFields

    async def _act(self, client: EngineClient, given: UnloadAdapterFields) -> str:
        await client.unload_adapter(given.lora_name)
        return f"Success: LoRA adapter '{given.lora_name}' removed successfully."
