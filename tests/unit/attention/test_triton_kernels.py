"""The kernels around FlashInfer's attention, by Triton's interpreter; tests/gpu runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.triton_interpreter import run_compiling, use_interpreter

use_interpreter()

from engine.attention import triton_kernels  # noqa: E402
from tests.support.attention_kernels import (  # noqa: E402
    FP8,
    Heads,
    Rotation,
    check_page_indices,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("pool", ["same", "float8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 1, 64), (8, 8, 64), (12, 3, 128), (9, 3, 256)]
)
def test_rotation_and_store(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, pool: str
) -> None:
    torch.manual_seed(heads)
    pool_dtype = dtype if pool == "same" else FP8
    for tokens, padding in ((1, 0), (5, 2), (0, 0)):
        case = Rotation(
            Heads(heads, kv_heads, dim, dtype, pool_dtype), tokens, CPU, padding=padding
        )
        case.run(triton_kernels)
        case.check()


@pytest.mark.parametrize("pool_dtype", [torch.float16, FP8], ids=str)
def test_a_nan_stays_one(pool_dtype: torch.dtype) -> None:
    case = Rotation(Heads(4, 2, 64, torch.float16, pool_dtype), 3, CPU)
    values = case.whole.clone()
    values[1, 4, 7] = values[1, 6, 9] = torch.nan  # of a key and of a value
    case.fill(values)
    case.run(triton_kernels)
    case.check()
    # A rotation mixes two numbers of a key.
    assert [int(x.float().isnan().sum()) for x in (case.keys, case.values)] == [2, 1]


def test_float8_has_the_bits_of_torch() -> None:
    """Of every float16 number."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    numbers = torch.where(numbers.isnan(), torch.nan, numbers)
    case = Rotation(Heads(1, 1, 1024, torch.float16, FP8), 64, CPU)
    values = torch.zeros_like(case.whole)
    values[:, 2] = numbers.view(64, 1024)
    case.fill(values)
    case.run(triton_kernels)
    case.check()


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda n: (max(n), n[1])),
        min_size=1,
        max_size=7,
    ),
    window=st.sampled_from([None, 1, 5, 16, 33]),
    page_size=st.sampled_from([1, 4, 16]),
)
def test_page_indices(lengths: list[tuple[int, int]], window: int | None, page_size: int) -> None:
    check_page_indices(triton_kernels, lengths, window, page_size, CPU)


@pytest.mark.parametrize("programs", [1, 1024])
@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_longer_than_a_block(
    monkeypatch: pytest.MonkeyPatch, programs: int, page_size: int
) -> None:
    monkeypatch.setattr(triton_kernels, "PAGES", 64)
    monkeypatch.setattr(triton_kernels, "PROGRAMS", programs)
    lengths = [(1, 1), (64, 1), (65, 3), (0, 1), (4000, 7), (128, 1)]
    check_page_indices(triton_kernels, lengths, None, page_size, CPU)


_COMPILE = """
import subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.attention import triton_kernels as kernels

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

def compile(kernel, types, constants):
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    skipped = {names.index(name) for name in kernel.do_not_specialize if name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names) if name in types and i not in skipped
    }
    constants = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constants, aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        print(subprocess.check_output([TOOL, "-res-usage", file.name], text=True))

for page_size in (1, 16):
    compile(
        kernels.find_pages,
        dict(packed="*i32", req_to_token="*i32", out="*i32", stride="i32", width="i32"),
        dict(PAGE_SIZE=page_size, BLOCK=kernels.PAGES),
    )
strides = ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")
for dtype, pool in (("bf16", "bf16"), ("fp16", "u8")):
    for dim in (64, 128, 256):
        types = dict.fromkeys(("q", "k", "v"), "*" + dtype)
        types |= dict.fromkeys(("keys", "values"), "*" + pool)
        types |= dict(positions="*i64", locs="*i64", cos_sin="*fp32")
        types |= dict.fromkeys(strides, "i32")
        sizes = dict(NUM_HEADS=32, NUM_KV_HEADS=8, HALF=dim // 2, FLOAT8=pool == "u8")
        compile(kernels.rotate_heads, types, sizes | dict(BLOCK=kernels.HEADS))
"""


def test_kernels_compile_for_hopper_and_keep_to_registers(tmp_path: Path) -> None:
    printed = run_compiling(_COMPILE, tmp_path)
    stacks = re.findall(r"\bREG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", printed)
    assert len(stacks) == 8
    assert all(int(stack) == int(local) == 0 for _, stack, local in stacks), printed
