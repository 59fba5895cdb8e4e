"""`HealthProbe`: asks the engines at most twice a second, however often it is asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from deploy.http.engine_client import EngineClient, EngineHealth

FRESH_S = 0.5
"""An answer of this age is given again."""


class HealthProbe:
    """Shares one question among all who ask meanwhile, and its answer with those who ask soon."""

    def __init__(self, client_provider: Callable[[], EngineClient]) -> None:
        self._client_provider = client_provider
        self._asked: tuple[float, asyncio.Task[EngineHealth]] | None = None

    async def check(self) -> EngineHealth:
        """Whether requests can be served. Raises what the provider raises if there is no client."""
        client = self._client_provider()
        asked = self._asked
        if asked is None or (asked[1].done() and time.monotonic() - asked[0] > FRESH_S):
            task = asyncio.create_task(client.health())
            asked = self._asked = (time.monotonic(), task)
        # One who leaves doesn't end the question of the others.
        return await asyncio.shield(asked[1])
