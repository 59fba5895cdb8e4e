"""`EngineWatch`: the engine replicas as one ingress knows them."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from deploy.ingress.listener import IngressListener
from engine.actors.actor_process import ActorProcess
from engine.process.pulse import Pulse
from engine.protocol.messages import Ping, Pong, ReaderGone
from engine.protocol.outboxes import Outboxes

logger = logging.getLogger(__name__)

PING_PERIOD_S = 0.4
INTRODUCE_TIMEOUT_S = 5.0
INTRODUCE_PERIOD_S = 1.0
INTRODUCE_PER_REPLICA_S = 0.1
"""Serve's present replicas are asked to make themselves known again after `INTRODUCE_PERIOD_S`
plus `INTRODUCE_PER_REPLICA_S` for each known replica. So the rate of these calls is bounded."""
CONFIRM_S = 1.0
"""A silent replica is asked through Ray whether it lives, this long before its time is up."""
QUIET_S = 1.2
"""A replica that has been silent for this time gets no new requests if there are others."""


@dataclass
class _Replica:
    pulse: Pulse
    pong: Pong | None = None
    suspected: bool = False


class EngineWatch:
    """Pings replicas and ends those that hang. A ping also tells that this ingress lives.

    Replicas make themselves known when they take a request, and when asked through Serve. Serve's
    health checks alone need three timeouts to see that a replica hangs, and then still give it
    the time to drain.
    """

    def __init__(
        self,
        engines: Any,
        address: str,
        hang_timeout_s: float,
        listener: IngressListener,
    ) -> None:
        """`engines` is Serve's handle, `address` this ingress' inbox."""
        self.quiet: set[str] = set()
        """Inboxes of replicas that have been silent for `QUIET_S`."""
        self._listener = listener
        self._engines = engines
        self._address = address
        self._suspicious_s = hang_timeout_s - CONFIRM_S
        self._replicas: dict[str, _Replica] = {}
        self._outboxes = Outboxes()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def actors(self) -> dict[str, bool]:
        """Serve's names of the replicas' actors, and whether each was heard lately."""
        return {
            replica.pong.actor: address not in self.quiet
            for address, replica in self._replicas.items()
            if replica.pong is not None
        }

    def start(self) -> None:
        for watch in (self._ping_all(), self._ask_for_introductions()):
            self._spawn(watch)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._outboxes.close()
        self._replicas.clear()

    def heard(self, address: str, pong: Pong | None = None) -> None:
        """Note that the replica with this inbox lives."""
        replica = self._replicas.get(address)
        if replica is None:
            replica = self._replicas[address] = _Replica(Pulse(time.monotonic()))
            self.send(address, Ping(self._address))
        replica.pulse.beat()
        self.quiet.discard(address)
        if pong is not None:
            replica.pong = pong
            self._listener.replica_alive(pong)

    def send(self, address: str, message: Any) -> bool:
        """Send to a replica. False if it isn't known any more or has 10,000 unread messages. In
        the second case its silence will be noticed."""
        return address in self._replicas and self._outboxes.send(address, message)

    def reader_gone(self, reply_to: str) -> None:
        """Tell all replicas that nobody reads the tokens sent to this address any more."""
        for address in self._replicas:
            self.send(address, ReaderGone(reply_to))

    async def _ping_all(self) -> None:
        while True:
            await asyncio.sleep(PING_PERIOD_S)
            now = time.monotonic()
            for address, replica in self._replicas.items():
                self.send(address, Ping(self._address))
                silent_s = replica.pulse.tick(now)
                if silent_s >= QUIET_S:
                    self.quiet.add(address)
                if silent_s >= self._suspicious_s and not replica.suspected:
                    replica.suspected = True
                    self._spawn(self._judge(address, replica))

    async def _judge(self, address: str, replica: _Replica) -> None:
        """Ask Ray about a silent replica. Forget and end the replica unless it answers."""
        pong = replica.pong
        if pong is not None and await _answers_ray(pong):
            logger.warning("replica %s answers Ray, but not by message", pong.actor)
            replica.pulse.beat()
        if replica.pulse.silent_s >= self._suspicious_s:
            del self._replicas[address]
            self._outboxes.drop(address)
            self.quiet.discard(address)
            self._listener.replica_lost(address)
            if pong is not None:
                await asyncio.to_thread(_kill, pong)
        replica.suspected = False

    async def _ask_for_introductions(self) -> None:
        while True:
            try:
                asked = self._engines.broadcast("introduce", self._address)
                await asked.results_async(timeout_s=INTRODUCE_TIMEOUT_S, return_exceptions=True)
            except (RayServeException, RayError, TimeoutError) as error:
                # There is no replica, or one doesn't answer. Those that live have answered.
                logger.debug("not all replicas introduced themselves: %s", type(error).__name__)
            known = len(self._replicas)
            await asyncio.sleep(INTRODUCE_PERIOD_S + known * INTRODUCE_PER_REPLICA_S)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _answers_ray(pong: Pong) -> bool:
    """Whether the replica's actor lives and answers a call within `CONFIRM_S`."""
    try:
        actor = await asyncio.to_thread(ray.get_actor, pong.actor, pong.namespace)
        ready = asyncio.wrap_future(actor.__ray_ready__.remote().future())
        async with asyncio.timeout(CONFIRM_S):
            await ready
    except (ValueError, RayError, TimeoutError):  # unknown; dead; hangs
        return False
    return True


def _kill(pong: Pong) -> None:
    """End the replica's actor if it still exists."""
    try:
        actor = ray.get_actor(pong.actor, pong.namespace)
    except ValueError:
        return
    logger.error("replica %s hangs; killing it", pong.actor)
    ActorProcess(pong.node_id, pong.pid, pong.started).kill(actor)
