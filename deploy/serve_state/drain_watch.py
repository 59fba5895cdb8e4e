"""`DrainWatch`: how a replica learns that Serve is stopping it.

Serve doesn't tell its replicas. It stops sending requests, waits until the open ones have ended
and kills the process when that takes too long. But it also stops asking for the replica's health.
A replica notices this at no cost, and then the controller says for certain.
"""

from __future__ import annotations

import asyncio
import logging
import time

from ray import serve

from deploy.serve_state.replica_states import deployment_states

logger = logging.getLogger(__name__)

HEALTH_PERIOD_S = 1.0
"""How often Serve is told to ask for a replica's health."""
SILENCE_S = 3.0
"""A replica whose health wasn't asked for in this time finds out why."""
HANDOVER_S = 8.0
"""Time that a replica has beyond `drain_timeout_s` to notice, and to give its requests back."""


class DrainWatch:
    """The watch of one replica; use from one loop. Call `asked` at each health check."""

    def __init__(self) -> None:
        self._asked = time.monotonic()

    def asked(self) -> None:
        """Note that Serve asked for this replica's health, so it isn't stopping the replica."""
        self._asked = time.monotonic()

    async def wait(self, drain_timeout_s: float) -> None:
        """Return once Serve has been stopping this replica for `drain_timeout_s` (or a few
        seconds, if that is longer)."""
        while not await self._is_stopping():
            await asyncio.sleep(HEALTH_PERIOD_S)
        await asyncio.sleep(self._asked + drain_timeout_s - time.monotonic())

    async def _is_stopping(self) -> bool:
        if time.monotonic() - self._asked < SILENCE_S:
            return False
        try:
            return await asyncio.to_thread(listed_as_stopping)
        except Exception as error:  # an error of the controller is no reason to stop
            logger.warning("can't ask Serve for this replica's state: %s", type(error).__name__)
            return False


def listed_as_stopping() -> bool:
    """Whether this replica is one that the controller stops, or has stopped."""
    context = serve.get_replica_context()
    deployment = deployment_states(context.deployment).get(context.deployment)
    if deployment is None:
        return True
    return deployment.states.get(context.replica_id.unique_id, "STOPPING") == "STOPPING"
