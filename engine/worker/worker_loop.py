"""A worker process: join the group, load the shard, then run steps as they come."""

from __future__ import annotations

import contextlib
import logging
import traceback

import numpy as np

from engine.errors import EngineDeadError
from engine.messages import GenerationBatchResult, ModelWorkerBatch, Shutdown, WorkerReady
from engine.transport import Inbox, Outbox
from engine.worker.worker_config import WorkerConfig

logger = logging.getLogger(__name__)

INIT_TIMEOUT_S = 300.0


def run_worker(
    config: WorkerConfig, rank: int, store: tuple[str, int], results_address: str, host: str
) -> None:
    """Body of worker `rank` until it is told to shut down.

    `store`: host and port of the engine's TCPStore; results and failures go to
    `results_address`. Raises whatever made the worker fail, after reporting it.
    """
    inbox = Inbox(host)
    results = Outbox(results_address)
    try:
        _run(config, rank, store, inbox, results)
    finally:
        inbox.close()
        results.close()


def _run(
    config: WorkerConfig, rank: int, store: tuple[str, int], inbox: Inbox, results: Outbox
) -> None:
    # torch comes in here, so that a parent can import this module cheaply.
    from engine.distributed import init_parallel, open_store
    from engine.worker.tp_worker import TpModelWorker

    try:
        parallel = init_parallel(
            config.comm_backend,
            "",
            rank,
            config.tp_size,
            config.pp_size,
            INIT_TIMEOUT_S,
            open_store(*store, master=False) if config.world_size > 1 else None,
        )
        worker = TpModelWorker(config, parallel)
    except Exception as error:
        results.send(WorkerReady(rank, inbox.address, f"{type(error).__name__}: {error}"))
        raise
    results.send(WorkerReady(rank, inbox.address))
    speaks = parallel.is_last_stage and parallel.tp_rank == 0
    while True:
        message = inbox.recv(None)
        if isinstance(message, Shutdown):
            break
        if not isinstance(message, ModelWorkerBatch):
            raise TypeError(f"a worker can't take a {type(message).__name__}")
        try:
            pending = worker.forward_batch_generation(message)
            if pending is not None and speaks:
                results.send(pending.collect())
        except Exception as error:
            logger.error("step %d failed on worker %d:\n%s", message.step, rank, _trace())
            with contextlib.suppress(EngineDeadError):  # the failure itself is raised below
                results.send(
                    GenerationBatchResult(
                        step=message.step,
                        next_token_ids=np.zeros(0, np.int32),
                        error=f"worker {rank}: {type(error).__name__}: {error}",
                    )
                )
            raise
    parallel.destroy()


def _trace() -> str:
    return traceback.format_exc()
