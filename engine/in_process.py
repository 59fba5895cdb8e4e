"""`InProcessExecutor`: the worker in the scheduler's own process, for `engine.LLM`."""

from __future__ import annotations

from collections import deque

from engine.distributed import ParallelState
from engine.executor import Executor
from engine.messages import GenerationBatchResult, ModelWorkerBatch
from engine.worker.tp_worker import PendingResult, TpModelWorker
from engine.worker.worker_config import WorkerConfig


class InProcessExecutor(Executor):
    """One worker in this process (tp_size = pp_size = 1)."""

    def __init__(self, config: WorkerConfig) -> None:
        self.worker = TpModelWorker(config, ParallelState.single())
        self._pending: deque[PendingResult] = deque()

    def launch(self, batch: ModelWorkerBatch) -> None:
        pending = self.worker.forward_batch_generation(batch)
        assert pending is not None, "one stage is the last stage"
        self._pending.append(pending)

    def wait(self, timeout_s: float | None) -> GenerationBatchResult | None:
        return self._pending.popleft().collect() if self._pending else None

    def shutdown(self) -> None:
        self._pending.clear()
