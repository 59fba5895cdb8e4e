"""`Scrape`: the metrics of all ingresses and engines, gathered for one answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

from deploy.http.engine_client import EngineClient, PlainFamily
from deploy.http.metrics.engine_stats import EngineStats
from deploy.http.metrics.exposition import Family, exposition, joined, label_text, scalar
from deploy.http.metrics.vllm_names import engine_families
from deploy.http.served_models import ServedModels
from engine.process.shared_answer import SharedAnswer

logger = logging.getLogger(__name__)

FRESH_S = 0.5
"""What others said is used again for this time."""
TIMEOUT_S = 2.0
UNKNOWN = "unknown"
"""Name of ingresses that don't answer and never did."""


class Others(NamedTuple):
    """What the other processes said."""

    engines: list[EngineStats]
    """By model."""
    ingresses: dict[str, list[PlainFamily]]
    """By name, maybe with the ingress that asked."""
    silent: list[str]
    """Names of ingresses that didn't answer in time."""


class Scrape:
    """Asks the others at most twice a second, however many scrapes there are. What the own ingress
    measures is always as of now. Use from one event loop."""

    def __init__(self) -> None:
        self._answer = SharedAnswer[Others](FRESH_S)
        self._known: set[str] = set()
        """Ingresses that have answered, until all that Serve knows have answered without them."""

    async def text(self, models: ServedModels, own: list[PlainFamily], *, with_vllm: bool) -> bytes:
        """The whole answer. `own`: what the ingress of this process measured."""
        others = await self._answer.get(lambda: self._ask(models))
        labels = [label_text({"model_name": client.model_info.name}) for client in models]
        here, server = models.first.ingress, labels[0] if len(models) == 1 else ""
        families: list[Family | PlainFamily] = [*own]
        for name, report in others.ingresses.items():
            if name != here:
                families += report
        up = dict.fromkeys(others.silent, 0.0) | dict.fromkeys(others.ingresses, 1.0)
        up[here] = 1.0
        families.append(
            scalar(
                "manta_ingress_up",
                "gauge",
                "1 if the ingress answered this scrape, so that its metrics are in it.",
                [
                    (joined(label_text({"ingress": name}), server), value)
                    for name, value in sorted(up.items())
                ],
            )
        )
        for stats, model in zip(others.engines, labels, strict=True):
            families += stats.families(model)
            if with_vllm:
                families += engine_families(stats, model)
        return exposition(families)

    async def _ask(self, models: ServedModels) -> Others:
        engines, (ingresses, silent) = await asyncio.gather(
            asyncio.gather(*[_engine_stats(client) for client in models]),
            self._ingresses(models.first),
        )
        return Others([EngineStats(stats) for stats in engines], ingresses, silent)

    async def _ingresses(
        self, client: EngineClient
    ) -> tuple[dict[str, list[PlainFamily]], list[str]]:
        """The answers by name, and who didn't answer."""
        try:
            reports, num_silent = await client.ingress_metrics(TIMEOUT_S)
        except Exception as exception:  # no error here may hide the metrics of this process
            logger.warning("no metrics of other ingresses: %s", type(exception).__name__)
            reports, num_silent = {}, 1
        missing = self._known - reports.keys() if num_silent else set()
        self._known = missing | reports.keys()
        silent = sorted(missing)
        if num_silent > len(silent):
            silent.append(UNKNOWN)
        return reports, silent


async def _engine_stats(client: EngineClient) -> Sequence[dict[str, float]] | None:
    """None if the engines don't answer in time: the scrape goes on without them."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await client.stats()
    except Exception as exception:  # no error here may hide the other metrics
        logger.warning("no engine statistics: %s", type(exception).__name__)
        return None
