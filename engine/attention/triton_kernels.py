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
def _store(at, x, mask, LIMIT: tl.constexpr):
    """Clamped first for types that make NaN of what is beyond their range. A NaN stays one."""
    if LIMIT > 0:
        wide = x.to(tl.float32)
        wide = tl.where(wide > LIMIT, LIMIT, wide)
        wide = tl.where(wide < -LIMIT, -LIMIT, wide)
        tl.store(at, wide.to(at.dtype.element_ty), mask=mask)
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
    LIMIT: tl.constexpr,
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
        _store(keys + to, k_first, inside, LIMIT)
        _store(keys + to + HALF, k_second, inside, LIMIT)
        v_at = v + token * v_token + kv_head * v_head + lanes
        _store(values + to, tl.load(v_at, mask=inside, other=0.0), inside, LIMIT)
        _store(values + to + HALF, tl.load(v_at + HALF, mask=inside, other=0.0), inside, LIMIT)


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
    and what a float8 pool gets is clamped and rounded once more. dim: a power of two.
    """
    tokens, num_heads, dim = q.shape
    num_kv_heads = k.shape[1]
    limit = torch.finfo(keys.dtype).max if keys.element_size() == 1 else 0.0
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
        LIMIT=limit,
        BLOCK=HEADS,
    )
