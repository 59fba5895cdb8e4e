"""What a worker goes by: the configuration, and what was decided of it on the worker's machine."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig, ResolvedConfig
from engine.model_config import ModelConfig


@dataclass(frozen=True)
class WorkerConfig:
    """The same for all ranks of an engine. Sizes in tokens, requests and threads. No field of it is
    `auto`; those keys of `engine` that have a field here are not read from there."""

    resolved: ResolvedConfig
    dtype: str
    device: str
    num_kv_tokens: int | None
    """KV tokens, stated or estimated (CPU). None: measured once the weights are loaded (CUDA)."""
    max_kv_tokens: int
    """KV tokens of all requests at full length, in whole pages; more can never be used."""
    max_step_tokens: int
    """Tokens of the largest step that the scheduler may send."""
    attention_backend: str
    sampling_backend: str
    cpu_threads: int
    cuda_graph_max_batch_size: int = 0
    """Largest decode batch that is captured; 0: none is."""
    short_step_s: float = 0.0
    """Steps on CPU that are estimated to take less run on one thread (`StepThreads`)."""

    @property
    def engine(self) -> EngineConfig:
        """The configuration's keys."""
        return self.resolved.engine

    @property
    def model(self) -> ModelConfig:
        """The model's shape."""
        return self.resolved.model

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output, in tokens."""
        return self.resolved.max_model_len

    @property
    def comm_backend(self) -> str:
        """torch.distributed's backend for this device."""
        return "nccl" if self.device == "cuda" else "gloo"
