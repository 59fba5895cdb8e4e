"""`InProcessExecutor`: the worker in the scheduler's own thread, for `engine.LLM` on a device."""

from __future__ import annotations

from engine.config import WorkerConfig
from engine.device.distributed import ParallelState
from engine.executor.base import Executor
from engine.protocol.adapters import AdapterLoaded, DropAdapter, LoadAdapter
from engine.protocol.step import GenerationBatchResult, ModelWorkerBatch, SampleMasks
from engine.trace import StageSpan, TraceRing
from engine.worker.base import apply_order
from engine.worker.factory import make_worker
from engine.worker.step_queue import StepQueue


class InProcessExecutor(Executor):
    """One worker in this thread (tp_size = pp_size = 1). A device runs what is launched here."""

    def __init__(self, config: WorkerConfig) -> None:
        self.trace: TraceRing[StageSpan] = TraceRing()
        self.worker = make_worker(config, ParallelState.single(), self.trace)
        self.num_kv_tokens = self.worker.num_kv_tokens
        self._steps = StepQueue(self.worker)

    def launch(self, batch: ModelWorkerBatch) -> None:
        self._steps.launch(batch)

    def sample(self, masks: SampleMasks) -> None:
        self._steps.apply(masks)

    def order(self, message: LoadAdapter | DropAdapter) -> None:
        apply_order(self.worker, message)

    def take_loaded(self) -> list[AdapterLoaded]:
        return self.worker.take_loaded()

    def wait(self, timeout_s: float | None) -> GenerationBatchResult | None:
        return self._steps.take_oldest()

    def expert_tokens(self) -> dict[int, list[int]]:
        return self.worker.expert_tokens()

    def shutdown(self) -> None:
        self._steps = StepQueue(self.worker)
