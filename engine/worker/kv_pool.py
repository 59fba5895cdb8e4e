"""The KV cache's memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LayerKV(NamedTuple):
    """Keys and values of one layer, each [num_slots, num_kv_heads, head_dim]."""

    k: Tensor
    v: Tensor


class MHATokenToKVPool:
    """One slot per token and layer, for this rank's heads and layers.

    Slots [0, page_size) are the padding page: they are never given to a request, so rows that
    only fill up a batch may write there. `num_slots` counts the others.
    """

    def __init__(
        self,
        num_slots: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        self.page_size = page_size
        self.dtype = dtype
        shape = (num_slots + page_size, num_kv_heads, head_dim)
        self._layers = [
            LayerKV(
                torch.zeros(shape, dtype=dtype, device=device),
                torch.zeros(shape, dtype=dtype, device=device),
            )
            for _ in range(num_layers)
        ]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for layer in self._layers for t in layer)

    def set_kv(self, layer: int, loc: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [N, num_kv_heads, head_dim] at slots `loc`, int64 [N]."""
        kv = self._layers[layer]
        kv.k.index_copy_(0, loc, k)
        kv.v.index_copy_(0, loc, v)

    def get(self, layer: int) -> LayerKV:
        return self._layers[layer]

    @staticmethod
    def bytes_per_token(
        num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes that one slot takes over all layers."""
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
