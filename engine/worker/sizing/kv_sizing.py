"""Size of the KV cache on a device whose memory can be measured.

The weights are loaded first. Then the largest steps run, on a KV cache that has only its padding
page, and their peak is measured. The rest of the device's share is for tokens (vLLM's profile run).
All ranks take the smallest rank's number.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from engine.config import WorkerConfig
from engine.device.distributed import ParallelState
from engine.device.memory import DeviceMemory
from engine.errors import ConfigError
from engine.memory_need import GRAPH_RESERVE_BYTES, HEADROOM_BYTES, CacheSize, gpu_weights_shortage
from engine.worker.base import ModelWorker
from engine.worker.sizing.memory_profile import MemoryProfile, gib
from engine.worker.sizing.out_of_memory import WEIGHTS, holders, remedies
from engine.worker.sizing.profile_steps import largest_steps

logger = logging.getLogger(__name__)


@dataclass
class MemoryMeter:
    """Notes what is taken at each stage of a worker's start."""

    memory: DeviceMemory
    graph_bytes: int = GRAPH_RESERVE_BYTES
    headroom_bytes: int = HEADROOM_BYTES
    elsewhere: int = 0
    weights: int = 0

    def __post_init__(self) -> None:
        """Note the memory at the start. Must run before anything is allocated."""
        self.elsewhere = self.memory.elsewhere()

    def loaded(self) -> None:
        """Note that the weights are there and nothing else."""
        self.memory.release()
        self.weights = self.memory.allocated()

    def profile(self, worker: ModelWorker, config: WorkerConfig, cache: CacheSize) -> MemoryProfile:
        """Run the largest steps on `worker`, whose KV cache is still empty.

        Collective over the engine's ranks.
        """
        self.memory.release()
        standing = self.memory.allocated()
        self.memory.reset_peak()
        for batch in largest_steps(config):
            launched = worker.forward(batch)
            if launched is not None:
                launched.sample(None).collect()
        peak = self.memory.peak()
        # Memory that the steps still hold stays: it is in buffers that grew and live on.
        self.memory.release()
        return MemoryProfile(
            total=self.memory.total(),
            fraction=config.engine.memory_fraction,
            elsewhere=self.elsewhere,
            weights=self.weights,
            buffers=standing - self.weights,
            activations=peak - standing,
            libraries=max(0, self.memory.elsewhere() - self.elsewhere),
            graphs=self.graph_bytes,
            headroom=self.headroom_bytes,
            cache=cache,
        )


def check_weights_fit(needed: int, config: WorkerConfig, memory: DeviceMemory) -> None:
    """Raise `ConfigError` before minutes of loading if `needed` bytes of weights can't fit."""
    told = gpu_weights_shortage(
        needed,
        memory.total(),
        memory.free(),
        config.engine.memory_fraction,
        remedies(WEIGHTS, config),
    )
    if told:
        raise ConfigError(f"{told}{holders(memory)}")


def agree_on_kv_tokens(
    profile: MemoryProfile, config: WorkerConfig, parallel: ParallelState, device: torch.device
) -> int:
    """KV tokens of every rank: the stated number, or what the smallest rank has room for.

    Collective. Raises `ConfigError` if there is less room than was stated, or than one request of
    `max_model_len` needs.
    """
    room = parallel.min_over_ranks(profile.kv_tokens, device)
    room = room // config.engine.page_size * config.engine.page_size
    wanted = config.num_kv_tokens
    if wanted is not None and wanted > room:
        raise ConfigError(
            f"max_total_tokens ({wanted}) needs {gib(profile.cache.num_bytes(wanted))} on each "
            f"GPU, but there is room for {room} tokens. Lower it or leave it out, or raise "
            f"memory_fraction (now {config.engine.memory_fraction:g}), tp_size or pp_size. "
            f"{profile.describe(room)}."
        )
    if wanted is None and room < config.max_model_len:
        raise ConfigError(
            f"the KV cache has room for {room} tokens, which can't hold one request of "
            f"max_model_len ({config.max_model_len}). Lower max_model_len or "
            f"chunked_prefill_size (the largest step has {config.max_step_tokens} tokens), or "
            f"raise memory_fraction (now {config.engine.memory_fraction:g}), tp_size or pp_size. "
            f"{profile.describe(room)}."
        )
    tokens = wanted if wanted is not None else min(room, config.max_kv_tokens)
    if parallel.rank == 0:
        logger.info("%s", profile.describe(tokens))
    return tokens
