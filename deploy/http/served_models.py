"""`ServedModels`: the models behind one API, each behind a client of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import ClassVar, TypeVar

from deploy.http.engine_client import EngineClient, EngineHealth
from engine.errors import EngineDeadError, RequestError
from engine.trace import RoleTrace

T = TypeVar("T")
MAX_NAMES = 8
"""Of models, in an error."""


class ServedModels:
    """One client for each base model, in the order of the configuration. Requests that name no
    model get the first."""

    current: ClassVar[ServedModels | None] = None
    """Those of this process, once they are served."""

    def __init__(self, *clients: EngineClient) -> None:
        self._clients = clients

    @classmethod
    def of_this_process(cls) -> ServedModels:
        """Raises `EngineDeadError` until there are some."""
        if ServedModels.current is None:
            raise EngineDeadError("the server is still starting")
        return ServedModels.current

    def __iter__(self) -> Iterator[EngineClient]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def first(self) -> EngineClient:
        """Also the one to ask for what concerns the whole server."""
        return self._clients[0]

    def label(self, client: EngineClient) -> str:
        """The model's name where several are served, else ""."""
        return client.model_info.name if len(self) > 1 else ""

    def find(self, name: str) -> EngineClient | None:
        """The client whose model is called so, or one of its adapters. A name that is listed or was
        loaded goes before a folder's."""
        infos = [(client, client.model_info) for client in self]
        for fits in (
            lambda info: info.name == name,
            lambda info: info.adapters is not None and info.adapters.at_hand(name) is not None,
            lambda info: info.has(name),
        ):
            for client, info in infos:
                if fits(info):
                    return client
        return None

    def of(self, name: str) -> EngineClient:
        """As `find`; "" finds the first. Raises `RequestError` (404) if there is none."""
        found = self.find(name) if name else self.first
        if found is None:
            raise no_model(name, [known for client in self for known in client.model_info.names])
        return found

    async def refresh_adapters(self) -> None:
        """Learn which adapters were loaded by hand."""
        for client in self:
            await client.refresh_adapters()

    async def health(self) -> dict[str, EngineHealth]:
        """Of each model, by its name. Never raises."""
        return self._by_name(await asyncio.gather(*[client.health() for client in self]))

    async def check_generate(self, timeout_s: float) -> EngineHealth:
        """As `EngineClient.check_generate`, of all models."""
        asked = [client.check_generate(timeout_s) for client in self]
        return overall(self._by_name(await asyncio.gather(*asked)))

    async def flush_cache(self) -> list[str]:
        """As `EngineClient.flush_cache`, of all models. Engines that can't be asked refuse."""
        refusals: list[str] = []
        for client, found in await self._each(lambda client: client.flush_cache()):
            told = [str(found)] if isinstance(found, EngineDeadError) else found
            refusals += [f"{self.label(client)}: {why}".removeprefix(": ") for why in told]
        return refusals

    async def trace(self, last: int) -> dict[str, list[RoleTrace]]:
        """What the roles of each engine replica did in their last steps, by model and replica,
        without the models whose engines can't be asked. Raises `EngineDeadError` if none can."""
        asked = await self._each(lambda client: client.trace(last))
        lost = [found for _, found in asked if isinstance(found, EngineDeadError)]
        if len(lost) == len(self):
            raise lost[0]
        return {
            f"{self.label(client)} {replica}".lstrip(): roles
            for client, found in asked
            if not isinstance(found, EngineDeadError)
            for replica, roles in found.items()
        }

    async def _each(
        self, ask: Callable[[EngineClient], Awaitable[T]]
    ) -> list[tuple[EngineClient, T | EngineDeadError]]:
        """What each client answers, or that its engines don't."""

        async def one(client: EngineClient) -> T | EngineDeadError:
            try:
                return await ask(client)
            except EngineDeadError as error:
                return error

        return list(zip(self, await asyncio.gather(*map(one, self)), strict=True))

    def _by_name(self, states: list[EngineHealth]) -> dict[str, EngineHealth]:
        return {c.model_info.name: state for c, state in zip(self, states, strict=True)}


def overall(states: dict[str, EngineHealth]) -> EngineHealth:
    """Well if all models are; else it says which aren't."""
    wrong = {name: state.detail for name, state in states.items() if not state.ok}
    if len(states) == 1:
        return EngineHealth(not wrong, "".join(wrong.values()))
    return EngineHealth(not wrong, "; ".join(f"{name}: {why}" for name, why in wrong.items()))


def no_model(name: str, names: list[str]) -> RequestError:
    """The error for a model that isn't one of `names`."""
    shown = ", ".join(f"`{known}`" for known in names[:MAX_NAMES])
    more = len(names) - MAX_NAMES
    others = f", and {more} more (GET /v1/models)" if more > 0 else ""
    return RequestError(
        f"The model `{name[:200]}` does not exist; this server has {shown}{others}.",
        "model",
        status=404,
        code="model_not_found",
    )
