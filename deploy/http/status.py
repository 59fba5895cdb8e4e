"""`StatusProbe`: what the page `/status` shows, as `GET /debug/status` answers it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from deploy.http.engine_client import EngineClient
from deploy.http.metrics import ServerMetrics
from deploy.http.records.runner import RecordRunner
from deploy.http.records.store import RecordStore
from deploy.http.served_models import ServedModels
from engine import __version__
from engine.errors import EngineDeadError, RequestError
from engine.process.shared_answer import SharedAnswer

FRESH_S = 0.4
"""An answer of this age is given again."""
INGRESSES_TIMEOUT_S = 0.8
STORE_TIMEOUT_S = 0.5
IN_FLIGHT = "manta_requests_in_flight"


class StatusProbe:
    """Shares one question among all who ask meanwhile, however many pages are open."""

    def __init__(
        self,
        models_provider: Callable[[], ServedModels],
        metrics: ServerMetrics,
        store: RecordStore | None,
        runner: RecordRunner | None,
    ) -> None:
        """`store`, `runner`: of kept requests; None if there are none."""
        self._models_provider = models_provider
        self._metrics = metrics
        self._store, self._runner = store, runner
        self._answer = SharedAnswer[dict[str, Any]](FRESH_S)

    async def look(self) -> dict[str, Any]:
        """The status now. Raises what the provider raises if there is no client."""
        models = self._models_provider()
        return await self._answer.get(lambda: self._ask(models))

    async def _ask(self, models: ServedModels) -> dict[str, Any]:
        served, ingresses, kept = await asyncio.gather(
            asyncio.gather(*[_ask_model(client) for client in models]),
            self._ingresses(models.first),
            self._kept(),
        )
        return {
            "version": __version__,
            "time": time.time(),
            "models": served,
            "ingresses": ingresses,
            "request_store": kept,
        }

    async def _kept(self) -> dict[str, Any]:
        """The store, and what of it is under way. The counts of a store that doesn't answer are
        None."""
        store, runner = self._store, self._runner
        if store is None or runner is None:
            return {"kind": "none"}
        made = waiting = None
        if not store.is_away:
            try:
                async with asyncio.timeout(STORE_TIMEOUT_S):
                    made, waiting = await store.num_leased()
            except (RequestError, TimeoutError):  # the store has said why, or is slow
                made = waiting = None
        return {
            "kind": store.kind,
            "is_away": store.is_away,
            "open_here": len(runner.token_log),
            "left_here": runner.num_left,
            "made": made,
            "waiting": waiting,
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
