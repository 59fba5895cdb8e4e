"""`Grouped`: a quantized matrix as it lies in a checkpoint, whatever its format there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grouped:
    """A matrix [out, in] of whole numbers, with a scale and perhaps a minimum for each `group` of
    neighbouring inputs of an output:

        weight = scale * (number - center) - minimum
    """

    numbers: Tensor
    """uint8 [out, in], each below 2**bits."""
    bits: int
    center: int
    group: int
    """Divides the number of inputs."""
    scales: Tensor
    """Floating point, [out, in / group]; with `scale_codes` [out, in / whole group]."""
    mins: Tensor | None = None
    """None: all are 0. Otherwise as `scales`, in the same type."""
    scale_codes: Tensor | None = None
    """int8 [out, in / group]: a group's scale is its code times the scale of the larger group that
    it is in. (K-quants of GGUF.)"""
    min_codes: Tensor | None = None
    """The same for the minima; not None if both `scale_codes` and `mins` are given."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.numbers.shape[0], self.numbers.shape[1]

    def group_scales(self) -> Tensor:
        """float32 [out, in / group]"""
        return _times_codes(self.scales, self.scale_codes)

    def group_mins(self) -> Tensor | None:
        """float32 [out, in / group], or None: all are 0."""
        return None if self.mins is None else _times_codes(self.mins, self.min_codes)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[out, in] of `dtype`, computed in float32."""
        out, inputs = self.shape
        weight = (self.numbers.to(torch.float32) - self.center).view(out, -1, self.group)
        weight *= self.group_scales().unsqueeze(-1)
        mins = self.group_mins()
        if mins is not None:
            weight -= mins.unsqueeze(-1)
        return weight.view(out, inputs).to(dtype)


def _times_codes(values: Tensor, codes: Tensor | None) -> Tensor:
    if codes is None:
        return values.float()
    by_group = codes.float().view(codes.shape[0], values.shape[1], -1)
    return (by_group * values.float().unsqueeze(-1)).flatten(1)
