"""`Float8Groups`: a matrix of float8 numbers as checkpoints have it, and `Quantized`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.grouped import Grouped


@dataclass(frozen=True)
class Float8Groups:
    """A matrix [out, in] of float8 numbers (e4m3), with a scale for each `group` of neighbouring
    inputs of an output, by which they are multiplied."""

    numbers: Tensor
    """float8_e4m3fn [out, in]"""
    group: int
    """Divides the number of inputs."""
    scales: Tensor
    """Floating point, [out, in / group]"""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.numbers.shape[0], self.numbers.shape[1]

    def padded(self, out: int) -> Float8Groups:
        """With rows of zeros behind it, up to `out` of them."""
        missing = out - self.shape[0]
        if not missing:
            return self
        # torch can't pad this type.
        numbers = F.pad(self.numbers.view(torch.uint8), (0, 0, 0, missing))
        return Float8Groups(
            numbers.view(self.numbers.dtype),
            self.group,
            F.pad(self.scales, (0, 0, 0, missing)),
        )

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[out, in] of `dtype`, computed in float32."""
        outputs, inputs = self.shape
        weight = self.numbers.float().view(outputs, -1, self.group)
        weight *= self.scales.float().unsqueeze(-1)
        return weight.view(outputs, inputs).to(dtype)


Quantized = Grouped | Float8Groups
"""A matrix, or a part of one, as a checkpoint has it."""
