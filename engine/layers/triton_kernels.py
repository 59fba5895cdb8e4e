"""Triton kernels for quantized matrices on GPUs (`engine.layers.gpu_weight`): the product of some
rows with a matrix as it is kept, and plain matrices of parts of it.

Numbers of 4 or 8 bits are decoded in registers, exactly, to the type of the inputs. Tensor cores
sum the products of a group, or of a chunk of it, in float32; its scale and minimum are applied to
that sum. So nothing is rounded but the output.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.layers.gpu_tile import Tile
from engine.layers.gpu_weight import GpuWeight

_LANES = tl.constexpr(16)
"""Words of an output in a chunk: as many inputs as a tensor core multiplies at once."""
_WHOLE4, _WHOLE8, _FLOAT4, _FLOAT8 = (tl.constexpr(kind) for kind in range(4))
"""What codes stand for: `engine.layers.gpu_weight.Kind`."""

_FLOAT4_BF16, _FLOAT4_FP16 = tl.constexpr(2.0**126), tl.constexpr(2.0**14)
_FLOAT8_BF16, _FLOAT8_FP16 = tl.constexpr(2.0**120), tl.constexpr(2.0**8)
"""What their bits are multiplied by in the places that these types have for them."""
_NAN = tl.constexpr(float("nan"))


@triton.jit
def _half(pair, HIGH: tl.constexpr, BF16: tl.constexpr):
    """The numbers of 16 bits that the low or the high halves of int32 `pair` are."""
    bits = (pair >> 16).to(tl.int16) if HIGH else pair.to(tl.int16)
    return bits.to(tl.bfloat16 if BF16 else tl.float16, bitcast=True)


@triton.jit
def _decoded(
    words,
    PLANE: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    CENTER: tl.constexpr,
    BF16: tl.constexpr,
):
    """What the codes at place `PLANE` of int32 `words` stand for, without their scales, in bfloat16
    or float16.

    Two of a word are decoded at once, one in each half; the compiler shares that between planes.
    """
    HALF: tl.constexpr = 16 // BITS
    HIGH: tl.constexpr = PLANE >= HALF
    pair = (words >> (BITS * (PLANE % HALF))) & (0x000F000F if BITS == 4 else 0x00FF00FF)
    if KIND == _WHOLE4:
        # The last bit of 128 in bfloat16, of 1024 in float16, is worth 1: or-ed, codes are added.
        BASE: tl.constexpr = 0x43004300 if BF16 else 0x64006400
        found = _half(pair | BASE, HIGH, BF16) - ((128.0 if BF16 else 1024.0) + CENTER)
    elif KIND == _WHOLE8:
        if BF16:
            whole = (pair >> 16) if HIGH else pair & 0xFFFF
            found = whole.to(tl.float32) - CENTER
        else:
            found = _half(pair | 0x64006400, HIGH, BF16) - (1024.0 + CENTER)
    elif KIND == _FLOAT4:
        # Exponent and mantissa move to where 16 bits have them, those of subnormal numbers too.
        AT4: tl.constexpr = 6 if BF16 else 9
        bits = ((pair & 0x00080008) << 12) | ((pair & 0x00070007) << AT4)
        found = _half(bits, HIGH, BF16) * (_FLOAT4_BF16 if BF16 else _FLOAT4_FP16)
    else:
        AT8: tl.constexpr = 4 if BF16 else 7
        bits = ((pair & 0x00800080) << 8) | ((pair & 0x007F007F) << AT8)
        found = _half(bits, HIGH, BF16) * (_FLOAT8_BF16 if BF16 else _FLOAT8_FP16)
    return found.to(tl.bfloat16 if BF16 else tl.float16)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_codes(
    x,
    words,
    scales,
    mins,
    bias,
    out,
    partials,
    arrived,
    ends,
    experts,
    num_rows,
    x_row,
    out_row,
    inputs,
    outputs,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    CENTER: tl.constexpr,
    BF16: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_MINS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """A program for `BLOCK_N` outputs of `BLOCK_M` rows and a part of the inputs; see `multiply`.

    Products are [outputs, rows]: decoded numbers are the operand that tensor cores take from
    registers.
    """
    PLANES: tl.constexpr = 32 // BITS
    CHUNK: tl.constexpr = PLANES * _LANES
    block_n, block_m, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    lanes = tl.arange(0, _LANES)
    num_chunks = tl.cdiv(inputs, CHUNK)
    last_row = num_rows
    if EXPERTS != 0:
        # Whose rows are in this block: blocks of an expert begin with its first row.
        numbers = tl.arange(0, EXPERTS)
        stops = tl.load(ends + numbers, mask=numbers < experts, other=0)
        starts = tl.load(ends + numbers - 1, mask=(numbers > 0) & (numbers < experts), other=0)
        blocks_of = tl.where(numbers < experts, tl.cdiv(stops - starts, BLOCK_M), 0)
        upto = tl.cumsum(blocks_of, 0)
        expert = tl.sum((upto <= block_m).to(tl.int32), 0)
        if expert >= experts:
            return
        is_it = numbers == expert
        first_block = tl.sum(tl.where(is_it, upto - blocks_of, 0), 0)
        m += tl.sum(tl.where(is_it, starts, 0), 0) - first_block * BLOCK_M
        last_row = tl.sum(tl.where(is_it, stops, 0), 0)
        words += expert.to(tl.int64) * num_chunks * outputs * _LANES
        by_expert = expert * outputs
        if HAS_BIAS:
            bias += by_expert
        if GROUP != 0:
            by_expert *= tl.cdiv(inputs, GROUP)
        scales += by_expert
        if HAS_MINS:
            mins += by_expert
    has_n, has_m = n < outputs, m < last_row
    splits = tl.num_programs(2)
    begin, end = split * num_chunks // splits, (split + 1) * num_chunks // splits

    words_at = words + n[:, None] * _LANES + lanes[None, :]
    x_at = x + m[None, :] * x_row + lanes[:, None]
    ones = tl.full((BLOCK_N, _LANES), 1.0, x.dtype.element_ty)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    group = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for chunk in tl.range(begin, end, num_stages=STAGES):
        packed = tl.load(words_at + chunk * outputs * _LANES, mask=has_n[:, None], other=0)
        for plane in tl.static_range(PLANES):
            first = chunk * CHUNK + plane * _LANES
            inside = has_m[None, :]
            if not IS_WHOLE:
                inside = inside & (first + lanes < inputs)[:, None]
            rows = tl.load(x_at + first, mask=inside, other=0.0)
            if GROUP != 0 and plane * _LANES % UNIT == 0:  # early, because they take long to come
                at = tl.minimum(first, inputs - 1) // GROUP * outputs + n
                scale = tl.load(scales + at, mask=has_n, other=0.0).to(tl.float32)
                if HAS_MINS:
                    least = tl.load(mins + at, mask=has_n, other=0.0).to(tl.float32)
            group = tl.dot(_decoded(packed, plane, KIND, BITS, CENTER, BF16), rows, group)
            if HAS_MINS:
                sums = tl.dot(ones, rows, sums)
            if GROUP != 0 and (plane + 1) * _LANES % UNIT == 0:
                total += group * scale[:, None]
                group = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                if HAS_MINS:
                    total -= sums * least[:, None]
                    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if GROUP == 0:
        total = group * tl.load(scales + n, mask=has_n, other=0.0).to(tl.float32)[:, None]
        if HAS_MINS:
            total -= sums * tl.load(mins + n, mask=has_n, other=0.0).to(tl.float32)[:, None]

    is_last = True
    if IS_SPLIT:
        block = block_m * tl.num_programs(0) + block_n
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        size = BLOCK_N * BLOCK_M
        blocks = tl.num_programs(0) * tl.num_programs(1)
        tl.store(partials + (split * blocks + block) * size + inner, total)
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived + block, 1, sem="acq_rel") == splits - 1
        if is_last:
            # Whoever comes last adds in the order of the parts.
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for part in range(splits):
                place = partials + (part * blocks + block) * size + inner
                total += tl.load(place, cache_modifier=".cg")
            tl.store(arrived + block, 0)
    if is_last:
        if HAS_BIAS:
            total += tl.load(bias + n, mask=has_n, other=0.0).to(tl.float32)[:, None]
        tl.store(
            out + m[None, :] * out_row + n[:, None],
            total.to(out.dtype.element_ty),
            mask=has_n[:, None] & has_m[None, :],
        )


@triton.jit(do_not_specialize=["begin", "count"])
def decode_rows(
    words,
    scales,
    mins,
    ids,
    out,
    begin,
    count,
    inputs,
    outputs,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    CENTER: tl.constexpr,
    BF16: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_MINS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A program for `BLOCK_N` outputs and a chunk of inputs; see `decode`."""
    PLANES: tl.constexpr = 32 // BITS
    CHUNK: tl.constexpr = PLANES * _LANES
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.program_id(1)
    lanes = tl.arange(0, _LANES)
    n, inside = begin + row, row < count
    if HAS_IDS:
        n = tl.load(ids + row, mask=inside, other=0).to(tl.int32)
    is_known = (n >= 0) & (n < outputs)
    at = words + (chunk * outputs + n[:, None]) * _LANES + lanes[None, :]
    packed = tl.load(at, mask=(inside & is_known)[:, None], other=0)
    out_at = out + row[:, None].to(tl.int64) * inputs + lanes[None, :]
    for plane in tl.static_range(PLANES):
        first = chunk * CHUNK + plane * _LANES
        place = n
        if GROUP != 0:
            place = tl.minimum(first, inputs - 1) // GROUP * outputs + n
        found = _decoded(packed, plane, KIND, BITS, CENTER, BF16).to(tl.float32)
        found *= tl.load(scales + place, mask=inside & is_known, other=float("nan")).to(tl.float32)[
            :, None
        ]
        if HAS_MINS:
            found -= tl.load(mins + place, mask=inside & is_known, other=0.0).to(tl.float32)[
                :, None
            ]
        tl.store(
            out_at + first,
            found.to(out.dtype.element_ty),
            mask=inside[:, None] & (first + lanes < inputs)[None, :],
        )


DECODE_OUTPUTS = 64
"""Outputs that a program decodes."""


def multiply(
    x: Tensor,
    weight: GpuWeight,
    bias: Tensor | None,
    out: Tensor,
    arrived: Tensor,
    tile: Tile,
    splits: int,
    ends: Tensor | None = None,
) -> None:
    """out = x W^T + bias by one kernel.

    x [N, in] and out [N, out] of float16 or bfloat16 may have gaps between rows; N > 0. The inputs
    are divided into `splits` parts, whose sums are added in their order. `arrived`: int32, a 0 for
    each block of outputs and rows, 0 again afterwards: calls that use it must follow each other.

    With `ends`, int32 [matrices], rows are sorted by their matrix: those of the first end at
    `ends[0]`, and so on. `bias` is [matrices, out] then. Rows behind the last end stay as they are.
    """
    num_rows, (outputs, inputs) = len(x), weight.shape
    blocks = tile.blocks(num_rows, weight.matrices)
    grid = triton.cdiv(outputs, tile.outputs), blocks, splits
    partials = arrived
    if splits > 1:
        size = grid[0] * grid[1] * splits * tile.rows * tile.outputs
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
    chunk = weight.kind.chunk
    multiply_codes[grid](
        x,
        weight.words,
        weight.scales,
        weight.mins,
        bias,
        out,
        partials,
        arrived,
        ends,
        weight.matrices,
        num_rows,
        x.stride(0),
        out.stride(0),
        inputs,
        outputs,
        KIND=weight.kind.code,
        BITS=weight.kind.bits,
        CENTER=weight.center,
        BF16=x.dtype == torch.bfloat16,
        GROUP=weight.group,
        UNIT=math.gcd(weight.group, chunk),
        HAS_MINS=weight.mins is not None,
        HAS_BIAS=bias is not None,
        IS_WHOLE=inputs % chunk == 0,
        IS_SPLIT=splits > 1,
        BLOCK_N=tile.outputs,
        BLOCK_M=tile.rows,
        STAGES=tile.stages,
        EXPERTS=0 if ends is None else triton.next_power_of_2(weight.matrices),
        num_warps=tile.warps,
    )


def decode(weight: GpuWeight, out: Tensor, *, begin: int = 0, ids: Tensor | None = None) -> None:
    """Write plain numbers to out [count, in], count > 0, which is contiguous: the outputs `ids`,
    int64 [count], or those from `begin` on.

    They are computed in float32 and rounded once to the type of out, float16 or bfloat16. NaN
    stands for outputs that there aren't.
    """
    outputs, inputs = weight.shape
    grid = triton.cdiv(len(out), DECODE_OUTPUTS), triton.cdiv(inputs, weight.kind.chunk)
    decode_rows[grid](
        weight.words,
        weight.scales,
        weight.mins,
        ids,
        out,
        begin,
        len(out),
        inputs,
        outputs,
        KIND=weight.kind.code,
        BITS=weight.kind.bits,
        CENTER=weight.center,
        BF16=out.dtype == torch.bfloat16,
        GROUP=weight.group,
        HAS_MINS=weight.mins is not None,
        HAS_IDS=ids is not None,
        BLOCK_N=DECODE_OUTPUTS,
    )
