"""The KV cache's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.checkpoint.layout import AttentionCall, sees_windows
from engine.device.huge_pages import zeros_in_huge_pages
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
    """Keys [num_slots, num_kv_heads, k_dim] and values [num_slots, num_kv_heads, v_dim] of one
    layer. Of latents the values are the first numbers of the keys, in the same memory."""

    k: Tensor
    v: Tensor


class MHATokenToKVPool:
    """One slot per token and layer, for this rank's heads and layers.

    Slots [0, page_size) are the padding page: they are never given to a request, so rows that
    only fill up a batch may write there. `num_slots` counts the others.

    Layers with windows may have fewer places. Then `window_slots` says which place a slot has
    there, as the scheduler tells it (`engine.kvcache.window_pages`).

    A float8 pool holds keys and values rounded to 3 bits of mantissa, clamped to 448, unscaled.
    """

    def __init__(
        self,
        num_slots: int,
        page_size: int,
        calls: Sequence[AttentionCall],
        dtype: torch.dtype,
        device: torch.device,
        num_window_slots: int | None = None,
    ) -> None:
        """`calls`: those of a stage, in order. `num_window_slots`: the places of layers with
        windows besides the padding page; None: as many as the others have."""
        self.num_slots = num_slots
        self.window_page: Tensor | None = None
        """int64 [pages with the padding page]: of each page, the one in layers with windows. None:
        the same."""
        near = [False] * len(calls)
        if num_window_slots is not None:
            near = list(sees_windows(calls))
            num_pages = num_slots // page_size + 1
            self.window_page = torch.zeros(num_pages, dtype=torch.int64, device=device)
        self.has_windows = tuple(near)
        """Of each layer: whether its places are those of `window_slots`."""
        self.page_size = page_size
        self.dtype = dtype
        self._layers: list[LayerKV] = []
        self._are_latents = [call.latent_of is not None for call in calls]
        self.num_bytes = 0
        for call, sees in zip(calls, near, strict=True):
            rows = page_size + (num_window_slots or 0 if sees else num_slots)
            self.num_bytes += rows * call.kv_size * dtype.itemsize
            if call.kv_of is not None:
                self._layers.append(self._layers[call.kv_of])
                continue
            keys = _zeros((rows, call.num_kv_heads, call.k_dim), dtype, device)
            if call.latent_of is not None:
                values = keys[..., : call.v_dim]
            else:
                values = _zeros((rows, call.num_kv_heads, call.v_dim), dtype, device)
            self._layers.append(LayerKV(keys, values))

    def change_windows(self, pages: Tensor, window_pages: Tensor) -> None:
        """From now on, layers with windows have `pages` int64 [n] at `window_pages` int64 [n]."""
        assert self.window_page is not None
        self.window_page[pages] = window_pages

    def window_slots(self, slots: Tensor) -> Tensor:
        """The places of `slots` [N] in layers with windows; of slots behind their windows, any."""
        assert self.window_page is not None
        size = self.page_size
        places = self.window_page[slots // size] * size + slots % size
        return places.to(slots.dtype)

    def set_kv(self, layer: int, loc: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k [N, num_kv_heads, k_dim] and v [N, num_kv_heads, v_dim] at slots `loc`, int64
        [N]."""
        kv = self._layers[layer]
        if self.dtype == _FP8:
            # torch can't index float8 tensors, but it can index bytes.
            kv.k.view(torch.uint8).index_copy_(0, loc, _to_fp8(k).view(torch.uint8))
            if not self._are_latents[layer]:
                kv.v.view(torch.uint8).index_copy_(0, loc, _to_fp8(v).view(torch.uint8))
            return
        kv.k.index_copy_(0, loc, k)
        if not self._are_latents[layer]:
            kv.v.index_copy_(0, loc, v)

    def get(self, layer: int) -> LayerKV:
        return self._layers[layer]

    def gather(self, layer: int, slots: Tensor, dtype: torch.dtype) -> LayerKV:
        """Copies of the keys and values at `slots` int [N]; of a float8 pool as `dtype`."""
        kv = self._layers[layer]
        keys = self._picked(kv.k, slots, dtype)
        if self._are_latents[layer]:
            return LayerKV(keys, keys[..., : kv.v.shape[-1]])
        return LayerKV(keys, self._picked(kv.v, slots, dtype))

    def as_stored(self, x: Tensor) -> Tensor:
        """Keys or values as they will be read back, in their own type."""
        return _to_fp8(x).to(x.dtype) if self.dtype == _FP8 else x

    def _picked(self, stored: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        if self.dtype == _FP8:
            return stored.view(torch.uint8).index_select(0, slots).view(_FP8).to(dtype)
        return stored.index_select(0, slots)


def _to_fp8(x: Tensor) -> Tensor:
    """`x` as float8. It is clamped first: the conversion makes NaN of numbers beyond the range."""
    return x.clamp(-_FP8_MAX, _FP8_MAX).to(_FP8)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return zeros_in_huge_pages(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)
