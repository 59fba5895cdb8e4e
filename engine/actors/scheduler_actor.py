"""`SchedulerActor`: the scheduler of one engine. A shell around `engine.scheduler_role`."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import ray

from engine.actors.actor_process import ActorProcess
from engine.actors.ray_types import actor_class, node_ip
from engine.config import EngineConfig
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.scheduler.stats import SchedulerStats
from engine.scheduler_role import IDLE_POLL_MS, SchedulerRole
from engine.trace import RoleTrace, scheduler_trace


class SchedulerActor:
    """`run` occupies one thread for the engine's life; the others answer control calls."""

    def __init__(self) -> None:
        self._role: SchedulerRole | None = None
        self._ready = threading.Event()

    @ray.method(concurrency_group="control")
    def prepare(self, config: dict[str, Any], num_kv_tokens: int) -> tuple[str, str]:
        """Build the scheduler; addresses of its request inbox and its result inbox."""
        engine = EngineConfig(**config)
        scheduler = SchedulerConfig.from_config(engine.resolve(), num_kv_tokens)
        self._role = SchedulerRole(scheduler, node_ip(), engine.world_size)
        return self._role.inbox.address, self._role.results.address

    @ray.method(concurrency_group="loop")
    def run(self) -> None:
        """The loop; returns after `Shutdown`, raises when a worker is lost."""
        role = self._get_role()
        # Everything alive now lives as long as the process: keep it out of collections.
        gc.collect()
        gc.freeze()
        role.run(dead=lambda: "", on_ready=self._ready.set)

    @ray.method(concurrency_group="control")
    def wait_ready(self, timeout_s: float) -> bool:
        """Whether all workers are ready, within `timeout_s`."""
        return self._ready.wait(timeout_s)

    @ray.method(concurrency_group="control")
    def ping(self) -> tuple[float, SchedulerStats]:
        """(seconds since the loop last turned, latest statistics)."""
        role = self._get_role()
        return time.monotonic() - role.last_turn, role.stats

    @ray.method(concurrency_group="control")
    def pulse(self) -> float:
        """Seconds that the loop stands still: its longest rest is not counted."""
        return max(0.0, time.monotonic() - self._get_role().last_turn - IDLE_POLL_MS / 1000)

    @ray.method(concurrency_group="control")
    def process(self) -> ActorProcess:
        """Where this actor runs."""
        return ActorProcess.of_this_actor()

    @ray.method(concurrency_group="control")
    def pid(self) -> int:
        """This actor's process id."""
        return os.getpid()

    @ray.method(concurrency_group="control")
    def trace(self, last: int) -> RoleTrace:
        """What the loop did with the last steps."""
        return scheduler_trace(self._get_role().trace, last)

    def _get_role(self) -> SchedulerRole:
        if self._role is None:
            raise RuntimeError("prepare comes first")
        return self._role


RemoteSchedulerActor = actor_class(SchedulerActor, concurrency_groups={"loop": 1, "control": 2})
