"""`EngineReplica`: Serve deployment that owns one engine (one data parallel rank).

One unary call per request stays open until the request ends, so that Serve's queue lengths,
draining and autoscaling see the request. Tokens never pass through here.
"""

# No `from __future__ import annotations`: Ray Serve inspects the annotations.
import asyncio
import logging
import os
import time
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import RayError
from ray.util import get_current_placement_group

from deploy.options import ServerOptions
from deploy.replica.autoscaling import autoscaling_stats
from deploy.replica.ingress_links import IngressLinks
from deploy.replica.open_calls import OpenCalls
from deploy.replica.scheduler_calls import SchedulerCalls
from deploy.serve_state import serve_log
from deploy.serve_state.drain_watch import DrainWatch
from engine.actors.actor_process import ActorProcess
from engine.actors.engine_group import EngineGroup
from engine.actors.ray_types import node_ip
from engine.config import EngineConfig
from engine.errors import EngineDeadError, EngineDrainingError
from engine.protocol import encoding
from engine.protocol.adapters import AdapterPrepared, AdapterRef
from engine.protocol.async_inbox import AsyncInbox
from engine.protocol.messages import (
    AbortRequest,
    AddRequest,
    CacheFlushed,
    Ping,
    Pong,
    ReaderGone,
    RequestsDone,
    RequestTaken,
    StepOutputs,
    SubscribeKVEvents,
    UnsubscribeKVEvents,
)
from engine.protocol.transport import Outbox

logger = logging.getLogger(__name__)

INGRESS_LOOK_S = 0.4
QUEUE_FULL = 429
"""Status of requests that the scheduler refuses because too many wait."""
REPORT_TIMEOUT_S = 0.4
"""A report goes without statistics that take longer."""
EXIT_DELAY_S = 0.5
"""Time for the failures of open calls to leave before the process ends."""


class EngineReplica:
    """Starts the engine, forwards requests to its scheduler, ends their calls when they end."""

    def __init__(
        self,
        engine: EngineConfig,
        share: int,
        server: ServerOptions,
    ) -> None:
        """`share`: as in `EngineGroup`."""
        serve_log.set_up(server.log_level, server.log_format)
        self._server = server
        placement = get_current_placement_group()
        self._group = EngineGroup(
            engine, placement, share, server.hang_timeout_s, server.log_format
        )
        self._open = OpenCalls()
        self._ingresses = IngressLinks()
        self._drain = DrainWatch()
        self._is_leaving = False
        self._inbox: AsyncInbox | None = None
        self._scheduler: Outbox | None = None
        self._starting: asyncio.Task[None] | None = None
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the engine; concurrent callers wait for the same start."""
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        await self._group.start()
        self._inbox = AsyncInbox(node_ip(), self._on_message)
        self._scheduler = Outbox(self._group.scheduler_address)
        self._calls = SchedulerCalls(self._scheduler, self._inbox.address)
        self._pong = _introduction(self._inbox.address)
        loop = asyncio.get_running_loop()
        watches = (
            self._end_when_dead(),
            self._drop_dead_ingresses(),
            self._hand_over(),
            self._leave_abandoned_calls(),
        )
        self._watchers = [loop.create_task(watch) for watch in watches]

    async def generate(self, request: bytes, ingress: str, actor: str = "") -> None:
        """Hand a request (an encoded `AddRequest`) to the scheduler; returns when it ended.

        `actor` is the choice that `ChosenReplicaRouter` obeys on the way here.

        The request's tokens go straight to `AddRequest.reply_to`. `ingress` is told by message that
        the request was taken, and may abort it by message. Cancelling the call aborts it too.
        Raises `EngineDeadError` if the engine is lost meanwhile, `EngineDrainingError` if the
        request can't be finished here.
        """
        await self.start()
        if self._is_leaving:
            raise EngineDrainingError("the engine is being stopped")
        if self._group.death or self._scheduler is None or self._inbox is None:
            raise EngineDeadError(f"the engine is down: {self._group.death}")
        message = encoding.decode([request], AddRequest)
        message.owner = self._inbox.address
        self._scheduler.send(message)
        try:
            self._heard(ingress)
            done = self._open.open(message.reply_to, message.rid, ingress)
            self._ingresses.send(ingress, RequestTaken(message.rid, self._inbox.address))
            await done
        except EngineDeadError:
            raise  # no scheduler is left to tell
        except BaseException:  # cancelled, given back, or the ingress can't be reached
            self._scheduler.send(AbortRequest(rid=message.rid, reply_to=message.reply_to))
            raise
        finally:
            self._open.close(message.reply_to, message.rid)

    async def introduce(self, ingress: str) -> None:
        """Tell an ingress by message who this replica is, so that the ingress can watch it."""
        await self.start()
        self._heard(ingress)
        self._ingresses.send(ingress, self._pong)

    async def health(self) -> tuple[str, str]:
        """The replica's name, and what is wrong with its engine now ("" if nothing is)."""
        await self.start()
        return _replica_name(), self._group.unwell

    async def stats(self) -> dict[str, Any]:
        """Latest scheduler statistics, with the replica's name and the loop's age in seconds."""
        await self.start()
        age, stats = await self._group.ping()
        return {"replica": _replica_name(), "loop_age_s": age, **msgspec.structs.asdict(stats)}

    async def report(self) -> dict[str, Any]:
        """What `/status` shows of the replica: its roles, what is wrong, and statistics (None if
        the scheduler doesn't give them at once)."""
        await self.start()
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                stats = msgspec.structs.asdict((await self._group.ping())[1])
                del stats["expert_tokens_total"]  # thousands of numbers, which are metrics
        except (TimeoutError, EngineDeadError, RayError):
            stats = None
        return {
            "replica": _replica_name(),
            "pid": os.getpid(),
            "node": node_ip(),
            "wrong": self._group.unwell,
            "has_ended": bool(self._group.ended_role),
            "roles": [state._asdict() for state in self._group.roles],
            "stats": stats,
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The figures that Serve, which calls this, hands to `EngineLoadPolicy`."""
        await self.start()
        return autoscaling_stats((await self._group.ping())[1])

    async def trace(self, last: int) -> tuple[str, list[bytes]]:
        """The replica's name, and what its roles did in their last steps (packed)."""
        await self.start()
        return _replica_name(), await self._group.trace(last)

    async def flush_cache(self) -> tuple[str, str]:
        """Empty the prefix cache. Returns the replica's name, and what kept it from that ("" if
        nothing did)."""
        await self.start()
        return _replica_name(), await self._calls.flush_cache()

    async def load_adapter(self, adapter: bytes) -> tuple[str, str]:
        """Have the workers read an `AdapterRef`. Returns the replica's name, and why they can't (""
        if they have it)."""
        await self.start()
        ref = encoding.decode([adapter], AdapterRef)
        return _replica_name(), await self._calls.prepare_adapter(ref)

    async def check_generate(self, timeout_s: float) -> tuple[str, str]:
        """Generate a token. Returns the replica's name, and what is wrong if none came in time ("":
        one came, or the engine went on with other requests, or its queue is full)."""
        await self.start()
        _, before = await self._group.ping()
        try:
            async with asyncio.timeout(timeout_s):
                end = await self._calls.generate_token()
            wrong = end.message if end.status != QUEUE_FULL else ""
        except TimeoutError:
            _, after = await self._group.ping()
            went_on = after.steps_total > before.steps_total
            wrong = "" if went_on else f"no token within {timeout_s:g} s"
        return _replica_name(), wrong

    async def describe(self) -> dict[str, Any]:
        """The engine's configuration, what the workers decided of it, and the replica's name."""
        await self.start()
        config = self._group.worker_config
        assert config is not None
        return {
            **config.in_effect().model_dump(),
            "replica": _replica_name(),
            "num_kv_tokens": self._group.num_kv_tokens,
        }

    async def check_health(self) -> None:
        """Serve's health check. It also makes a replica wait for its engine before it is ready.

        The check passes until the group counts as dead, even if a role doesn't answer: the role may
        come back, and Serve would replace the replica.
        """
        self._drain.asked()
        await self.start()
        if self._group.death:
            raise EngineDeadError(self._group.death)

    async def __del__(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await self._group.stop()
        self._ingresses.close()
        if self._inbox is not None:
            self._inbox.close()
        if self._scheduler is not None:
            self._scheduler.close()

    def _on_message(self, message: Any) -> None:
        match message:
            case RequestsDone():
                self._open.end(message.rids)
            case CacheFlushed() | AdapterPrepared() | StepOutputs():
                self._calls.answered(message)
            case Ping():
                self._heard(message.reply_to)
                self._ingresses.send(message.reply_to, self._pong)
            case AbortRequest() | ReaderGone():
                # An ingress sent this. The scheduler answers with `RequestsDone`.
                self._tell_scheduler(message)
            case SubscribeKVEvents():
                assert self._inbox is not None
                message.replica = self._inbox.address
                self._tell_scheduler(message)

    def _heard(self, ingress: str) -> None:
        self._ingresses.heard(ingress, time.monotonic())
        self._open.recall(ingress, EngineDrainingError("the ingress was silent"))

    def _tell_scheduler(self, message: Any) -> None:
        assert self._scheduler is not None
        self._scheduler.send(message)

    async def _end_when_dead(self) -> None:
        """Once the group is lost: fail the open calls, kill the actors that are left, and end this
        process. Serve then replaces it at once instead of after three failed health checks."""
        await self._group.dead.wait()
        lost = self._open.fail(EngineDeadError(f"the engine was lost: {self._group.death}"))
        logger.warning("%d requests were lost with the engine", lost)
        self._group.kill()
        await asyncio.sleep(EXIT_DELAY_S)
        logging.shutdown()
        os._exit(1)

    async def _drop_dead_ingresses(self) -> None:
        """Abort the requests of ingresses that are gone."""
        while True:
            await asyncio.sleep(INGRESS_LOOK_S)
            for ingress in self._ingresses.drop_silent(
                time.monotonic(), self._server.hang_timeout_s
            ):
                lost = self._open.abandon(ingress)
                for reply_to, rid in lost:
                    self._tell_scheduler(AbortRequest(rid=rid, reply_to=reply_to))
                logger.warning("an ingress is gone; its %d requests are dropped", len(lost))
                self._tell_scheduler(UnsubscribeKVEvents(ingress))

    async def _hand_over(self) -> None:
        """When this replica is stopped: give back requests that haven't ended in time; they are
        resumed elsewhere."""
        await self._drain.wait(self._server.drain_timeout_s)
        self._is_leaving = True
        logger.warning("draining took too long; giving %d requests back", len(self._open))
        self._open.fail(EngineDrainingError("the engine is being stopped"))

    async def _leave_abandoned_calls(self) -> None:
        """When this replica is stopped: end the process once nobody waits for a request. Serve
        would wait for the calls of ingresses that are gone, until its own timeout."""
        await self._drain.wait(0.0)
        while len(self._open) or not self._open.num_abandoned:
            await asyncio.sleep(INGRESS_LOOK_S)
        await self._group.stop()
        logging.shutdown()
        os._exit(0)


def _introduction(inbox: str) -> Pong:
    context = ray.get_runtime_context()
    process = ActorProcess.of_this_actor()
    return Pong(inbox, str(context.get_actor_name()), str(context.namespace), *process)


def _replica_name() -> str:
    return serve.get_replica_context().replica_id.unique_id
