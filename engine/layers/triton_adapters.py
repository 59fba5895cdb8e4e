"""Kernels of `engine.layers.slotted_adapters`, in Triton: x A^T, then that times B, row by row.

A program computes some of a row's numbers, from the matrices in the row's slot. It reads the slot
on the device, and no more of the matrices than the adapter's rank. A row's result is the same in
any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.layers.slotted_adapters import RANK_BLOCK, SlotMatrices

INNER_BLOCK = 256
"""Inputs that a program of the first product reads at once."""
OUTER_BLOCK = 128
"""Outputs of a program of the second product."""


@triton.jit
def _shrink(
    x,
    slots,
    ranks,
    a,
    inner,
    in_size,
    x_stride,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """inner [N, PARTS, RANK] = x A^T; it writes what the ranks hold alone."""
    row, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    part, first = block * BLOCK_R // RANK, block * BLOCK_R % RANK
    if slot >= 0:
        rank = tl.load(ranks + slot * PARTS + part)
        if first < rank:
            at = first + tl.arange(0, BLOCK_R)
            counts = at < rank
            lines = ((slot.to(tl.int64) * PARTS + part) * RANK + at) * in_size
            sums = tl.zeros([BLOCK_R], tl.float32)
            for k in range(0, in_size, BLOCK_K):
                ks = k + tl.arange(0, BLOCK_K)
                inside = ks < in_size
                given = tl.load(x + row.to(tl.int64) * x_stride + ks, mask=inside, other=0.0)
                mask = counts[:, None] & inside[None, :]
                matrix = tl.load(a + lines[:, None] + ks[None, :], mask=mask, other=0.0)
                sums += tl.sum(matrix.to(tl.float32) * given.to(tl.float32)[None, :], 1)
            tl.store(inner + (row.to(tl.int64) * PARTS + part) * RANK + at, sums, mask=counts)


@triton.jit
def _expand(
    y,
    inner,
    slots,
    ranks,
    b,
    part,
    size,
    y_stride,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """y [N, size] += inner[:, part] B"""
    row, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        rank = tl.load(ranks + slot * PARTS + part)
        if rank > 0:
            outs = block * BLOCK_O + tl.arange(0, BLOCK_O)
            inside = outs < size
            sums = tl.zeros([BLOCK_O], tl.float32)
            for r in range(0, rank, BLOCK_R):
                at = r + tl.arange(0, BLOCK_R)
                counts = at < rank
                place = inner + (row.to(tl.int64) * PARTS + part) * RANK + at
                given = tl.load(place, mask=counts, other=0.0)
                lines = (slot.to(tl.int64) * RANK + at) * size
                mask = counts[:, None] & inside[None, :]
                matrix = tl.load(b + lines[:, None] + outs[None, :], mask=mask, other=0.0)
                sums += tl.sum(matrix.to(tl.float32) * given[:, None], 0)
            place = y + row.to(tl.int64) * y_stride + outs
            before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            tl.store(place, (before + sums).to(y.dtype.element_ty), mask=inside)


def add_rows(y: Tensor, x: Tensor, slots: Tensor, matrices: SlotMatrices) -> None:
    """Add to y [N, out], in place, what the adapters in `slots` int32 [N], -1 for none, make of
    x [N, in]. Rows of x and y are contiguous. Nothing waits for the device."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    _, parts, rank, in_size = matrices.a.shape
    inner = torch.empty((len(x), parts, rank), dtype=torch.float32, device=x.device)
    sizes = {"PARTS": parts, "RANK": rank, "BLOCK_R": RANK_BLOCK}
    _shrink[len(x), parts * rank // RANK_BLOCK](
        x, slots, matrices.ranks, matrices.a, inner, in_size, x.stride(0), **sizes,
        BLOCK_K=INNER_BLOCK,
    )  # fmt: skip
    start = 0
    for part, b in enumerate(matrices.b):
        size = b.shape[2]
        _expand[len(x), triton.cdiv(size, OUTER_BLOCK)](
            y.narrow(1, start, size), inner, slots, matrices.ranks, b, part, size, y.stride(0),
            **sizes, BLOCK_O=OUTER_BLOCK,
        )  # fmt: skip
        start += size
