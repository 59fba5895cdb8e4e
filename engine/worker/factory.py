"""Which `ModelWorker` a config asks for."""

from __future__ import annotations

import torch

from engine.config import WorkerConfig
from engine.device.distributed import ParallelState
from engine.device.memory import CudaMemory
from engine.memory_need import GRAPH_RESERVE_BYTES
from engine.trace import StageSpan, TraceRing
from engine.worker.base import ModelWorker
from engine.worker.simulated import SimulatedWorker
from engine.worker.sizing.kv_sizing import MemoryMeter
from engine.worker.tp_worker import TpModelWorker


def make_worker(
    config: WorkerConfig, parallel: ParallelState, trace: TraceRing[StageSpan]
) -> ModelWorker:
    """The worker that `config.device` asks for, loaded. `trace` gets a span per step."""
    if config.device == "simulated":
        return SimulatedWorker(config, parallel, trace)
    meter = None
    if config.device == "cuda":
        memory = CudaMemory(torch.device("cuda", torch.cuda.current_device()))
        graph_bytes = GRAPH_RESERVE_BYTES if config.cuda_graph_max_batch_size else 0
        meter = MemoryMeter(memory, graph_bytes)
    return TpModelWorker(config, parallel, trace, meter)
