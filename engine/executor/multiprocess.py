"""Workers of one engine as plain processes: `engine.LLM` with tp_size or pp_size above 1.

The same worker loop and messages as under Ray, without Ray.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import time
from multiprocessing.process import BaseProcess

from engine.config import WorkerConfig
from engine.device.distributed import open_store
from engine.errors import ConfigError, EngineDeadError
from engine.executor.message_executor import MessageExecutor, collect_ready
from engine.process.openmp import set_wait_policy
from engine.process.parent_death import signal_at_parent_death
from engine.protocol.transport import Inbox
from engine.worker.worker_role import log_as_worker, run_worker

STOP_TIMEOUT_S = 10.0


class MultiprocessExecutor(MessageExecutor):
    """Starts one process per rank on this machine and waits until all are ready."""

    def __init__(self, config: WorkerConfig) -> None:
        world_size = config.engine.world_size
        if config.device == "cuda":
            _check_gpus(world_size)
        # Opening the store here avoids a race: a free port could be taken before it is used.
        self._store = open_store("127.0.0.1", 0, master=True)
        store = ("127.0.0.1", self._store.port)
        results = Inbox()
        context = mp.get_context("spawn")
        set_wait_policy()
        self._processes: list[BaseProcess] = []
        for rank in range(world_size):
            process = context.Process(
                target=_worker_main,
                args=(config, rank, store, results.address),
                name=f"manta-worker-{rank}",
                daemon=True,
            )
            process.start()
            self._processes.append(process)
        try:
            workers = collect_ready(results, world_size, self._dead)
        except EngineDeadError:
            self._stop(0.0)  # the others wait for the one that failed
            raise
        super().__init__(results, workers, self._dead)

    def shutdown(self) -> None:
        lost = self._dead()
        super().shutdown()
        self._stop(0.0 if lost else STOP_TIMEOUT_S)
        self.results.close()

    def _dead(self) -> str:
        for rank, process in enumerate(self._processes):
            if not process.is_alive():
                return f"worker {rank} exited with code {process.exitcode}"
        return ""

    def _stop(self, patience_s: float) -> None:
        """Wait for all processes to end, `patience_s` in all, then kill them."""
        deadline = time.monotonic() + patience_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _worker_main(config: WorkerConfig, rank: int, store: tuple[str, int], results: str) -> None:
    signal_at_parent_death(signal.SIGKILL)  # it may be killed, and can't stop this one then
    if config.device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = _visible_device(rank)
    log_as_worker(rank)
    try:
        run_worker(config, rank, store, results, "127.0.0.1")
    except ConfigError:
        sys.exit(1)  # the parent has been told


def _check_gpus(world_size: int) -> None:
    import torch

    count = torch.cuda.device_count()
    if count < world_size:
        raise ConfigError(
            f"tp_size * pp_size = {world_size} workers need a GPU each, but torch sees {count} "
            "here; lower them, or show it more (CUDA_VISIBLE_DEVICES)."
        )


def _visible_device(rank: int) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[rank] if visible else str(rank)
