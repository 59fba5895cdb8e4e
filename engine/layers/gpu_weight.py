"""`GpuWeight`: a quantized matrix as our kernels for GPUs multiply by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from engine.layers.float8_groups import Float8Groups, Quantized
from engine.layers.grouped import Grouped

LANES = 16
"""Words of an output in a chunk, which is the smallest group, too."""
_FLOAT4_STEPS = (0, 1, 2, 3, 4, 6, 8, 12)
"""What the codes of float4 (e2m1) stand for, in halves."""
_FLOAT4_BITS = 5
"""Of whole numbers that reach from -12 to 12."""
_MIN_HALF, _MAX_HALF = 2.0**-14, 65504.0


class Kind(Enum):
    """What codes stand for: the number in the kernels, and bits in memory."""

    WHOLE4 = 0, 4
    WHOLE8 = 1, 8
    FLOAT4 = 2, 4
    FLOAT8 = 3, 8

    def __init__(self, code: int, bits: int) -> None:
        self.code, self.bits = code, bits

    @property
    def chunk(self) -> int:
        """Inputs whose codes are in `LANES` words."""
        return LANES * 32 // self.bits


@dataclass(frozen=True)
class GpuWeight:
    """A matrix [out, in] of codes of 4 or 8 bits, with a scale and perhaps a minimum for each
    group of neighbouring inputs:

        weight = scale * (number - center) - minimum
    """

    kind: Kind
    words: Tensor
    """int32 [chunks, out, `LANES`]: word j of a chunk has the codes of its inputs j, `LANES` + j
    and so on, from the low bits up. Codes behind the last input are 0."""
    inputs: int
    center: int
    group: int
    """Inputs of a group, a multiple of `LANES`; 0: all of an output."""
    scales: Tensor
    """[groups, out]: float16, bfloat16 or float32."""
    mins: Tensor | None
    """The same, or None: all are 0."""
    matrices: int = 1
    """So many of the same shape lie one behind the other along the first dimensions of `words`,
    `scales` and `mins`: those of a mixture's experts."""

    @property
    def chunks(self) -> int:
        """Of the inputs of a matrix."""
        return self.words.shape[0] // self.matrices

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of a matrix."""
        return self.words.shape[1], self.inputs

    @property
    def num_bytes(self) -> int:
        """What it takes of memory."""
        tensors = [self.words, self.scales, *([] if self.mins is None else [self.mins])]
        return sum(tensor.nbytes for tensor in tensors)


def can_pack(part: Quantized) -> bool:
    """Whether the kernels can have `part`: its groups are multiples of `LANES` inputs, and float8
    numbers are numbers (not NaN)."""
    if part.group % LANES and part.group != part.shape[1]:
        return False
    if isinstance(part, Grouped):
        return part.bits <= 8
    return not bool((part.numbers.view(torch.uint8) & 0x7F == 0x7F).any())


def pack(part: Quantized) -> GpuWeight:
    """`part`, which `can_pack`, as the kernels have it."""
    return _pack_grouped(part) if isinstance(part, Grouped) else _pack_float8(part)


def _pack_grouped(part: Grouped) -> GpuWeight:
    """Numbers of 2 bits take 4, those of 5 and 6 bits 8, but for the steps of a float4. float32
    scales and minima of groups are rounded to float16 where that has their range.
    """
    inputs = part.shape[1]
    is_whole = part.group == inputs
    mins = part.group_mins()
    scales = part.scales if part.scale_codes is None else part.group_scales()
    numbers, center, kind = part.numbers, part.center, Kind.WHOLE4
    if part.bits == _FLOAT4_BITS and (codes := _float4_codes(part)) is not None:
        # A step of whole numbers is half of one of float4.
        numbers, center, kind, scales = codes, 0, Kind.FLOAT4, 2 * scales.float()
    elif part.bits > 4:
        kind = Kind.WHOLE8
    if not is_whole:
        scales = _narrowed(scales)
    return GpuWeight(
        kind,
        _words(numbers, kind),
        inputs,
        center,
        0 if is_whole else part.group,
        scales.t().contiguous(),
        None if mins is None or not bool(mins.any()) else _narrowed(mins).t().contiguous(),
    )


def _pack_float8(part: Float8Groups) -> GpuWeight:
    inputs = part.shape[1]
    is_whole = part.group == inputs
    codes = part.numbers.view(torch.uint8)
    words, scales = _words(codes, Kind.FLOAT8), part.scales.t().contiguous()
    return GpuWeight(Kind.FLOAT8, words, inputs, 0, 0 if is_whole else part.group, scales, None)


def merge(weights: Sequence[GpuWeight]) -> list[GpuWeight]:
    """Neighbours that are alike as one matrix, one below the other."""
    found: list[GpuWeight] = []
    for weight in weights:
        if found and _form(found[-1]) == _form(weight):
            found[-1] = _joined(found[-1], weight)
        else:
            found.append(weight)
    return found


def stack(weights: Sequence[GpuWeight]) -> GpuWeight | None:
    """Matrices of one shape as one weight; None: their numbers stand for other things."""
    first, scales = weights[0], [weight.scales for weight in weights]
    forms = {(one.kind, one.center, one.group, one.words.shape) for one in weights}
    if len(forms) > 1:
        return None
    mins = None
    if any(one.mins is not None for one in weights):
        mins = [torch.zeros_like(one.scales) if one.mins is None else one.mins for one in weights]
    return GpuWeight(
        first.kind,
        torch.cat([one.words for one in weights]),
        first.inputs,
        first.center,
        first.group,
        _of_one_type(scales),
        None if mins is None else _of_one_type(mins),
        len(weights),
    )


def _form(weight: GpuWeight) -> tuple[object, ...]:
    mins = None if weight.mins is None else weight.mins.dtype
    return weight.kind, weight.center, weight.group, weight.scales.dtype, mins


def _joined(above: GpuWeight, below: GpuWeight) -> GpuWeight:
    mins = None
    if above.mins is not None and below.mins is not None:
        mins = torch.cat([above.mins, below.mins], 1)
    return GpuWeight(
        above.kind,
        torch.cat([above.words, below.words], 1),
        above.inputs,
        above.center,
        above.group,
        torch.cat([above.scales, below.scales], 1),
        mins,
    )


def _words(codes: Tensor, kind: Kind) -> Tensor:
    """int32 [chunks, out, `LANES`] of uint8 [out, in]."""
    outputs, inputs = codes.shape
    chunks, planes = -(-inputs // kind.chunk), 32 // kind.bits
    padded = torch.nn.functional.pad(codes, (0, chunks * kind.chunk - inputs))
    planed = padded.view(outputs, chunks, planes, LANES)
    words = torch.zeros((chunks, outputs, LANES), dtype=torch.int32, device=codes.device)
    for plane in range(planes):
        words |= planed[:, :, plane].transpose(0, 1).to(torch.int32) << (kind.bits * plane)
    return words


def _float4_codes(part: Grouped) -> Tensor | None:
    """uint8 [out, in] of numbers that are steps of a float4; None if others are among them."""
    table = torch.full((1 << part.bits,), 255, dtype=torch.uint8)
    for code, step in enumerate(_FLOAT4_STEPS):
        for number, signed in ((part.center - step, code | 8), (part.center + step, code)):
            if 0 <= number < len(table):
                table[number] = signed
    codes = table.to(part.numbers.device)[part.numbers.int()]
    return None if bool((codes == 255).any()) else codes


def _of_one_type(values: list[Tensor]) -> Tensor:
    """One behind the other, in float32 if their types differ."""
    if len({one.dtype for one in values}) > 1:
        values = [one.float() for one in values]
    return torch.cat(values)


def _narrowed(values: Tensor) -> Tensor:
    """float16 in place of float32 if all are in its range, else as they are."""
    if values.dtype != torch.float32:
        return values
    known = values[values != 0].abs()
    fits = bool(((known >= _MIN_HALF) & (known <= _MAX_HALF)).all())
    return values.half() if fits else values
