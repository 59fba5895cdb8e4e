"""A worker process: join the group, load the shard, then run steps as they come."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import logging
import threading
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from engine.config import WorkerConfig
from engine.errors import EngineDeadError
from engine.process.log_lines import LogFormat, formatter_of
from engine.protocol.adapters import DropAdapter, LoadAdapter
from engine.protocol.messages import Shutdown, WorkerReady
from engine.protocol.step import GenerationBatchResult, ModelWorkerBatch, SampleMasks
from engine.protocol.transport import Inbox, Outbox
from engine.trace import StageSpan, TraceRing
from engine.worker.base import ModelWorker, apply_order
from engine.worker.expert_report import ExpertReport
from engine.worker.step_beat import StepBeat
from engine.worker.step_queue import StepQueue

if TYPE_CHECKING:
    from engine.device.distributed import ParallelState

logger = logging.getLogger(__name__)

INIT_TIMEOUT_S = 1800.0
"""Timeout of joining the group and of every later call: one rank may take much longer than another
to load its weights. The process that started the ranks notices a dead rank, not this timeout."""
LOADING_POLL_S = 0.005
"""Longest sleep while an adapter is being read."""
SPIN_S = 200e-6
"""A sleeping thread wakes up late by about this, so the last part of a wait is spent polling."""


def run_worker(
    config: WorkerConfig,
    rank: int,
    store: tuple[str, int],
    results_address: str,
    host: str,
    trace: TraceRing[StageSpan] | None = None,
    beat: StepBeat | None = None,
) -> None:
    """Body of worker `rank` until it is told to shut down.

    `store` is host and port of the engine's TCPStore. Results and failures go to `results_address`.
    After it has reported a failure, it raises the failure's error. `beat` shows other threads
    whether steps progress.
    """
    inbox = Inbox(host)
    results = Outbox(results_address)
    parallel: ParallelState | None = None
    try:
        with _telling_of_failures(rank, inbox, results):
            parallel = _join(config, rank, store, host)
            worker = _load(config, parallel, trace or TraceRing())
        results.send(WorkerReady(rank, inbox.address, worker.num_kv_tokens))
        # torch leaves a large heap. Collecting it later would stop the device for tens of ms.
        gc.collect()
        gc.freeze()
        steps = StepQueue(worker)
        beat = beat or StepBeat()
        beat.follow(worker.device_progress)
        speaks = parallel.is_last_stage and parallel.tp_rank == 0
        report: ExpertReport | None = None
        if config.engine.enable_expert_metrics and parallel.tp_rank == 0:
            report = ExpertReport(worker, results.send)
        while _turn(steps, beat, inbox, results if speaks else None, rank, results, report):
            pass
        # NCCL waits for graphs that hold calls of a group that is destroyed.
        worker.drop_graphs()
        parallel.destroy()
    except BaseException:
        if parallel is not None:
            parallel.abandon()
        raise
    finally:
        inbox.close()
        results.close()


def preload() -> None:
    """Import what `run_worker` needs, in the background: torch takes seconds."""
    name = "engine.worker.factory"
    threading.Thread(target=importlib.import_module, args=(name,), daemon=True).start()


def log_as_worker(rank: int, log_format: LogFormat = "text") -> None:
    """Set up logging of a worker's own process: warnings to stderr, and rank 0's start messages."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter_of(log_format))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("engine").setLevel(logging.INFO if rank == 0 else logging.WARNING)


@contextlib.contextmanager
def _telling_of_failures(rank: int, inbox: Inbox, results: Outbox) -> Iterator[None]:
    """Report why the worker can't start, and raise it."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        results.send(WorkerReady(rank, inbox.address, error=reason))
        raise


# torch is imported in these two, so that a parent can import this module at little cost.


def _join(config: WorkerConfig, rank: int, store: tuple[str, int], host: str) -> ParallelState:
    from engine.device.distributed import init_parallel, let_gloo_use, open_store

    if config.device == "cuda":
        import torch

        # The process that started this one made one GPU visible to it.
        torch.cuda.set_device(0)
    if config.engine.world_size > 1:
        let_gloo_use(host)
    parallel = init_parallel(
        config.comm_backend,
        "",
        rank,
        config.engine.tp_size,
        config.engine.pp_size,
        INIT_TIMEOUT_S,
        open_store(*store, master=False) if config.engine.world_size > 1 else None,
    )
    return dataclasses.replace(parallel, ep_size=config.engine.ep_size)


def _load(
    config: WorkerConfig, parallel: ParallelState, trace: TraceRing[StageSpan]
) -> ModelWorker:
    from engine.worker.factory import make_worker

    here = dataclasses.replace(config, resolved=config.resolved.here())
    return make_worker(here, parallel, trace)


def _turn(
    steps: StepQueue,
    beat: StepBeat,
    inbox: Inbox,
    out: Outbox | None,
    rank: int,
    failures: Outbox,
    report: ExpertReport | None,
) -> bool:
    """Send the results that are ready, then take one message; False after `Shutdown`."""
    message: Any = None
    step = 0
    try:
        for result in steps.take_ready():
            step = result.step
            if out is not None:
                out.send(result)
            beat.progressed()
        left_s = steps.seconds_left()
        beat.rest(waits_for_device=left_s is not None)
        report_s = None if report is None else report.send_due()
        for loaded in steps.worker.take_loaded():
            failures.send(loaded)
        loading_s = LOADING_POLL_S if steps.worker.is_loading else None
        message = _receive(inbox, _sooner(_sooner(left_s, report_s), loading_s))
        if message is not None:
            beat.progressed()
            beat.work()
        match message:
            case None:
                pass
            case ModelWorkerBatch():
                step = message.step
                steps.launch(message)
                if report is not None:
                    report.stepped()
            case SampleMasks():
                step = message.step
                steps.apply(message)
            case LoadAdapter() | DropAdapter():
                apply_order(steps.worker, message)
            case Shutdown():
                return False
            case _:
                raise TypeError(f"a worker can't take a {type(message).__name__}")
    except Exception as error:
        logger.error("step %d failed on worker %d:\n%s", step, rank, traceback.format_exc())
        with contextlib.suppress(EngineDeadError):  # the failure itself is raised below
            failures.send(
                GenerationBatchResult(
                    step=step,
                    next_token_ids=[],
                    error=f"worker {rank}: {type(error).__name__}: {error}",
                )
            )
        raise
    return True


def _sooner(a: float | None, b: float | None) -> float | None:
    return min((seconds for seconds in (a, b) if seconds is not None), default=None)


def _receive(inbox: Inbox, seconds: float | None) -> Any | None:
    """The next message, or None after at most `seconds`. If they are below 1 ms, it looks once and
    then sleeps all but `SPIN_S` of them."""
    if seconds is None or seconds >= 1e-3:
        return inbox.recv(seconds)  # polling knows whole milliseconds only
    message = inbox.recv(0.0)
    if message is None and seconds > SPIN_S:
        time.sleep(seconds - SPIN_S)
    return message
