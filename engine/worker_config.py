"""What a worker needs of the configuration, with every `auto` decided."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import SimulatedDevice
from engine.model_config import ModelConfig
from engine.speculative.config import SpeculativeConfig


@dataclass(frozen=True)
class WorkerConfig:
    """The same for all ranks of an engine. Sizes in tokens, requests and threads."""

    model: ModelConfig
    dtype: str
    device: str
    page_size: int
    num_kv_tokens: int | None
    """KV tokens, stated or estimated (CPU). None: measured once the weights are loaded (CUDA)."""
    max_kv_tokens: int
    """KV tokens of all requests at full length, in whole pages; more can never be used."""
    memory_fraction: float
    max_running_requests: int
    max_model_len: int
    max_step_tokens: int
    """Tokens of the largest step that the scheduler may send."""
    kv_cache_dtype: str
    attention_backend: str
    sampling_backend: str
    load_format: str
    seed: int
    tp_size: int
    pp_size: int
    cpu_threads: int
    simulated: SimulatedDevice
    cuda_graph_max_batch_size: int = 0
    """Largest decode batch that is captured; 0: none is."""
    quantization: str = "auto"
    speculative: SpeculativeConfig | None = None
    short_step_s: float = 0.0
    """Steps on CPU that are estimated to take less run on one thread (`StepThreads`)."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the engine."""
        return self.tp_size * self.pp_size

    @property
    def comm_backend(self) -> str:
        """torch.distributed's backend for this device."""
        return "nccl" if self.device == "cuda" else "gloo"
