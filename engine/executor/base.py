"""`Executor`: how a scheduler's steps reach workers.

In the same process (`in_process`, `worker_thread`) or by message (`message_executor`). Every
executor runs steps in the order launched and gives the results of a micro-batch in that order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from engine.protocol.adapters import AdapterLoaded, DropAdapter, LoadAdapter
from engine.protocol.step import GenerationBatchResult, ModelWorkerBatch, SampleMasks


class Executor(ABC):
    """Runs steps on all workers of one engine."""

    num_kv_tokens: int
    """Size of the KV cache in tokens, which the workers decided."""

    @abstractmethod
    def launch(self, batch: ModelWorkerBatch) -> None:
        """Start a step without waiting for earlier ones. Raises `EngineDeadError`."""

    @abstractmethod
    def sample(self, masks: SampleMasks) -> None:
        """Complete a step whose sampling waits for its masks. Raises `EngineDeadError`."""

    @abstractmethod
    def wait(self, timeout_s: float | None) -> GenerationBatchResult | None:
        """Result of the oldest step; None if it isn't there in time (None = wait for ever) or, if
        there is a time, an adapter came first.

        Raises `EngineDeadError` if a worker is lost or a step failed.
        """

    def order(self, message: LoadAdapter | DropAdapter) -> None:
        """Let all workers read or forget an adapter. Raises `EngineDeadError`."""
        raise TypeError(f"{type(self).__name__} takes no adapters")

    def take_loaded(self) -> list[AdapterLoaded]:
        """Adapters that all workers have, or one of them can't have, since the last call."""
        return []

    def expert_tokens(self) -> dict[int, list[int]]:
        """By decoder layer: how many tokens each expert got, as far as is known here; {} if that
        isn't counted."""
        return {}

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers. No method may be called afterwards."""
