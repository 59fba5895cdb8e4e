"""Which `Executor` runs an engine without Ray."""

from __future__ import annotations

from engine.config import WorkerConfig
from engine.executor.base import Executor
from engine.executor.in_process import InProcessExecutor
from engine.executor.worker_thread import ThreadExecutor


def make_executor(config: WorkerConfig) -> Executor:
    """An executor with its workers, ready.

    One worker runs in this process: in a thread of its own if the host computes, else in the
    caller's, because to launch a step on a device takes no time. Several are processes.
    """
    if config.engine.world_size == 1:
        return ThreadExecutor(config) if config.device == "cpu" else InProcessExecutor(config)
    from engine.executor.multiprocess import MultiprocessExecutor

    return MultiprocessExecutor(config)
