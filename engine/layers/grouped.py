"""`Grouped`: a quantized matrix, read of a checkpoint in whatever format or made of a plain one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
"""Inputs with one scale, of a matrix that is quantized here."""
SMALL_GROUP = 16
"""The same where 32 doesn't divide the inputs."""
QUANTIZED_ROWS = 256
# Rows that are quantized at once: float32 copies of a whole matrix would take too much memory.
_STEPS = {8: (127.0,), 4: (8.0, 7.5, 7.0, 6.5)}
"""By bits: how many steps the largest number of a group may be from 0. The best is taken."""
_MIN_HALF, _MAX_HALF = 2.0**-14, 65504.0


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

    def padded(self, out: int) -> Grouped:
        """With rows of zeros behind it, up to `out` of them."""
        missing = out - self.shape[0]
        if not missing:
            return self

        def more(values: Tensor | None) -> Tensor | None:
            return None if values is None else F.pad(values, (0, 0, 0, missing))

        return replace(
            self,
            numbers=F.pad(self.numbers, (0, 0, 0, missing), value=self.center),
            scales=F.pad(self.scales, (0, 0, 0, missing)),
            mins=more(self.mins),
            scale_codes=more(self.scale_codes),
            min_codes=more(self.min_codes),
        )

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


def can_quantize(inputs: int) -> bool:
    """Whether groups divide a matrix of so many inputs."""
    return inputs % SMALL_GROUP == 0 and inputs > 0


def quantize(weight: Tensor, bits: int) -> Grouped:
    """`weight` [out, in] in numbers of 4 or 8 bits; the middle one is 0. Groups must divide
    its inputs (`can_quantize`).

    8 bits: a number is off by half a step at most, which is the group's largest absolute value
    / 127. 4 bits: the step with the least squared error is taken, of some that leave the largest
    number 6.5 to 8 steps from 0 and those that fit their numbers best. Scales are float16 where all
    of a matrix are in its range, else float32.
    A group that has infinities or NaN gets NaN as its scale, so that they show in its outputs.
    """
    out, inputs = weight.shape
    group = GROUP if inputs % GROUP == 0 else SMALL_GROUP
    scales = torch.empty((out, inputs // group), dtype=torch.float32)
    numbers = torch.empty((out, inputs), dtype=torch.uint8)
    for start in range(0, out, QUANTIZED_ROWS):
        block = slice(start, start + QUANTIZED_ROWS)
        rows = weight[block].float().view(-1, inputs // group, group)
        scales[block] = _scales(rows, bits)
    known = scales[scales.isfinite() & (scales != 0)].abs()
    if not len(known) or (known.min() >= _MIN_HALF and known.max() <= _MAX_HALF):
        scales = scales.half()
    center = 1 << (bits - 1)
    for start in range(0, out, QUANTIZED_ROWS):
        block = slice(start, start + QUANTIZED_ROWS)
        rows = weight[block].float().view(-1, inputs // group, group)
        steps = _steps(rows, scales[block].float().unsqueeze(-1), bits)
        numbers[block] = (steps + center).view(-1, inputs).to(torch.uint8)
    return Grouped(numbers, bits, center, group, scales)


def _scales(rows: Tensor, bits: int) -> Tensor:
    """[rows, groups] of the best steps for [rows, groups, group]."""
    place = rows.abs().argmax(-1, keepdim=True)
    extreme = rows.gather(-1, place).squeeze(-1)
    if not rows.isfinite().all():
        extreme = torch.where(rows.isfinite().all(-1), extreme, torch.nan)
    best = extreme / _STEPS[bits][0]
    if bits == 8:
        return best.abs()
    least = torch.full_like(best, torch.inf)
    for count in _STEPS[bits]:
        # Its largest number is the lowest one: there is one more below 0 than above it.
        scale = _as_half(-extreme / count)
        for _ in range(2):
            steps = _steps(rows, scale.unsqueeze(-1), bits)
            total = (steps * scale.unsqueeze(-1) - rows).square().sum(-1)
            best = torch.where(total < least, scale, best)
            least = torch.minimum(total, least)
            # Of these steps the scale with the least error.
            square = steps.square().sum(-1)
            scale = _as_half((steps * rows).sum(-1) / square.masked_fill(square == 0, 1.0))
    return torch.where(extreme.isfinite(), best, extreme)


def _as_half(scales: Tensor) -> Tensor:
    """Rounded to float16 where they are in its range."""
    fits = (scales.abs() >= _MIN_HALF) & (scales.abs() <= _MAX_HALF)
    return torch.where(fits, scales.half().float(), scales)


def _steps(rows: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The whole numbers nearest to rows / scales; halves are rounded to even."""
    least = -127.0 if bits == 8 else -float(1 << (bits - 1))
    quotients = rows / scales.masked_fill(scales == 0, 1.0)
    return quotients.round_().nan_to_num_(0.0).clamp_(least, float((1 << (bits - 1)) - 1))


def _times_codes(values: Tensor, codes: Tensor | None) -> Tensor:
    if codes is None:
        return values.float()
    by_group = codes.float().view(codes.shape[0], values.shape[1], -1)
    return (by_group * values.float().unsqueeze(-1)).flatten(1)
