"""Adapters on GPUs row by row, by Triton's interpreter, and compiled for Hopper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.triton_interpreter import run_compiling, use_bfloat16, use_interpreter

use_interpreter()

from engine.device.adapter_rows import AdapterRows  # noqa: E402
from engine.layers import triton_adapters  # noqa: E402
from engine.layers.adapted import Factors  # noqa: E402
from engine.layers.slotted_adapters import SlottedAdapters  # noqa: E402

CPU = torch.device("cpu")
SLOTS, SIZES = 4, (130, 33, 1)


@pytest.fixture(autouse=True)
def bfloat16() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        use_bfloat16(patch)
        yield


def factors(rank: int, in_size: int, size: int, dtype: torch.dtype) -> Factors:
    a = torch.randn((rank, in_size)).to(dtype)
    return a, (torch.randn((rank, size)) * 0.1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("in_size", "max_rank"), [(300, 20), (16, 64), (513, 1)])
def test_rows_have_what_their_adapters_add(in_size: int, max_rank: int, dtype: torch.dtype) -> None:
    torch.manual_seed(in_size)
    adapters = SlottedAdapters(
        in_size, SIZES, SLOTS, max_rank, torch.empty(0, dtype=dtype), by_triton=True
    )
    sizes: dict[int, list[int]] = {
        0: [max_rank, 1, 0],
        1: [0, 0, max_rank],
        2: [min(17, max_rank)] * 3,
    }
    for ranks in ([max_rank] * 3, sizes[0]):  # a larger one leaves something behind
        adapters.set(0, make(ranks, in_size, dtype))
    held = {0: make(sizes[0], in_size, dtype)}
    adapters.set(0, held[0])
    for slot in (1, 2):
        held[slot] = make(sizes[slot], in_size, dtype)
        adapters.set(slot, held[slot])
    host = np.array([2, -1, 0, 1, 3, 2, 0], np.int32)
    x = torch.randn((len(host), in_size)).to(dtype)
    y = torch.randn((len(host), sum(SIZES))).to(dtype)
    wanted = y.float()
    for row, slot in enumerate(host.tolist()):
        start = 0
        for size, part in zip(SIZES, held.get(slot, [None] * 3), strict=True):
            if part is not None:
                a, b = (matrix.float() for matrix in part)
                wanted[row, start : start + size] += x[row].float() @ a.t() @ b
            start += size
    alone = y[2:3].clone()
    adapters.add(y, x, AdapterRows.of(host, CPU))
    wanted = wanted.to(dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(y, wanted, rtol=tolerance, atol=tolerance)
    adapters.add(alone, x[2:3], AdapterRows.of(host[2:3], CPU))
    assert torch.equal(alone, y[2:3]), "a row's result is the same in any batch"


def make(ranks: list[int], in_size: int, dtype: torch.dtype) -> list[Factors | None]:
    return [
        factors(rank, in_size, size, dtype) if rank else None
        for rank, size in zip(ranks, SIZES, strict=True)
    ]


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.layers import triton_adapters as kernels

def compile(kernel, types, constants):
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in types}
    constants = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constants, aligned)
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(kernel.__name__)

sizes = dict(PARTS=3, RANK=64, BLOCK_R=kernels.RANK_BLOCK)
for dtype in ("*bf16", "*fp16"):
    shared = dict(slots="*i32", ranks="*i32", inner="*fp32")
    compile(
        kernels._shrink,
        dict(x=dtype, a=dtype, in_size="i32", x_stride="i32", **shared),
        dict(BLOCK_K=kernels.INNER_BLOCK, **sizes),
    )
    compile(
        kernels._expand,
        dict(y=dtype, b=dtype, part="i32", size="i32", y_stride="i32", **shared),
        dict(BLOCK_O=kernels.OUTER_BLOCK, **sizes),
    )
"""


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    printed = run_compiling(_COMPILE, tmp_path)
    names = [kernel.__name__ for kernel in (triton_adapters._shrink, triton_adapters._expand)]
    assert printed.split() == names * 2
