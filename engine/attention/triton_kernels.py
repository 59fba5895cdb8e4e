"""Triton kernels around FlashInfer's attention: page numbers, and RoPE with the write of keys and
values. `engine.device.triton_loader` imports this module where it is needed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PAGES = 1024
"""Page numbers that a program finds at once."""
PROGRAMS = 1024
"""Programs of a step that are enough to keep a GPU busy."""
HEADS = 8
"""Heads that a program rotates or copies."""


@triton.jit(do_not_specialize=["stride"])
def find_pages(
    packed,
    req_to_token,
    out,
    stride,
    width,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for each row and part of its pages; see `page_indices`."""
    row = tl.program_id(0)
    begin = tl.load(packed + row)
    count = tl.load(packed + row + 1) - begin
    request = tl.load(packed + 2 * stride + row).to(tl.int64)
    cells = req_to_token + request * width + tl.load(packed + 3 * stride + row)
    for start in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        page = start + tl.arange(0, BLOCK)
        inside = page < count
        slots = tl.load(cells + page * PAGE_SIZE, mask=inside, other=0)
        tl.store(out + begin + page, slots // PAGE_SIZE, mask=inside)


@triton.jit
def _rotated(first, second, cos, sin):
    """Both halves of some heads, in float32 and rounded back."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    return (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)


@triton.jit
def _float8_bits(x):
    """uint8: `x` clamped to 448 and rounded to float8_e4m3fn as torch does. A NaN stays one.

    By its bits: GPUs before compute capability 8.9 have no such conversion.
    """
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    is_nan = size > 0x7F800000
    size = tl.minimum(size, 0x43E00000)  # 448
    # To the nearest, ties to even: half of the last kept bit, less one if that bit is 0.
    normal = (size + ((7 - 127) << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
    # Adding 2**14 moves the last kept bit of a subnormal, 2**-9, to the end.
    shifted = size.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    found = tl.where(size < 0x3C800000, subnormal, normal)  # 2**-6
    found = tl.where(is_nan, 0x7F, found)
    return (found | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _store(at, x, mask, FLOAT8: tl.constexpr):
    if FLOAT8:
        tl.store(at, _float8_bits(x), mask=mask)
    else:
        tl.store(at, x, mask=mask)


@triton.jit(do_not_specialize=["positions", "locs"])
def rotate_heads(
    q,
    k,
    v,
    positions,
    cos_sin,
    keys,
    values,
    locs,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    FLOAT8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for each token and `BLOCK` heads: first those of queries; see
    `rotate_and_store`."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (NUM_HEADS + BLOCK - 1) // BLOCK
    lanes = tl.arange(0, HALF)[None, :]
    angles = cos_sin + tl.load(positions + token) * (2 * HALF) + lanes
    cos, sin = tl.load(angles), tl.load(angles + HALF)
    if block < q_blocks:
        head = block * BLOCK + tl.arange(0, BLOCK)[:, None]
        there = (head < NUM_HEADS) & (lanes < HALF)
        at = q + token * q_token + head * q_head + lanes
        first = tl.load(at, mask=there, other=0.0)
        second = tl.load(at + HALF, mask=there, other=0.0)
        first, second = _rotated(first, second, cos, sin)
        tl.store(at, first, mask=there)
        tl.store(at + HALF, second, mask=there)
    else:
        kv_head = (block - q_blocks) * BLOCK + tl.arange(0, BLOCK)[:, None]
        inside = (kv_head < NUM_KV_HEADS) & (lanes < HALF)
        slot = tl.load(locs + token) * (NUM_KV_HEADS * 2 * HALF)
        to = slot + kv_head * (2 * HALF) + lanes
        k_at = k + token * k_token + kv_head * k_head + lanes
        k_first = tl.load(k_at, mask=inside, other=0.0)
        k_second = tl.load(k_at + HALF, mask=inside, other=0.0)
        k_first, k_second = _rotated(k_first, k_second, cos, sin)
        _store(keys + to, k_first, inside, FLOAT8)
        _store(keys + to + HALF, k_second, inside, FLOAT8)
        v_at = v + token * v_token + kv_head * v_head + lanes
        _store(values + to, tl.load(v_at, mask=inside, other=0.0), inside, FLOAT8)
        _store(values + to + HALF, tl.load(v_at + HALF, mask=inside, other=0.0), inside, FLOAT8)


def page_indices(
    packed: Tensor,
    num_rows: int,
    longest: int,
    req_to_token: Tensor,
    page_size: int,
    out: Tensor,
) -> None:
    """Write the page numbers of `num_rows` rows to `out`, int32, by one kernel.

    `packed`: `PageTable.packed` on the device. `longest`: pages of the row that has most.
    `req_to_token`: int32 [rows, positions], contiguous.
    """
    parts = min(triton.cdiv(longest, PAGES), triton.cdiv(PROGRAMS, num_rows))
    find_pages[(num_rows, parts)](
        packed,
        req_to_token,
        out,
        packed.stride(0),
        req_to_token.shape[1],
        PAGE_SIZE=page_size,
        BLOCK=PAGES,
    )


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    keys: Tensor,
    values: Tensor,
    locs: Tensor,
) -> None:
    """Rotate q in place, and write rotated k, and v, to the slots `locs`, by one kernel.

    q [T, num_heads, dim], k and v [T, num_kv_heads, dim] may be views with gaps between tokens or
    heads. `positions` and `locs`: int64 [T]. `cos_sin`: float32 [max_positions, dim], half a row of
    cosines, half a row of sines. `keys` and `values`: [slots, num_kv_heads, dim], contiguous, of
    the type of k or float8. Angles are applied in float32; results are rounded to the type of q,
    and what a float8 pool gets is clamped to 448 and rounded once more. dim: a power of two.
    """
    tokens, num_heads, dim = q.shape
    num_kv_heads = k.shape[1]
    is_float8 = keys.dtype == torch.float8_e4m3fn
    if is_float8:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    blocks = triton.cdiv(num_heads, HEADS) + triton.cdiv(num_kv_heads, HEADS)
    rotate_heads[(tokens, blocks)](
        q,
        k,
        v,
        positions,
        cos_sin,
        keys,
        values,
        locs,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=dim // 2,
        FLOAT8=is_float8,
        BLOCK=HEADS,
    )
