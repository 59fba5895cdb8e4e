"""The KV cache's memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import ConfigError

_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max


def resolve_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Type of the cache for `kv_cache_dtype`; "auto" is the model's `dtype`.

    Raises `ConfigError` on other words.
    """
    if name == "auto":
        return dtype
    if name == "fp8_e4m3":
        return _FP8
    raise ConfigError(f"kv_cache_dtype '{name}' is not known; use auto or fp8_e4m3.")


class LayerKV(NamedTuple):
    """Keys and values of one layer, each [num_slots, num_kv_heads, head_dim]."""

    k: Tensor
    v: Tensor


class MHATokenToKVPool:
    """One slot per token and layer, for this rank's heads and layers.

    Slots [0, page_size) are the padding page: they are never given to a request, so rows that
    only fill up a batch may write there. `num_slots` counts the others.

    A float8 pool holds keys and values rounded to 3 bits of mantissa, clamped to 448, unscaled.
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
        if self.dtype == _FP8:
            # torch can't index float8 tensors, but it can index bytes.
            kv.k.view(torch.uint8).index_copy_(0, loc, _to_fp8(k).view(torch.uint8))
            kv.v.view(torch.uint8).index_copy_(0, loc, _to_fp8(v).view(torch.uint8))
            return
        kv.k.index_copy_(0, loc, k)
        kv.v.index_copy_(0, loc, v)

    def get(self, layer: int) -> LayerKV:
        return self._layers[layer]

    def gather(self, layer: int, slots: Tensor, dtype: torch.dtype) -> LayerKV:
        """Copies of the keys and values at `slots` int [N]; of a float8 pool as `dtype`."""
        kv = self._layers[layer]
        if self.dtype == _FP8:
            return LayerKV(
                *(t.view(torch.uint8).index_select(0, slots).view(_FP8).to(dtype) for t in kv)
            )
        return LayerKV(kv.k.index_select(0, slots), kv.v.index_select(0, slots))

    def as_stored(self, x: Tensor) -> Tensor:
        """Keys or values as they will be read back, in their own type."""
        return _to_fp8(x).to(x.dtype) if self.dtype == _FP8 else x

    @staticmethod
    def bytes_per_token(
        num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes that one slot takes over all layers."""
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize


def _to_fp8(x: Tensor) -> Tensor:
    """`x` as float8. It is clamped first: the conversion makes NaN of numbers beyond the range."""
    return x.clamp(-_FP8_MAX, _FP8_MAX).to(_FP8)
