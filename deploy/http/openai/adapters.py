"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them."""

# No `from __future__ import annotations`: pydantic reads the annotations of the request.
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from deploy.http.access.api_key import ApiKey
from deploy.http.body import Strict
from deploy.http.engine_client import EngineClient
from deploy.http.generation.endpoint import check_same_site
from deploy.http.generation.json_route import JsonRoute
from engine.errors import RequestError


class LoadAdapterFields(Strict):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)
    """Folder of the adapter on the server, absolute."""
    base_model: str = Field("", max_length=512)
    """Name of the model that it is for. May be left out: then it is the first."""
    load_inplace: bool = False
    """Take the place of an adapter of this name. Running streams end on the one they began with."""


class UnloadAdapterFields(Strict):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: int | None = None
    """Means nothing here."""


class _AdapterRoute(JsonRoute):
    """A route of administrators that answers with a sentence."""

    for_admins = True
    reply = None
    errors = (400, 403, 404, 413, 415, 500, 503)

    async def handle(self, request: Request) -> Response:
        check_same_site(request.headers)
        await self.models_provider().refresh_adapters()
        return await super().handle(request)

    def _response(self, answer: str) -> Response:
        return Response(f"{answer}\n", media_type="text/plain")


class LoadAdapterRoute(_AdapterRoute):
    """Serves one more adapter."""

    paths = ("/v1/load_lora_adapter",)
    description = (
        "As vLLM's. The folder must lie below one of `lora_load_folders`. The answer comes when "
        "every engine replica has the adapter, or names those that don't. It is kept over restarts "
        "of any process and for new replicas."
    )
    body = LoadAdapterFields

    def model_named(self, given: LoadAdapterFields) -> str:
        return given.base_model

    async def _answer(
        self, client: EngineClient, given: LoadAdapterFields, key: ApiKey | None
    ) -> str:
        holder = self.models_provider().find(given.lora_name)
        if holder not in (None, client):
            raise RequestError(f"'{given.lora_name}' is served for another model", "lora_name")
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

    def model_named(self, given: UnloadAdapterFields) -> str:
        is_served = self.models_provider().find(given.lora_name) is not None
        return given.lora_name if is_served else ""

    async def _answer(
        self, client: EngineClient, given: UnloadAdapterFields, key: ApiKey | None
    ) -> str:
        await client.unload_adapter(given.lora_name)
        return f"Success: LoRA adapter '{given.lora_name}' removed successfully."
