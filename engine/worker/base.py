"""Interface between a step queue and what runs its steps: a model shard or a simulated device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from engine.protocol.adapters import AdapterLoaded, AdapterRef, DropAdapter, LoadAdapter
from engine.protocol.step import GenerationBatchResult, ModelWorkerBatch, SampleMasks


class DeviceProgress(NamedTuple):
    """How far a device is with the work that was launched on it."""

    done: float
    """Grows while the device works; its unit is the device's own."""
    is_busy: bool
    """Whether the device is known to have work left."""


class PendingResult(ABC):
    """A step whose work is launched on the device."""

    @abstractmethod
    def seconds_left(self) -> float:
        """Seconds until it is worth asking again; 0.0 once `collect` won't block."""

    @abstractmethod
    def collect(self) -> GenerationBatchResult:
        """Copy the result to the host. Blocks until the device is done with the step."""


@dataclass
class LaunchedForward(ABC):
    """The last stage's forward of a step, launched and not yet sampled."""

    batch: ModelWorkerBatch

    @abstractmethod
    def sample(self, masks: SampleMasks | None) -> PendingResult:
        """Launch the sampling. `masks` are those of a delayed sample, else None."""


class ModelWorker(ABC):
    """One rank. Steps must be launched in the order in which the scheduler made them."""

    num_kv_tokens: int
    """Size of the KV cache, the same on every rank of the engine."""

    @abstractmethod
    def forward(self, batch: ModelWorkerBatch) -> LaunchedForward | None:
        """Launch the forward of one step; None on stages other than the last.

        A decode whose input is -1 takes the token that its row sampled last.
        """

    def drop_graphs(self) -> None:  # noqa: B027 (most workers have none)
        """Free captured steps. No step may follow."""

    def expert_tokens(self) -> dict[int, list[int]]:
        """By decoder layer: how many tokens each of its experts got, if that is counted. It may
        wait for the device."""
        return {}

    def load_adapter(self, adapter: AdapterRef) -> None:
        """Begin to read an adapter into the host's memory; `take_loaded` says when it is there."""
        raise TypeError(f"{type(self).__name__} takes no adapters")

    def take_loaded(self) -> list[AdapterLoaded]:
        """Of the adapters that were read since the last call."""
        return []

    @property
    def is_loading(self) -> bool:
        """Whether adapters are being read."""
        return False

    def drop_adapter(self, digest: str) -> None:  # noqa: B027 (most workers have none)
        """Forget an adapter that no step will use."""

    def device_progress(self) -> DeviceProgress:
        """Any thread may ask. A device whose work is done when the call returns has none of its
        own."""
        return DeviceProgress(0.0, is_busy=False)


def apply_order(worker: ModelWorker, message: LoadAdapter | DropAdapter) -> None:
    """Let a worker do what the scheduler says of an adapter."""
    if isinstance(message, LoadAdapter):
        worker.load_adapter(message.adapter)
    else:
        worker.drop_adapter(message.digest)
