"""`HealthProbe`: asks the engines at most twice a second, however often it is asked."""

from __future__ import annotations

from collections.abc import Callable

from deploy.http.engine_client import EngineClient, EngineHealth
from engine.process.shared_answer import SharedAnswer

FRESH_S = 0.5
"""An answer of this age is given again."""


class HealthProbe:
    """Shares one question among all who ask meanwhile, and its answer with those who ask soon."""

    def __init__(self, client_provider: Callable[[], EngineClient]) -> None:
        self._client_provider = client_provider
        self._answer = SharedAnswer[EngineHealth](FRESH_S)

    async def check(self) -> EngineHealth:
        """Whether requests can be served. Raises what the provider raises if there is no client."""
        return await self._answer.get(self._client_provider().health)
