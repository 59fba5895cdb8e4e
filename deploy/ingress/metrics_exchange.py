"""`MetricsExchange`: how one ingress learns what the others measured.

All are asked through Serve, and answer by message. So the answers of those that live are there even
if one of them hangs. And they are large: Ray 2.60 would put them into its object store, and a
process that is slow to fetch one that is gone by then dies of it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from deploy.http.engine_client import IngressReports, PlainFamily
from engine.errors import EngineDeadError
from engine.protocol.messages import IngressMetrics
from engine.protocol.outboxes import Outboxes

FORGET_AFTER_S = 600.0
"""The connection to an ingress that hasn't asked for this time is closed."""


class MetricsExchange:
    """Of one ingress. Use from its event loop."""

    def __init__(self, ingresses: Any, address: str) -> None:
        """`ingresses` is Serve's handle, `address` this ingress' inbox."""
        self._ingresses = ingresses
        self._address = address
        self._outboxes = Outboxes()
        self._asked_at: dict[str, float] = {}
        """By inbox of another ingress: when it asked last."""
        self._numbers = itertools.count()
        self._gatherings: dict[int, _Gathering] = {}

    async def gather(self, timeout_s: float) -> IngressReports:
        """What the other ingresses measured. Raises `EngineDeadError` if Serve can't ask them."""
        number, gathering = next(self._numbers), _Gathering()
        self._gatherings[number] = gathering
        try:
            async with asyncio.timeout(timeout_s):
                asked = self._ingresses.broadcast("metrics", self._address, number)
                answers = await asked.results_async(timeout_s=timeout_s, return_exceptions=True)
                await gathering.wait_for({name for name in answers if isinstance(name, str)})
            num_silent = sum(not isinstance(answer, str) for answer in answers)
        except TimeoutError:
            num_silent = 1  # at least
        except (RayServeException, RayError) as error:
            raise EngineDeadError(f"can't ask the ingresses: {type(error).__name__}") from error
        finally:
            del self._gatherings[number]
        return IngressReports(gathering.families, num_silent)

    def answer(self, asker: str, number: int, name: str, families: list[PlainFamily]) -> None:
        """Send what this ingress, `name`, measured to the inbox `asker`."""
        now = time.monotonic()
        self._asked_at[asker] = now
        for address, at in list(self._asked_at.items()):
            if now - at > FORGET_AFTER_S:
                del self._asked_at[address]
                self._outboxes.drop(address)
        self._outboxes.send(asker, IngressMetrics(name, number, families))

    def take(self, message: IngressMetrics) -> None:
        """An answer has come; one that is late is dropped."""
        gathering = self._gatherings.get(message.number)
        if gathering is not None:
            gathering.add(message.ingress, message.families)

    def close(self) -> None:
        """Close the connections."""
        self._outboxes.close()


class _Gathering:
    """Answers to one question, by ingress."""

    def __init__(self) -> None:
        self.families: dict[str, list[PlainFamily]] = {}
        self._changed = asyncio.Event()

    def add(self, ingress: str, families: list[PlainFamily]) -> None:
        self.families[ingress] = families
        self._changed.set()

    async def wait_for(self, ingresses: set[str]) -> None:
        """Return when all of these have answered."""
        while ingresses - self.families.keys():
            self._changed.clear()
            await self._changed.wait()
