"""Working memory that is kept between steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Scratch:
    """Named buffers that grow to the largest size asked for and are never given back.

    Fresh megabyte-sized tensors cost a CPU more in page faults than the arithmetic on them, and
    a captured CUDA graph needs addresses that stay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Tensor of `shape` with undefined contents, valid until `name` is asked for again."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=dtype, device=self._device)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)
