"""`EngineGroup`: one engine's actors; they start together, are watched, and end together."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.actors.actor_process import ActorProcess
from engine.actors.cluster_gpus import gpu_shortage, node_gpus
from engine.actors.rank_order import bundle_order
from engine.actors.role_watch import RoleWatch
from engine.actors.scheduler_actor import RemoteSchedulerActor
from engine.actors.worker_actor import RemoteWorkerActor
from engine.config import EngineConfig, WorkerConfig
from engine.errors import ConfigError, EngineDeadError
from engine.process.log_lines import LogFormat
from engine.process.openmp import wait_policy
from engine.protocol.messages import Shutdown
from engine.protocol.transport import Outbox
from engine.scheduler.stats import SchedulerStats

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 1800.0
"""Enough to read a large checkpoint from a slow disk."""
STOP_TIMEOUT_S = 5.0
PING_TIMEOUT_S = 5.0
MAX_REASON = 2000
"""Characters of an actor's error that the reason of a death holds at most."""


class RoleState(NamedTuple):
    """An actor of the group."""

    role: str
    pid: int
    wrong: str
    """In words; "" if it lives and answers."""


class EngineGroup:
    """SchedulerActor and WorkerActor[pp][tp] of one engine, in one placement group.

    Bundle 0 holds the owner and the scheduler, each other bundle a worker (`rank_order` says
    which). Actors are children of the owner's process and die with it. If an actor dies or hangs,
    the group is dead. It is never repaired; its owner restarts it whole.
    """

    def __init__(
        self,
        config: EngineConfig,
        placement_group: PlacementGroup | None,
        share: int,
        hang_timeout_s: float = 10.0,
        log_format: LogFormat = "text",
    ):
        """`share` is the number of engines that split this machine's cores and memory. An actor
        that doesn't answer for `hang_timeout_s` counts as dead."""
        self.config = config
        self.share = share
        self.hang_timeout_s = hang_timeout_s
        self.log_format = log_format
        self.scheduler_address = ""
        self.worker_config: WorkerConfig | None = None
        self.num_kv_tokens = 0
        """Size of the KV cache in tokens, known once the engine has started."""
        self._pg = placement_group
        self._scheduler: ActorHandle[Any] | None = None
        self._workers: list[ActorHandle[Any]] = []
        self._runs: dict[Any, str] = {}
        """Reference of each actor's `run` -> the actor's name. The reference resolves only when the
        actor ends."""
        self._processes: dict[str, ActorProcess] = {}
        self._role_watch: RoleWatch | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._hang_watcher: asyncio.Task[None] | None = None
        self._death = ""
        self.ended_role = ""
        """The actor whose end is the group's death; "" while it lives, or if one hung instead."""
        self.dead = asyncio.Event()

    @property
    def death(self) -> str:
        """What was lost, or "" while everything lives."""
        return self._death

    @property
    def unwell(self) -> str:
        """What is wrong now, in words; "" if every actor lives and answers."""
        if self._death or self._role_watch is None:
            return self._death or "the engine hasn't started"
        return self._role_watch.unwell

    @property
    def roles(self) -> list[RoleState]:
        """The actors, each with its process and what is wrong with it now."""
        wrong = {} if self._role_watch is None else self._role_watch.wrong_by_role
        wrong = {**wrong, self.ended_role: "ended"}
        return [
            RoleState(name, process.pid, wrong.get(name, ""))
            for name, process in sorted(self._processes.items())
        ]

    async def start(self) -> None:
        """Create the actors, load the model, connect. Raises `EngineDeadError`, which says which
        actor failed and why."""
        bundles = self._worker_bundles()
        self._scheduler = RemoteSchedulerActor.options(scheduling_strategy=self._bundle(0)).remote(
            self.log_format
        )
        for rank, bundle in enumerate(bundles):
            self._workers.append(self._start_worker(rank, bundle))
        self.worker_config, store = await self._workers[0].prepare.remote(self.config, self.share)
        self.scheduler_address, results = await self._scheduler.prepare.remote(
            self.config, self.worker_config.num_kv_tokens
        )
        for rank, worker in enumerate(self._workers):
            ref = worker.run.remote(self.worker_config, store, results)
            self._runs[ref] = f"worker {rank}"
        self._runs[self._scheduler.run.remote()] = "scheduler"
        self._watcher = asyncio.get_running_loop().create_task(self._watch())
        ready = asyncio.ensure_future(_await(self._scheduler.wait_ready.remote(START_TIMEOUT_S)))
        lost = asyncio.ensure_future(self.dead.wait())
        await asyncio.wait({ready, lost}, return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        if self._death:
            ready.cancel()
            raise EngineDeadError(f"the engine can't start: {self._death}")
        num_kv_tokens = ready.result()
        if num_kv_tokens is None:
            raise EngineDeadError(f"the engine isn't ready after {START_TIMEOUT_S:.0f} s")
        self.num_kv_tokens = num_kv_tokens
        for name, actor in self._actors().items():
            self._processes[name] = await actor.process.remote()
        self._role_watch = RoleWatch(self._actors(), self.hang_timeout_s, self._worker_names())
        self._hang_watcher = asyncio.get_running_loop().create_task(self._watch_hangs())

    async def ping(self) -> tuple[float, SchedulerStats]:
        """(seconds since the scheduler's loop turned, statistics). Raises `EngineDeadError`."""
        if self._death or self._scheduler is None:
            raise EngineDeadError(self._death or "the engine hasn't started")
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                reply = await _await(self._scheduler.ping.remote())
        except TimeoutError as error:
            raise EngineDeadError(
                f"the scheduler didn't answer within {PING_TIMEOUT_S:.0f} s"
            ) from error
        idle, stats = reply
        return float(idle), stats

    async def scheduler_pid(self) -> int:
        """Process id of the scheduler. Measurements on its node need it."""
        if "scheduler" not in self._processes:
            raise EngineDeadError("the engine hasn't started")
        return self._processes["scheduler"].pid

    async def trace(self, last: int) -> list[bytes]:
        """The last steps of the scheduler and of every worker: a packed `RoleTrace` of each."""
        if self._death or self._scheduler is None:
            raise EngineDeadError(self._death or "the engine hasn't started")
        tp_size = self.config.tp_size
        refs = [self._scheduler.trace.remote(last)]
        refs += [worker.trace.remote(tp_size, last) for worker in self._workers]
        return list(await asyncio.gather(*(_await(ref) for ref in refs)))

    async def stop(self) -> None:
        """Ask all actors to end, then kill what is left."""
        self._stop_watching()
        if self.scheduler_address and not self._death:
            outbox = Outbox(self.scheduler_address)
            outbox.send(Shutdown())
            outbox.close()
            if self._runs:
                await asyncio.wait(
                    [asyncio.ensure_future(_ended(ref)) for ref in self._runs],
                    timeout=STOP_TIMEOUT_S,
                )
        for actor in self._actors().values():
            ray.kill(actor)

    def kill(self) -> None:
        """End all actors at once, also those that hang."""
        self._stop_watching()
        for name, actor in self._actors().items():
            process = self._processes.get(name)
            if process is None:
                ray.kill(actor)
            else:
                process.kill(actor)

    def _actors(self) -> dict[str, ActorHandle[Any]]:
        """The actors that were started, by name."""
        actors = {f"worker {rank}": worker for rank, worker in enumerate(self._workers)}
        if self._scheduler is not None:
            actors["scheduler"] = self._scheduler
        return actors

    def _worker_names(self) -> frozenset[str]:
        return frozenset(f"worker {rank}" for rank in range(len(self._workers)))

    def _stop_watching(self) -> None:
        for watcher in (self._watcher, self._hang_watcher):
            if watcher is not None:
                watcher.cancel()

    async def _watch_hangs(self) -> None:
        """Note the first actor that hangs as the group's death."""
        assert self._role_watch is not None
        self._on_death(await self._role_watch.run())

    async def _watch(self) -> None:
        """Note the first actor that ends as the group's death."""
        waits = {asyncio.ensure_future(_ended(ref)): name for ref, name in self._runs.items()}
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        first = next(iter(done))
        role, cause = waits[first], first.result() or "it was told to stop"
        self._on_death(f"{role} ended: {cause}", role)

    def _on_death(self, reason: str, ended_role: str = "") -> None:
        if not self._death:
            self._death, self.ended_role = reason, ended_role
            logger.error("engine lost: %s", reason)
            self.dead.set()

    def _worker_bundles(self) -> list[int]:
        """Bundle of each rank. Raises `ConfigError` if Ray would wait for GPUs for ever."""
        config = self.config
        if self._pg is not None:
            return bundle_order(self._pg, config.world_size, config.tp_size)
        if config.device == "cuda":
            shortage = gpu_shortage(config.tp_size, config.pp_size, node_gpus())
            if shortage:
                raise ConfigError(f"{shortage}.")
        return list(range(1, 1 + config.world_size))

    def _start_worker(self, rank: int, bundle: int) -> ActorHandle[Any]:
        # A worker on CUDA owns a GPU; `auto` was decided when the placement group was created.
        gpus = 1 if self.config.device == "cuda" else 0
        threads = str(self.config.cpu_threads or 1)
        actor: ActorHandle[Any] = RemoteWorkerActor.options(
            num_gpus=gpus,
            scheduling_strategy=self._bundle(bundle),
            runtime_env={"env_vars": {**wait_policy(), "OMP_NUM_THREADS": threads}},
        ).remote(rank, self.log_format)
        return actor

    def _bundle(self, index: int) -> PlacementGroupSchedulingStrategy | str:
        if self._pg is None:
            return "DEFAULT"
        return PlacementGroupSchedulingStrategy(self._pg, placement_group_bundle_index=index)


async def _await(ref: Any) -> Any:
    return await ref


async def _ended(ref: Any) -> str:
    """Why an actor's run is over; "" if it returned."""
    try:
        await ref
    except asyncio.CancelledError:
        raise
    except Exception as error:  # every death of an actor arrives here, as some exception
        # The last line of Ray's text is the actor's own error; advice on memory needs its length.
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:MAX_REASON]}"
    return ""
