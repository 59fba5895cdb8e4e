"""Which `ModelWorker` a config asks for."""

from __future__ import annotations

import torch

from engine.distributed import ParallelState
from engine.trace import StageSpan, TraceRing
from engine.worker.base import ModelWorker
from engine.worker.device_memory import CudaMemory
from engine.worker.kv_sizing import MemoryMeter
from engine.worker.simulated import SimulatedWorker
from engine.worker.tp_worker import TpModelWorker
from engine.worker.worker_config import WorkerConfig


def make_worker(
    config: WorkerConfig, parallel: ParallelState, trace: TraceRing[StageSpan]
) -> ModelWorker:
    """The worker that `config.device` asks for, loaded. `trace` gets a span per step."""
    if config.device == "simulated":
        return SimulatedWorker(config, parallel, trace)
    meter = None
    if config.device == "cuda":
        meter = MemoryMeter(CudaMemory(torch.device("cuda", torch.cuda.current_device())))
    return TpModelWorker(config, parallel, trace, meter)
