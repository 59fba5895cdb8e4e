"""The kernels around FlashInfer's attention on a GPU; tests/unit/attention interprets them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from engine.attention import triton_kernels
from tests.support.attention_kernels import FP8, Heads, Rotation, check_page_indices

CUDA = torch.device("cuda")
SHAPES = [(32, 8, 128), (8, 8, 64), (9, 3, 256), (64, 1, 128)]


@pytest.mark.parametrize("pool", ["same", "float8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotation_and_store(shape: tuple[int, int, int], dtype: torch.dtype, pool: str) -> None:
    torch.manual_seed(0)
    sizes = Heads(*shape, dtype, dtype if pool == "same" else FP8)
    for tokens, padding in ((1, 0), (7, 3), (300, 0), (4096, 0), (0, 0)):
        case = Rotation(sizes, tokens, CUDA, padding=padding)
        case.run(triton_kernels)
        case.check()


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, FP8], ids=str)
def test_rotation_in_a_graph(pool_dtype: torch.dtype) -> None:
    """With other values, positions and slots than those of the capture."""
    case = Rotation(Heads(32, 8, 128, torch.bfloat16, pool_dtype), 64, CUDA, padding=5)
    graph = captured(lambda: case.run(triton_kernels))
    for _ in range(3):
        case.fill(torch.randn_like(case.whole) * 100)
        case.positions.random_(0, 512)
        case.locs[: case.real] = torch.randperm(len(case.keys) - 1, device=CUDA)[: case.real] + 1
        for pool in (case.keys, case.values):
            pool.copy_(torch.full(pool.shape, -7.0))
        torch.cuda.synchronize()
        graph.replay()
        case.check()


def captured(run: Any) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [None, 1, 100, 4096])
def test_page_indices(page_size: int, window: int | None) -> None:
    numbers = random.Random(0)
    for count in (1, 3, 256, 2000):
        lengths = []
        for _ in range(count):
            new = numbers.randint(1, 30)
            lengths.append((max(new, numbers.randint(0, 3000)), new))
        check_page_indices(triton_kernels, lengths, window, page_size, CUDA)
    lengths = [(100_000, 1), (0, 1), (7, 7), *[(1, 1)] * 30]
    check_page_indices(triton_kernels, lengths, window, page_size, CUDA)


def test_float8_keeps_nan_and_clamps() -> None:
    case = Rotation(Heads(1, 1, 1024, torch.float16, FP8), 64, CUDA)
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    numbers = torch.where(numbers.isnan(), torch.nan, numbers)
    values = torch.zeros_like(case.whole)
    values[:, 2] = numbers.view(64, 1024).to(CUDA)
    case.fill(values)
    case.run(triton_kernels)
    case.check()
