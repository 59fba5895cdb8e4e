"""`EngineReplica`: Serve deployment that owns one engine (one data parallel rank).

One unary call per request stays open until the request ends, so that Serve's queue lengths,
draining and autoscaling see it; tokens never pass through here.
"""

# No `from __future__ import annotations`: Ray Serve inspects the annotations.
import asyncio
import logging
from typing import Any

from ray import serve
from ray.util import get_current_placement_group

from deploy.async_inbox import AsyncInbox
from engine import messages
from engine.actors.engine_group import EngineGroup
from engine.actors.ray_types import node_ip
from engine.config import EngineConfig
from engine.errors import EngineDeadError
from engine.messages import AbortRequest, AddRequest, RequestsDone
from engine.scheduler.stats import SchedulerStats
from engine.trace import RoleTrace
from engine.transport import Outbox

logger = logging.getLogger(__name__)


class EngineReplica:
    """Starts the engine, forwards requests to its scheduler, tells when they end."""

    def __init__(self, engine: dict[str, Any], share: int, log_level: str) -> None:
        logging.getLogger("engine").setLevel(log_level)
        self._config = EngineConfig(**engine)
        self._group = EngineGroup(self._config, get_current_placement_group(), share)
        self._open: dict[tuple[str, int], asyncio.Future[None]] = {}
        self._inbox: AsyncInbox | None = None
        self._scheduler: Outbox | None = None
        self._starting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bring the engine up; concurrent callers wait for the same start."""
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        await self._group.start()
        self._inbox = AsyncInbox(node_ip(), self._on_message)
        self._scheduler = Outbox(self._group.scheduler_address)
        asyncio.get_running_loop().create_task(self._fail_open_when_dead())

    async def generate(self, request: bytes) -> None:
        """Hand a request (an encoded `AddRequest`) to the scheduler; returns when it ended.

        Its tokens go straight to `AddRequest.client`. Cancelling the call aborts the request.
        Raises `EngineDeadError` when the engine is lost meanwhile.
        """
        await self.start()
        if self._group.death or self._scheduler is None or self._inbox is None:
            raise EngineDeadError(f"the engine is down: {self._group.death}")
        message = messages.decode([request], AddRequest)
        message.owner = self._inbox.address
        key = (message.client, message.rid)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open[key] = done
        try:
            self._scheduler.send(message)
            await done
        except asyncio.CancelledError:
            self._scheduler.send(AbortRequest(rid=message.rid, client=message.client))
            raise
        finally:
            self._open.pop(key, None)

    async def stats(self) -> dict[str, Any]:
        """Latest scheduler statistics, with the replica's name and the loop's age in seconds."""
        await self.start()
        age, stats = await self._group.ping()
        name = serve.get_replica_context().replica_id.unique_id
        return {"replica": name, "loop_age_s": age, **_numbers(stats)}

    async def trace(self, last: int) -> tuple[str, list[RoleTrace]]:
        """The replica's name, and what its roles did in their last steps."""
        await self.start()
        name = serve.get_replica_context().replica_id.unique_id
        return name, await self._group.trace(last)

    async def describe(self) -> dict[str, Any]:
        """What the workers settled on: dtype, device, threads, KV tokens."""
        await self.start()
        config = self._group.worker_config
        assert config is not None
        return {
            "device": config.device,
            "dtype": config.dtype,
            "cpu_threads": config.cpu_threads,
            "num_kv_tokens": config.num_kv_tokens,
            "max_model_len": config.max_model_len,
        }

    async def check_health(self) -> None:
        """Called by Serve; also what makes a replica wait for its engine before it is ready."""
        await self.start()
        if self._group.death:
            raise EngineDeadError(self._group.death)
        await self._group.ping()

    async def __del__(self) -> None:
        await self._group.stop()
        if self._inbox is not None:
            self._inbox.close()
        if self._scheduler is not None:
            self._scheduler.close()

    def _on_message(self, message: Any) -> None:
        if isinstance(message, RequestsDone):
            for key in message.rids:
                done = self._open.get(key)
                if done is not None and not done.done():
                    done.set_result(None)

    async def _fail_open_when_dead(self) -> None:
        await self._group.dead.wait()
        for done in self._open.values():
            if not done.done():
                done.set_exception(EngineDeadError(f"the engine was lost: {self._group.death}"))


def _numbers(stats: SchedulerStats) -> dict[str, float]:
    return {name: float(getattr(stats, name)) for name in stats.__struct_fields__}
