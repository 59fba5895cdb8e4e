"""`StatusProbe`: what the page `/status` shows, as `GET /debug/status` answers it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from deploy.http.engine_client import EngineClient
from deploy.http.metrics import ServerMetrics
from engine import __version__
from engine.errors import EngineDeadError
from engine.process.shared_answer import SharedAnswer

FRESH_S = 0.4
"""An answer of this age is given again."""
INGRESSES_TIMEOUT_S = 0.8
IN_FLIGHT = "manta_requests_in_flight"


class StatusProbe:
    """Shares one question among all who ask meanwhile, however many pages are open."""

    def __init__(self, client_provider: Callable[[], EngineClient], metrics: ServerMetrics) -> None:
        self._client_provider = client_provider
        self._metrics = metrics
        self._answer = SharedAnswer[dict[str, Any]](FRESH_S)

    async def look(self) -> dict[str, Any]:
        """The status now. Raises what the provider raises if there is no client."""
        client = self._client_provider()
        return await self._answer.get(lambda: self._ask(client))

    async def _ask(self, client: EngineClient) -> dict[str, Any]:
        engines, ingresses = await asyncio.gather(client.engine_status(), self._ingresses(client))
        return {
            "model": client.model_info.name,
            "version": __version__,
            "time": time.time(),
            "target_replicas": engines.target,
            "replicas": engines.replicas,
            "ingresses": ingresses,
            "tokenizer_wrong": engines.tokenizer_wrong,
        }

    async def _ingresses(self, client: EngineClient) -> list[dict[str, Any]]:
        """Each with the requests that it hasn't answered in full; None: it doesn't answer."""
        own = sum(s.value for metric in self._metrics.in_flight.collect() for s in metric.samples)
        found: dict[str, float | None] = {}
        try:
            reports, num_silent = await client.ingress_metrics(INGRESSES_TIMEOUT_S)
        except EngineDeadError:  # the engines are shown all the same
            reports, num_silent = {}, 1
        for name, families in reports.items():
            samples = "".join(family[3] for family in families if family[0] == IN_FLIGHT)
            found[name] = sum(float(line.rpartition(" ")[2]) for line in samples.splitlines())
        found[client.ingress] = own
        rows = [{"ingress": name, "in_flight": n} for name, n in sorted(found.items())]
        return rows + [{"ingress": "", "in_flight": None}] * num_silent
