"""`RoleWatch`: pings actors that should live, and tells which of them are silent."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

from engine.process.pulse import Pulse

logger = logging.getLogger(__name__)

PING_PERIOD_S = 0.3
LOOK_PERIOD_S = 0.2
UNWELL_S = 1.0
"""Seconds that a role may leave a ping unanswered before the engine counts as unwell."""

_STILL = "has made no progress for"


class RoleWatch:
    """Calls each actor's `pulse` method again and again.

    In the actor, a thread of its own answers. A long step doesn't delay the answer; a stopped or
    hanging process does. `pulse` returns for how many seconds the actor's loop has stood still, as
    far as the actor can tell; None if it has nothing to do.
    """

    def __init__(
        self,
        roles: dict[str, ActorHandle[Any]],
        hang_timeout_s: float,
        workers: frozenset[str] = frozenset(),
    ) -> None:
        """`workers` are roles that compute steps together and wait for each other: one that
        stands still hangs only if all do that have a step."""
        self._roles = roles
        self._hang_timeout_s = hang_timeout_s
        self._workers = workers
        self._open: dict[str, Pulse] = {}
        """Pings on their way, by role."""
        self._stuck: dict[str, float | None] = dict.fromkeys(roles, None)

    @property
    def unwell(self) -> str:
        """Roles that don't answer or go on now, in words; "" if all do."""
        return "; ".join(f"{name} {wrong}" for name, wrong in self._wrong().items())

    @property
    def wrong_by_role(self) -> dict[str, str]:
        """What is wrong with each role now, in words; "" if nothing is."""
        wrong = self._wrong()
        return {name: wrong.get(name, "") for name in self._roles}

    async def run(self) -> str:
        """Watch until a role is silent or stands still for `hang_timeout_s`; returns which one.
        Cancel to stop."""
        pings = [asyncio.ensure_future(self._ping(*role)) for role in self._roles.items()]
        try:
            while True:
                await asyncio.sleep(LOOK_PERIOD_S)
                now = time.monotonic()
                for pulse in self._open.values():
                    pulse.tick(now)
                for name in self._roles:
                    if self._silent_s(name) >= self._hang_timeout_s:
                        return f"{name} hangs: no answer for {self._silent_s(name):.0f} s"
                    if self._still_s(name) >= self._hang_timeout_s:
                        return f"{name} hangs: its step {_STILL} {self._still_s(name):.0f} s"
        finally:
            for ping in pings:
                ping.cancel()

    def _wrong(self) -> dict[str, str]:
        """What is wrong, in words, by role that is unwell."""
        wrong = {}
        for name in self._roles:
            if (silent_s := self._silent_s(name)) >= UNWELL_S:
                wrong[name] = f"hasn't answered for {silent_s:.1f} s"
            elif (still_s := self._still_s(name)) >= UNWELL_S:
                wrong[name] = f"hangs in a step, which {_STILL} {still_s:.1f} s"
        return wrong

    def _silent_s(self, name: str) -> float:
        """Seconds that a role hasn't answered, or that the loop of one that isn't a worker has
        stood still."""
        pulse = self._open.get(name)
        stuck_s = 0.0 if name in self._workers else self._stuck[name] or 0.0
        return max(0.0 if pulse is None else pulse.silent_s, stuck_s)

    def _still_s(self, name: str) -> float:
        """Seconds that a worker's step and those of all others have stood still."""
        stuck = [s for worker in self._workers if (s := self._stuck[worker]) is not None]
        own_s = self._stuck[name] if name in self._workers else None
        return 0.0 if own_s is None else min(stuck)

    async def _ping(self, name: str, actor: ActorHandle[Any]) -> None:
        while True:
            self._open[name] = Pulse(time.monotonic())
            try:
                self._stuck[name] = await actor.pulse.remote()
            except RayError as error:
                # The actor is dead. `EngineGroup`, which holds the reference of `run`, learns that.
                logger.debug("no more pings to %s: %s", name, type(error).__name__)
                return
            finally:
                del self._open[name]
            await asyncio.sleep(PING_PERIOD_S)
