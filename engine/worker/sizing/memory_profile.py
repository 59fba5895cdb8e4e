"""`MemoryProfile`: where a device's memory goes, and what is left for the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory_need import GIB, CacheSize


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes on one rank's device, measured with the weights loaded and the largest steps run."""

    total: int
    fraction: float
    """Share of `total` that this engine may take (`memory_fraction`)."""
    elsewhere: int
    """Memory held when this rank started, by other processes, CUDA's context and NCCL."""
    weights: int
    buffers: int
    """Tensors that live as long as the engine: tables, workspaces, sampling state."""
    activations: int
    """What the largest step takes at its peak."""
    libraries: int
    """What this process took outside torch since it started."""
    graphs: int
    headroom: int
    cache: CacheSize
    """What the KV cache of this rank takes."""

    @property
    def limit(self) -> int:
        """Bytes that this engine may take on the device: its share, or less if others hold more."""
        return min(int(self.total * self.fraction), self.total - self.elsewhere)

    @property
    def kv_bytes(self) -> int:
        """Bytes left for the KV cache; negative if the rest doesn't fit."""
        taken = self.weights + self.buffers + self.activations + self.libraries
        return self.limit - taken - self.graphs - self.headroom

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into `kv_bytes`, at least 0."""
        return self.cache.tokens_in(self.kv_bytes)

    def describe(self, num_kv_tokens: int) -> str:
        """One line: where the memory goes with a KV cache of `num_kv_tokens` tokens."""
        kv = self.cache.num_bytes(num_kv_tokens)
        used = self.limit - self.kv_bytes + kv
        return (
            f"memory of the device: {gib(self.total)}, of which {gib(self.limit)} may be used "
            f"(memory_fraction {self.fraction:g}, {gib(self.elsewhere)} held elsewhere): "
            f"weights {gib(self.weights)}, activations {gib(self.activations)}, "
            f"buffers {gib(self.buffers + self.libraries)}, CUDA graphs {gib(self.graphs)}, "
            f"headroom {gib(self.headroom)}, "
            f"KV cache {gib(kv)} = {num_kv_tokens} tokens, unused {gib(self.limit - used)}"
        )


def gib(num_bytes: int) -> str:
    """`num_bytes` in GiB, for messages."""
    return f"{num_bytes / GIB:.2f} GiB"
