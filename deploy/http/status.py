"""`StatusProbe`: what the page `/status` shows, as `GET /debug/status` answers it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from deploy.http.engine_client import EngineClient
from deploy.http.metrics import ServerMetrics
from deploy.http.served_models import ServedModels
from engine import __version__
from engine.errors import EngineDeadError
from engine.process.shared_answer import SharedAnswer

FRESH_S = 0.4
"""An answer of this age is given again."""
INGRESSES_TIMEOUT_S = 0.8
IN_FLIGHT = "manta_requests_in_flight"


class StatusProbe:
    """Shares one question among all who ask meanwhile, however many pages are open."""

    def __init__(self, models_provider: Callable[[], ServedModels], metrics: ServerMetrics) -> None:
        self._models_provider = models_provider
        self._metrics = metrics
        self._answer = SharedAnswer[dict[str, Any]](FRESH_S)

    async def look(self) -> dict[str, Any]:
        """The status now. Raises what the provider raises if there is no client."""
        models = self._models_provider()
        return await self._answer.get(lambda: self._ask(models))

    async def _ask(self, models: ServedModels) -> dict[str, Any]:
        served, ingresses = await asyncio.gather(
            asyncio.gather(*[_ask_model(client) for client in models]),
            self._ingresses(models.first),
        )
        return {
            "version": __version__,
            "time": time.time(),
            "models": served,
            "ingresses": ingresses,
        }

    async def _ingresses(self, client: EngineClient) -> list[dict[str, Any]]:
        """Each with the requests that it hasn't answered in full; None: it doesn't answer."""
        found: dict[str, float | None] = {}
        try:
            reports, num_silent = await client.ingress_metrics(INGRESSES_TIMEOUT_S)
        except EngineDeadError:  # the engines are shown all the same
            reports, num_silent = {}, 1
        for name, families in reports.items():
            samples = "".join(family[3] for family in families if family[0] == IN_FLIGHT)
            found[name] = sum(float(line.rpartition(" ")[2]) for line in samples.splitlines())
        found[client.ingress] = self._metrics.num_in_flight
        rows = [{"ingress": name, "in_flight": n} for name, n in sorted(found.items())]
        return rows + [{"ingress": "", "in_flight": None}] * num_silent


async def _ask_model(client: EngineClient) -> dict[str, Any]:
    engines = await client.engine_status()
    return {
        "model": client.model_info.name,
        "target_replicas": engines.target,
        "replicas": engines.replicas,
        "tokenizer_wrong": engines.tokenizer_wrong,
    }
