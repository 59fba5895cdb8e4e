"""What the kernels of `engine.attention.triton_kernels` do, in plain torch and as strict."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

from engine.device import triton_loader


def page_indices(
    packed: Tensor,
    num_rows: int,
    longest: int,
    req_to_token: Tensor,
    page_size: int,
    out: Tensor,
) -> None:
    assert packed.dtype == req_to_token.dtype == out.dtype == torch.int32
    assert packed.is_contiguous() and req_to_token.is_contiguous() and out.is_contiguous()
    indptr = packed[0, : num_rows + 1].tolist()
    assert len(out) == indptr[-1]
    rows, firsts = packed[2, :num_rows].tolist(), packed[3, :num_rows].tolist()
    counts = [end - begin for begin, end in pairwise(indptr)]
    assert longest == max(counts, default=0)
    for begin, count, row, first in zip(indptr, counts, rows, firsts, strict=False):
        slots = req_to_token[row, first : first + count * page_size : page_size]
        out[begin : begin + count] = slots // page_size


def rotated(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """x [T, heads, dim]: in float32, rounded once."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, -1)
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


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
    assert positions.dtype == locs.dtype == torch.int64
    assert positions.is_contiguous() and locs.is_contiguous()
    assert cos_sin.dtype == torch.float32 and cos_sin.is_contiguous()
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert keys.dtype == values.dtype and keys.dtype in (q.dtype, torch.float8_e4m3fn)
    assert keys.is_contiguous() and values.is_contiguous()
    assert keys.shape[1:] == values.shape[1:] == k.shape[1:] == v.shape[1:]
    q.copy_(rotated(q, positions, cos_sin))
    for pool, new in ((keys, rotated(k, positions, cos_sin)), (values, v)):
        if pool.dtype == torch.float8_e4m3fn:
            limit = torch.finfo(pool.dtype).max
            stored = new.clamp(-limit, limit).to(pool.dtype).view(torch.uint8)
            pool.view(torch.uint8).index_copy_(0, locs, stored)
        else:
            pool.index_copy_(0, locs, new.contiguous())


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the attention backend find these."""
    name = "engine.attention.triton_kernels"
    module = ModuleType(name)
    for function in (page_indices, rotate_and_store):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(triton_loader, "lack_of_triton", lambda: "")
