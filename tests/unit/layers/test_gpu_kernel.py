"""The products with quantized matrices on GPUs, by Triton's interpreter; tests/gpu runs them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.triton_interpreter import run_compiling, use_bfloat16, use_interpreter

use_interpreter()

from engine.device.distributed import ParallelState  # noqa: E402
from engine.layers import gpu_kernel, triton_kernels  # noqa: E402
from engine.layers.float8_groups import Float8Groups  # noqa: E402
from engine.layers.gpu_format import GpuFormat, GpuTable, format_on  # noqa: E402
from engine.layers.gpu_kernel import FUSED_ROWS, GpuKernel  # noqa: E402
from engine.layers.gpu_tile import TILES, Tile  # noqa: E402
from engine.layers.gpu_weight import Kind, can_pack, pack  # noqa: E402
from engine.layers.grouped import Grouped  # noqa: E402
from engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear  # noqa: E402
from engine.layers.weight_format import PlainFormat  # noqa: E402
from engine.layers.weights import SafetensorsSource  # noqa: E402
from tests.support.gpu_weights import CASES, Case, check_product, meant, rows_for  # noqa: E402
from tests.support.models import make_model  # noqa: E402
from tests.support.quantized import SIZES, make_forms, write  # noqa: E402

CPU = torch.device("cpu")
HALVES = (torch.float16, torch.bfloat16)
FORMS = make_forms()
KEPT = {
    **dict.fromkeys(("gptq", "gptq-2", "awq", "ct-w4", "ct-w4-zeros"), Kind.WHOLE4),
    **dict.fromkeys(("gptq-8-v2", "int8-bitsandbytes", "ct-int8", "ct-w8-channel"), Kind.WHOLE8),
    **dict.fromkeys(("modelopt-nvfp4", "ct-nvfp4", "ct-mxfp4"), Kind.FLOAT4),
    **dict.fromkeys(("fp8-blocks", "fp8-matrix", "fbgemm", "modelopt-fp8"), Kind.FLOAT8),
    **dict.fromkeys(("ct-fp8-channel", "ct-fp8-tensor", "ct-fp8-block"), Kind.FLOAT8),
}
"""Forms of tests/support whose matrices stay as they are."""


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    use_bfloat16(monkeypatch)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case: Case, dtype: torch.dtype) -> None:
    weight = case.weight(CPU)
    bias = torch.randn(case.outputs).to(dtype) if case.outputs % 2 else None
    kernel = GpuKernel([weight], bias)
    for num_rows in (0, 1, 2, 7, 16, 33):
        check_product(kernel, num_rows, dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("num_rows", [200, FUSED_ROWS + 1])
def test_many_rows(num_rows: int, dtype: torch.dtype) -> None:
    bias = torch.randn(72).to(dtype)
    kernel = GpuKernel([Case(4, 128, has_mins=True).weight(CPU)], bias)
    check_product(kernel, num_rows, dtype, is_plain=num_rows > FUSED_ROWS)


def test_many_rows_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that would be too large at once."""
    weights = [Case(4, 128).weight(CPU), Case("float8", 128, outputs=33).weight(CPU)]
    whole = GpuKernel(weights, torch.randn(105).half())
    wanted = check_product(whole, FUSED_ROWS + 1, torch.float16, is_plain=True)
    monkeypatch.setattr(gpu_kernel, "PLAIN_NUMBERS", 384 * 20)
    found = check_product(whole, FUSED_ROWS + 1, torch.float16, is_plain=True)
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("tile", [Tile(16, 32, 2, 2), Tile(32, 64, 4, 3)])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_inputs_may_be_split(splits: int, tile: Tile) -> None:
    """Also into more parts than there are chunks; the marks of who is there are 0 again."""
    for case in (Case(4, 64, has_mins=True), Case(8, 0)):
        weight = case.weight(CPU)
        x = rows_for(weight, 40, torch.float16)
        arrived = torch.zeros(9, dtype=torch.int32)
        found = torch.empty(40, case.outputs, dtype=torch.float16)
        for _ in range(2):
            triton_kernels.multiply(x, weight, None, found, arrived, tile, splits)
            wanted = x.double() @ meant(weight).t()
            assert (found.double() - wanted).abs().max() < 2e-3 * wanted.abs().max()
            assert not arrived.any()


def test_a_row_has_the_same_result_in_every_batch_of_a_tile() -> None:
    kernel = GpuKernel([Case(4, 32, inputs=2048).weight(CPU)], None)
    assert TILES[0].splits(kernel.weights[0]) > 1
    x = rows_for(kernel.weights[0], 16, torch.float16)
    found = kernel(x)
    for start, stop in ((0, 1), (3, 10), (15, 16)):
        assert torch.equal(kernel(x[start:stop]), found[start:stop])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_numbers(case: Case, dtype: torch.dtype) -> None:
    """Rounded once, for a product of many rows, and for an embedding, in any order."""
    weight = case.weight(CPU)
    kernel, exact = GpuKernel([weight], None), meant(weight)
    least = 0.0 if weight.mins is None else float(weight.mins.abs().max())
    wanted = exact.to(dtype)
    found = kernel.dequantize(dtype)
    tiny = 2.0**-24 * (exact.abs() + 2 * least) + 2.0**-25
    assert ((found.double() - exact).abs() <= (wanted.double() - exact).abs() + tiny).all()
    ids = torch.tensor([3, 0, 3, case.outputs - 1])
    assert torch.equal(GpuTable(kernel, dtype)(ids), found[ids])
    assert kernel.rows(ids[:0], dtype).shape == (0, case.inputs)
    assert kernel.rows(torch.tensor([1, case.outputs]), dtype).isnan().all(1).tolist() == [0, 1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_numbers_are_those_of_the_checkpoint(case: Case) -> None:
    source, weight = case.source(), case.weight(CPU)
    wanted = source.dequantize(torch.float32).double()
    assert weight.shape == source.shape
    # float16 scales, and minima, which are as large as numbers before they are taken off.
    largest = wanted.abs().max() + (0 if weight.mins is None else weight.mins.abs().max())
    torch.testing.assert_close(meant(weight), wanted, rtol=0, atol=float(largest) * 2**-10)


def test_what_has_no_kernel_is_left() -> None:
    numbers, scales = torch.zeros(4, 48, dtype=torch.uint8), torch.ones(4, 2)
    assert not can_pack(Grouped(numbers, 4, 8, 24, scales))
    floats = torch.ones(4, 48).to(torch.float8_e4m3fn)
    assert not can_pack(Float8Groups(floats, 24, scales))
    assert can_pack(Float8Groups(floats, 48, scales[:, :1]))
    floats[1, 3] = torch.nan
    assert not can_pack(Float8Groups(floats, 48, scales[:, :1]))


def test_scales_keep_their_range() -> None:
    """Those that float16 can't hold stay float32."""
    for factor, dtype in ((1.0, torch.float16), (1e-7, torch.float32), (1e6, torch.float32)):
        scales = torch.rand(4, 2) + 1.0
        part = Grouped(torch.ones(4, 64, dtype=torch.uint8), 4, 8, 32, scales * factor)
        weight = pack(part)
        assert weight.scales.dtype == dtype


def test_like_matrices_are_one() -> None:
    """Those of other groups or kinds are launches of their own."""
    cases = (Case(4, 32, outputs=64), Case(4, 32, outputs=33), Case(8, 32), Case(4, 64))
    weights = [case.weight(CPU, seed) for seed, case in enumerate(cases)]
    kernel = GpuKernel(weights, torch.randn(64 + 33 + 72 + 72).half())
    assert [weight.shape[0] for weight in kernel.weights] == [97, 72, 72]
    assert torch.equal(meant(kernel.weights[0]), torch.cat([meant(w) for w in weights[:2]]))
    check_product(kernel, 5, torch.float16)
    sizes = sum(weight.num_bytes for weight in weights)
    assert kernel.num_bytes == sizes < 1.3 * (97 * 192 + 72 * 384 + 72 * 192)


def test_the_format_is_for_gpus() -> None:
    assert type(format_on(CPU, torch.bfloat16)) is PlainFormat
    assert type(format_on(torch.device("cuda"), torch.float32)) is PlainFormat


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    return make_model(folder, "LlamaForCausalLM", **SIZES)


@pytest.fixture
def source_of(plain: Path, tmp_path: Path) -> Iterator[object]:
    def make(name: str) -> SafetensorsSource:
        quantized, _ = write(plain, FORMS[name], tmp_path / name)
        source = SafetensorsSource(quantized, torch.float16, CPU)
        source.format = GpuFormat(torch.float16)
        return source

    yield make


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("rank", [None, 1])
def test_layers_of_checkpoints(name: str, rank: int | None, source_of) -> None:  # type: ignore[no-untyped-def]
    """Rows and columns of a rank; what isn't kept is plain."""
    source = source_of(name)
    parallel = ParallelState.single() if rank is None else ParallelState(rank, 2, 0, 1)
    wide = MergedColumnParallelLinear(64, (192, 192), False, parallel)
    wide.load(source, ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"))
    tall = RowParallelLinear(192, 64, False, parallel)
    tall.load(source, "model.layers.0.mlp.down_proj")
    for layer, names in ((wide, ("gate_proj", "up_proj")), (tall, ("down_proj",))):
        kept = KEPT.get(name)
        if kept is None:
            assert not isinstance(layer.kernel, GpuKernel)
            continue
        assert isinstance(layer.kernel, GpuKernel)
        assert {weight.kind for weight in layer.kernel.weights} == {kept}
        parts: list[Tensor] = []
        for last in names:
            shape, dim = ((192, 64), 0) if layer is wide else ((64, 192), 1)
            count = shape[dim] if rank is None else shape[dim] // 2
            path = f"model.layers.0.mlp.{last}.weight"
            place = {"dim": dim, "start": 0 if rank is None else count, "count": count}
            parts.append(source.get(path, shape, **place))
        found, wanted = layer.kernel.dequantize(torch.float16), torch.cat(parts)
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-4)
        check_product(layer.kernel, 3, torch.float16)


_COMPILE = """
import subprocess, sys, tempfile
from itertools import product
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.layers import triton_kernels as kernels
from engine.layers.gpu_tile import TILES

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SIZES = ("x_row", "out_row", "inputs", "outputs")

def compile(kernel, types, constants, **options):
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    skipped = {names.index(name) for name in kernel.do_not_specialize if name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names) if name in types and i not in skipped
    }
    given = {(names.index(name),): value for name, value in constants.items()}
    given |= {(i,): None for i, name in enumerate(names) if name not in types | constants}
    source = ASTSource(kernel, signature, given, aligned)
    target = GPUTarget("cuda", 90, 32)
    binary = triton.compile(source, target=target, options=options).asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        print(subprocess.check_output([TOOL, "-res-usage", file.name], text=True))

for kind, bits, center, group, mins in ((0, 4, 8, 128, 0), (0, 4, 8, 32, 1), (1, 8, 128, 0, 0),
                                        (2, 4, 0, 16, 0), (3, 8, 0, 128, 0)):
    form = dict(KIND=kind, BITS=bits, CENTER=center, BF16=True, GROUP=group, HAS_MINS=bool(mins))
    types = dict(words="*i32", scales="*fp16", out="*bf16", inputs="i32", outputs="i32")
    if mins:
        types["mins"] = "*fp16"
    unit = min(group or 512 // bits, 512 // bits)
    for tile, experts in product(TILES, (0, 128) if kind in (0, 2) else (0,)):
        mixed = dict(ends="*i32", experts="i32") if experts else {}
        compile(
            kernels.multiply_codes,
            types | mixed | dict(x="*bf16", partials="*fp32", arrived="*i32", num_rows="i32",
                                 x_row="i32", out_row="i32"),
            form | dict(UNIT=unit, HAS_BIAS=False, IS_WHOLE=True, IS_SPLIT=True, EXPERTS=experts,
                        BLOCK_N=tile.outputs, BLOCK_M=tile.rows, STAGES=tile.stages),
            num_warps=tile.warps,
        )
    compile(
        kernels.decode_rows,
        types | dict(begin="i32", count="i32"),
        form | dict(HAS_IDS=False, BLOCK_N=kernels.DECODE_OUTPUTS),
    )
"""


def test_kernels_compile_for_hopper_and_keep_to_registers(tmp_path: Path) -> None:
    printed = run_compiling(_COMPILE, tmp_path)
    stacks = re.findall(r"\bREG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", printed)
    assert len(stacks) == 5 * (len(TILES) + 1) + 3 * len(TILES)
    assert all(int(stack) == int(local) == 0 for _, stack, local in stacks), printed
