"""`RoleWatch`: pings actors that should live, and tells which of them are silent."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

from engine.pulse import Pulse

logger = logging.getLogger(__name__)

PING_PERIOD_S = 0.3
LOOK_PERIOD_S = 0.2
UNWELL_S = 1.0
"""Seconds that a role may leave a ping unanswered before the engine counts as unwell."""


class RoleWatch:
    """Calls each actor's `pulse` method again and again.

    In the actor, a thread of its own answers. A long step doesn't delay the answer; a stopped or
    hanging process does. `pulse` returns for how many seconds the actor's loop has stood still, as
    far as the actor can tell.
    """

    def __init__(self, roles: dict[str, ActorHandle[Any]], hang_timeout_s: float) -> None:
        self._roles = roles
        self._hang_timeout_s = hang_timeout_s
        self._open: dict[str, Pulse] = {}
        """Pings on their way, by role."""
        self._stuck: dict[str, float] = dict.fromkeys(roles, 0.0)

    @property
    def unwell(self) -> str:
        """Roles that don't answer now, in words; "" if all do."""
        silent = [f"{name} hasn't answered for {s:.1f} s" for name, s in self._silences().items()]
        return "; ".join(silent)

    @property
    def wrong_by_role(self) -> dict[str, str]:
        """What is wrong with each role now, in words; "" if nothing is."""
        silent = self._silences()
        return {
            name: f"hasn't answered for {silent[name]:.1f} s" if name in silent else ""
            for name in self._roles
        }

    async def run(self) -> str:
        """Watch until a role is silent for `hang_timeout_s`; returns which one. Cancel to stop."""
        pings = [asyncio.ensure_future(self._ping(*role)) for role in self._roles.items()]
        try:
            while True:
                await asyncio.sleep(LOOK_PERIOD_S)
                now = time.monotonic()
                for pulse in self._open.values():
                    pulse.tick(now)
                for name, silent_s in self._silences().items():
                    if silent_s >= self._hang_timeout_s:
                        return f"{name} hangs: no answer for {silent_s:.0f} s"
        finally:
            for ping in pings:
                ping.cancel()

    def _silences(self) -> dict[str, float]:
        """Seconds of silence by role, for the roles that are unwell."""
        silent = {}
        for name in self._roles:
            pulse = self._open.get(name)
            silent_s = max(0.0 if pulse is None else pulse.silent_s, self._stuck[name])
            if silent_s >= UNWELL_S:
                silent[name] = silent_s
        return silent

    async def _ping(self, name: str, actor: ActorHandle[Any]) -> None:
        while True:
            self._open[name] = Pulse(time.monotonic())
            try:
                self._stuck[name] = float(await actor.pulse.remote())
            except RayError as error:
                # The actor is dead. `EngineGroup`, which holds the reference of `run`, learns that.
                logger.debug("no more pings to %s: %s", name, type(error).__name__)
                return
            finally:
                del self._open[name]
            await asyncio.sleep(PING_PERIOD_S)
