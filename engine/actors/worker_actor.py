"""`WorkerActor`: one rank of an engine. A shell around `engine.worker.worker_role`."""

from __future__ import annotations

from typing import Any

import ray

from engine.actors.actor_process import ActorProcess
from engine.actors.ray_types import actor_class, node_ip
from engine.config import EngineConfig, WorkerConfig
from engine.process.log_lines import LogFormat
from engine.trace import StageSpan, TraceRing, pack, stage_trace
from engine.worker.step_beat import StepBeat
from engine.worker.worker_role import log_as_worker, preload, run_worker


class WorkerActor:
    """Loads its shard and runs steps until its engine ends; never restarted alone."""

    def __init__(self, rank: int, log_format: LogFormat = "text") -> None:
        self.rank = rank
        self._log_format = log_format
        self._store: Any = None
        self._trace: TraceRing[StageSpan] = TraceRing()
        self._beat = StepBeat()
        preload()

    @ray.method(concurrency_group="control")
    def prepare(self, config: EngineConfig, share: int) -> tuple[WorkerConfig, tuple[str, int]]:
        """Called on rank 0: decide every `auto` here, where the device is, and open the group's
        store on this node. Returns the config for all ranks, and host and port of the store.
        """
        # Imported here: it loads torch, and other processes import this class.
        from engine.worker.auto_config import make_worker_config

        log_as_worker(self.rank, self._log_format)  # the choices made here may warn
        worker = make_worker_config(config.resolve(), share=share, serving=True)
        host = node_ip()
        if worker.engine.world_size == 1:
            return worker, (host, 0)
        from engine.device.distributed import open_store

        # Opening the store here avoids a race: a free port could be taken before it is used.
        self._store = open_store(host, 0, master=True)
        return worker, (host, self._store.port)

    @ray.method(concurrency_group="loop")
    def run(self, config: WorkerConfig, store: tuple[str, int], results_address: str) -> None:
        """Run this rank's steps; returns after `Shutdown`."""
        log_as_worker(self.rank, self._log_format)
        host = node_ip()
        run_worker(config, self.rank, store, results_address, host, self._trace, self._beat)

    @ray.method(concurrency_group="control")
    def pulse(self) -> float | None:
        """Seconds that the steps held here have stood still; None if there are none."""
        return self._beat.standstill_s()

    @ray.method(concurrency_group="control")
    def process(self) -> ActorProcess:
        """Where this actor runs."""
        return ActorProcess.of_this_actor()

    @ray.method(concurrency_group="control")
    def trace(self, tp_size: int, last: int) -> bytes:
        """What this rank did in its last steps: a packed `RoleTrace`."""
        pp_rank, tp_rank = divmod(self.rank, tp_size)
        return pack(stage_trace(pp_rank, tp_rank, self._trace, last))


RemoteWorkerActor = actor_class(WorkerActor, concurrency_groups={"loop": 1, "control": 1})
