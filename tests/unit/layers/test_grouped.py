"""Weights of 4 to 8 bits: how exact they are, what their kernel computes, how they are split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.quality import compare, predictions
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weight_formats import check_form
from engine.device.distributed import ParallelState
from engine.errors import ConfigError
from engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from engine.layers.embedding_table import RowTable
from engine.layers.grouped import QUANTIZED_ROWS, Grouped, quantize
from engine.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from engine.layers.linear_kernel import GroupedKernel, LinearKernel
from engine.layers.weight_format import (
    MatrixSlice,
    NativeFormat,
    PlainFormat,
    QuantizedFormat,
    WeightFormat,
)
from engine.layers.weights import DummySource, WeightSource
from engine.models.llama import EMBEDDING, LlamaModel
from engine.models.loader import load_model
from engine.native.compiler import ISA_FLAGS
from engine.registry import KERNELS
from engine.worker.sizing.estimate import stage_weight_bytes
from tests.support.kernels import F32_ERROR, TYPES, Numbers, load_kernels, same_bits
from tests.support.kernels import torch_threads as threads
from tests.support.models import changed, make_config, make_model

CPU = torch.device("cpu")
SINGLE = ParallelState.single()
CARRIED = Path(__file__).parents[3] / "models" / "manta-small"


@pytest.fixture
def kernels() -> Any:
    return load_kernels()


@pytest.fixture(params=tuple(ISA_FLAGS))
def isa(request: pytest.FixtureRequest, kernels: Any) -> Iterator[str]:
    if request.param not in kernels.available():
        pytest.skip(f"there is no {request.param} here")
    before = kernels.isa()
    kernels.use(request.param)
    yield request.param
    kernels.use(before)


def source_of(form: WeightFormat, dtype: torch.dtype = torch.float32) -> WeightSource:
    source = DummySource(0, dtype, CPU)
    source.format = form
    return source


def grouped(
    out: int, inputs: int, bits: int, group: int, *, mins: bool, codes: bool, seed: int = 0
) -> Grouped:
    """Random numbers of each bit, with scales and minima of all sizes."""
    generator = torch.Generator().manual_seed(seed)

    def halves(columns: int) -> Tensor:
        return (torch.rand(out, columns, generator=generator) * 0.02 + 0.001).half()

    def small() -> Tensor:
        shape = (out, inputs // group)
        return torch.randint(-64, 64, shape, generator=generator, dtype=torch.int8)

    columns = inputs // (inputs if codes else group)
    return Grouped(
        torch.randint(0, 1 << bits, (out, inputs), generator=generator, dtype=torch.uint8),
        bits,
        0 if mins else 1 << (bits - 1),
        group,
        halves(columns),
        halves(columns) if mins else None,
        small() if codes else None,
        small() if codes and mins else None,
    )


def assert_product(
    found: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    is_exact: bool = False,
) -> None:
    """`found` is x W^T + bias but for float32's rounding, that of the result and, unless x
    `is_exact`, that of x beside the largest of its 128 neighbours."""
    x, weight = x.double(), weight.double()
    expected, size = x @ weight.t(), x.abs() @ weight.abs().t()
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    slack = torch.zeros_like(size)
    if not is_exact and (found.dtype != torch.float32 or bias is None or bias.dtype != found.dtype):
        for begin in range(0, x.shape[1], 128):
            part = slice(begin, begin + 128)
            largest = x[:, part].abs().amax(1, keepdim=True)
            slack += largest * weight[:, part].abs().sum(1) * 2.0**-13
    rounding = torch.finfo(found.dtype).eps * expected.abs()
    assert ((found.double() - expected).abs() <= size * F32_ERROR + slack + rounding).all()


def in_8_bits(x: Tensor, size: int) -> Tensor:
    """float64: x as products with `short_inputs` see it, each `size` neighbours with one scale."""
    parts = x.float().view(len(x), -1, size)
    most = parts.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(most, 127.0) / most  # `127.0 / most` is rounded twice
    numbers = torch.where(most > 0, (parts * inverse).round(), 0.0)
    return (numbers.double() * (most / 127.0).double()).view(x.shape)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", TYPES)
def test_weights_are_off_by_steps(dtype: torch.dtype, bits: int) -> None:
    """Also across blocks of rows, in groups of zeros, and of numbers near a type's limits."""
    numbers = Numbers(1)
    weight = numbers.normal((2 * QUANTIZED_ROWS + 3, 96), dtype)
    weight[5], weight[QUANTIZED_ROWS, 32:] = 0.0, 0.0
    weight[7] *= torch.finfo(dtype).smallest_normal
    weight[9] *= torch.finfo(dtype).max * 0.9 / weight[9].abs().max().float()
    found = quantize(weight, bits)
    assert (found.bits, found.center, found.group) == (bits, 1 << (bits - 1), 32)
    by_group = weight.double().view(len(weight), 3, 32)
    error = (found.dequantize(torch.float64).view_as(by_group) - by_group).abs()
    step = found.group_scales().double().abs().unsqueeze(-1)
    # Of 4 bits the largest numbers may be cut off, for the sake of the others.
    assert (error <= step * (0.501 if bits == 8 else 2.0) + 2.0**-145).all()
    least = by_group.abs().amax(-1, keepdim=True) / (127 if bits == 8 else 5.5)
    assert (step <= least * 1.001 + 2.0**-145).all()
    assert (found.dequantize(torch.float32)[5] == 0).all()


def test_scales_are_halves_where_they_can_be() -> None:
    weight = Numbers(2).normal((8, 64), torch.float32)
    assert quantize(weight, 8).scales.dtype == torch.float16
    assert quantize(weight * 1e-6, 8).scales.dtype == torch.float32
    assert quantize(weight * 1e9, 4).scales.dtype == torch.float32
    assert quantize(weight[:, :48], 4).group == 16


def test_four_bits_take_the_best_of_their_steps() -> None:
    weight = Numbers(3).normal((64, 256), torch.float32)
    found = quantize(weight, 4)
    by_group = weight.view(64, 8, 32)
    place = by_group.abs().argmax(-1, keepdim=True)
    simple = -by_group.gather(-1, place) / 8
    rounded = (by_group / simple).round().clamp(-8, 7) * simple
    error = (found.dequantize(torch.float32) - weight).square().sum()
    assert error < 0.94 * (rounded - by_group).square().sum()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_in_its_output_only(kernels: Any, wrong: float, bits: int) -> None:
    weight = torch.ones(5, 32)
    weight[3, 2] = wrong
    out = GroupedKernel([quantize(weight, bits)], None)(torch.ones(2, 32))
    assert out[:, 3].isnan().all() and out[:, [0, 1, 2, 4]].isfinite().all()
    x = torch.ones(3, 32)
    x[1, 30] = wrong
    out = GroupedKernel([quantize(torch.ones(5, 32), bits)], None)(x)
    assert out[1].isnan().all() and (out[[0, 2]] == out[0]).all() and out[0].isfinite().all()


GROUPS = [(16, False, True), (32, False, False), (32, True, True), (128, True, False)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize(("group", "mins", "codes"), GROUPS)
def test_kernel_multiplies_by_the_quantized_weight(
    isa: str, dtype: torch.dtype, bits: int, group: int, mins: bool, codes: bool
) -> None:
    for out, inputs, rows in ((1, group, 1), (37, 3 * group, 2), (64, 128, 3), (131, 384, 33)):
        part = grouped(out, inputs, bits, group, mins=mins, codes=codes, seed=rows)
        numbers = Numbers(rows)
        bias = numbers.normal((out,), dtype) if rows != 2 else None
        kernel, weight = GroupedKernel([part], bias), part.dequantize(torch.float32)
        x = numbers.with_gap((rows, inputs), dtype, 8)
        assert kernel(x).dtype == dtype and kernel.logits(x).dtype == torch.float32
        assert_product(kernel(x), x, weight, bias)
        assert_product(kernel.logits(x), x, weight, bias)
        ids = torch.arange(out - 1, -1, -3)
        found = kernel.rows(ids, torch.empty(0, dtype=dtype))
        wanted = weight[ids].to(dtype)
        assert torch.allclose(found.float(), wanted.float(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize(("group", "mins", "codes"), GROUPS)
def test_inputs_of_8_bits(
    isa: str, dtype: torch.dtype, bits: int, group: int, mins: bool, codes: bool
) -> None:
    """Exactly the numbers that they are rounded to, also at both ends of each byte."""
    for out, inputs, rows in ((1, group, 1), (37, 3 * group, 2), (64, 128, 7), (131, 384, 33)):
        part = grouped(out, inputs, bits, group, mins=mins, codes=codes, seed=rows)
        part.numbers[0] = (1 << bits) - 1
        numbers = Numbers(rows)
        bias = numbers.normal((out,), torch.float32) if rows != 2 else None
        x = numbers.with_gap((rows, inputs), dtype, 8)
        x[0] = -x[0].abs().max()
        size = 16 if group == 16 else 32
        kernel = GroupedKernel([part], None if bias is None else bias.to(dtype), True)
        weight = part.dequantize(torch.float64)
        assert_product(kernel.logits(x), in_8_bits(x, size), weight, kernel.bias, is_exact=True)
        assert kernel(x).dtype == dtype


def test_odd_inputs_of_8_bits(isa: str) -> None:
    """Zeros, numbers that are nearly 0 beside others, the largest, and what is not finite."""
    part = grouped(70, 64, 8, 32, mins=False, codes=False)
    kernel, weight = GroupedKernel([part], None, True), part.dequantize(torch.float64)
    x = torch.zeros(6, 64)
    x[1, 3], x[1, 40], x[2], x[3] = 1e-38, 1.0, 1e-31, 3e38
    x[4, 5], x[5, 63] = torch.inf, torch.nan
    found = kernel.logits(x)
    assert (found[[0, 2]] == 0).all() and found[[4, 5]].isnan().all()
    assert torch.allclose(found[1].double(), weight[:, 40], rtol=1e-6)
    assert found[3].isfinite().any()  # sums of the others are beyond float32


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_large_inputs_of_one_sign(isa: str, dtype: torch.dtype, bits: int) -> None:
    """Their sums times a center are the largest numbers there are."""
    part = grouped(40, 256, bits, 32, mins=False, codes=False)
    for value in (1.0, 1.99, -1.99):
        x = torch.full((3, 256), value, dtype=dtype)
        assert_product(GroupedKernel([part], None).logits(x), x, part.dequantize(torch.float32))


def test_matrices_of_one_input_are_one_product(isa: str) -> None:
    """Of different bits, groups and sizes."""
    parts = [
        grouped(100, 256, 4, 32, mins=True, codes=True),
        grouped(7, 256, 6, 16, mins=False, codes=True, seed=1),
        grouped(64, 256, 8, 128, mins=False, codes=False, seed=2),
    ]
    x, bias = Numbers(4).normal((5, 256), torch.float32), Numbers(5).normal((171,), torch.float32)
    found = GroupedKernel(parts, bias)(x)
    assert_product(found, x, torch.cat([part.dequantize(torch.float32) for part in parts]), bias)


@pytest.mark.parametrize("short_inputs", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_a_row_has_the_same_bits_in_any_batch(
    isa: str, dtype: torch.dtype, bits: int, short_inputs: bool
) -> None:
    numbers = Numbers(5)
    part = grouped(300, 512, bits, 32, mins=bits == 4, codes=False)
    kernel = GroupedKernel([part], numbers.normal((300,), dtype), short_inputs)
    x = numbers.normal((200, 512), dtype)
    whole = kernel(x)
    for count in (1, 2, 3, 4, 5, 7, 13, 32, 96, 97, 199):
        for number in (1, 2, 3):
            with threads(number):
                assert same_bits(kernel(x[-count:]), whole[-count:])


@pytest.mark.parametrize("short_inputs", [False, True])
@pytest.mark.parametrize("bits", [5, 8])
@pytest.mark.parametrize("dtype", TYPES)
def test_all_instruction_sets_give_the_same_bits(
    kernels: Any, dtype: torch.dtype, bits: int, short_inputs: bool
) -> None:
    part = grouped(70, 256, bits, 32, mins=True, codes=True)
    x, before, found = Numbers(6).normal((9, 256), dtype), kernels.isa(), []
    for name in kernels.available():
        kernels.use(name)
        found.append(GroupedKernel([part], None, short_inputs).logits(x))
    kernels.use(before)
    assert all(same_bits(each, found[0]) for each in found)


def test_packed_for_another_instruction_set_is_refused(kernels: Any) -> None:
    if "avx512" not in kernels.available():
        pytest.skip("one width of vectors only")
    kernel = GroupedKernel([grouped(4, 32, 4, 32, mins=False, codes=False)], None)
    before = kernels.isa()
    kernels.use("avx2")
    try:
        with pytest.raises(RuntimeError, match="another instruction set"):
            kernel(torch.ones(1, 32))
    finally:
        kernels.use(before)


FORMATS = [PlainFormat(), NativeFormat(), QuantizedFormat(8), QuantizedFormat(4)]


@pytest.mark.parametrize(
    "form", FORMATS, ids=lambda form: f"{type(form).__name__}{getattr(form, 'bits', '')}"
)
def test_formats_load_slices(kernels: Any, form: WeightFormat) -> None:
    """`load` reads what the layers do: rows of several matrices, or columns of one."""
    x, parallel = Numbers(7).normal((4, 64), torch.float32), ParallelState(1, 2, 0, 1)
    source = source_of(form)
    merged = MergedColumnParallelLinear(64, (32, 96), True, parallel)
    merged.load(source, ("gate", "up"))
    slices = [MatrixSlice("gate", 32, 64, 0, 16, 16), MatrixSlice("up", 96, 64, 0, 48, 48)]
    bias = torch.cat([source.get(f"{s.name}.bias", (s.out_size,))[s.start :] for s in slices])
    assert same_bits(form.load(source, slices, bias)(x), merged.kernel(x))
    row = RowParallelLinear(128, 32, False, parallel)
    row.load(source, "down")
    kernel = form.load(source, [MatrixSlice("down", 32, 128, 1, 64, 64)], None)
    assert same_bits(kernel(x), row.kernel(x))


@pytest.mark.parametrize("tp_size", [2, 4])
def test_tensor_parallel_slices(kernels: Any, tp_size: int) -> None:
    """Rows have the same scales on any rank, so the same bits. Slices of columns may have groups of
    their own: each rank is as exact as one rank would be."""
    source = source_of(QuantizedFormat(8))
    config = replace(ModelConfig.from_pretrained(CARRIED), num_heads=4, num_kv_heads=4)
    states = [ParallelState(rank, tp_size, 0, 1) for rank in range(tp_size)]
    x = Numbers(8).normal((5, config.hidden_size), torch.float32)

    def qkv(parallel: ParallelState) -> list[Tensor]:
        layer = QKVParallelLinear(config, parallel)
        layer.load(source, ("q", "k", "v"))
        return list(layer.kernel(x).split(list(layer.local_sizes), dim=1))

    whole, parts = qkv(SINGLE), [qkv(state) for state in states]
    for i, projection in enumerate(whole):
        assert same_bits(torch.cat([part[i] for part in parts], 1), projection)

    def down(form: WeightFormat, parallel: ParallelState) -> Tensor:
        layer = RowParallelLinear(config.hidden_size, 96, False, parallel)
        layer.load(source_of(form), "down")
        return layer.kernel(x.chunk(parallel.tp_size, 1)[parallel.tp_rank])

    exact = down(NativeFormat(), SINGLE)
    summed = torch.stack([down(QuantizedFormat(8), state) for state in states]).sum(0)
    alone = down(QuantizedFormat(8), SINGLE)
    weight = source.get("down.weight", (96, config.hidden_size))
    half_step = weight.abs().amax(1) / 254
    bound = x.abs().sum(1, keepdim=True) * half_step * 1.001 + 1e-4
    assert ((summed - exact).abs() <= bound).all() and ((alone - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_is_the_same_on_a_stage_of_its_own(kernels: Any, dtype: torch.dtype) -> None:
    """One stage shares the embedding's table, the last of several reads its own."""
    source, x = source_of(QuantizedFormat(8), dtype), Numbers(9).normal((3, 32), dtype)
    embedding = VocabParallelEmbedding(211, 32, SINGLE)
    tied, own = ParallelLMHead(211, 32, SINGLE), ParallelLMHead(211, 32, SINGLE)
    embedding.load_tied(source, EMBEDDING, tied, EMBEDDING)
    own.load(source, EMBEDDING)
    assert same_bits(tied(x), own(x))
    assert same_bits(embedding(torch.tensor([7])), source.get(EMBEDDING, (211, 32))[7:8])


def linears_of(model: LlamaModel) -> list[LinearKernel]:
    kernels = [] if model.head is None else [model.head.kernel]
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        kernels += [part.kernel for part in (attention.qkv, attention.o, mlp.gate_up, mlp.down)]
    return kernels


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_sizes_are_those_in_memory(kernels: Any, tied: bool, dtype: str, form: str) -> None:
    """On one rank and on both stages of two by two; no matrix but the table stays as it was."""
    config = make_config(CARRIED, dtype=dtype, attention_backend="cpu", quantization=form)
    shape = replace(config.model, tie_word_embeddings=tied)
    config = changed(config, model=shape, load_format="dummy")
    for parallel in (SINGLE, ParallelState(0, 2, 0, 2), ParallelState(1, 2, 1, 2)):
        model = load_model(config, parallel, CPU)
        taken = 0
        if model.embedding is not None:
            assert isinstance(model.embedding.table, RowTable)
            taken = model.embedding.table.weight.nbytes
        for kernel in linears_of(model):
            assert isinstance(kernel, GroupedKernel) and kernel.bias is None
            taken += kernel.num_bytes
        # Rows that fill a panel up are not counted.
        assert stage_weight_bytes(config, parallel) <= taken
        assert taken <= stage_weight_bytes(config, parallel) * 1.15
        assert taken < stage_weight_bytes(changed(config, quantization="auto"), parallel)


@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_any_plain_checkpoint_is_quantized(
    kernels: Any, tmp_path: Path, stored: torch.dtype, form: str
) -> None:
    folder = make_model(tmp_path / "model", "LlamaForCausalLM")
    weights = {name: w.to(stored) for name, w in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    config = make_config(folder, attention_backend="cpu", quantization=form)
    model = load_model(config, SINGLE, CPU)
    kernel = model.layers[1].mlp.down.kernel
    assert isinstance(kernel, GroupedKernel)
    whole = quantize(weights["model.layers.1.mlp.down_proj.weight"], int(form[-1]))
    found = kernel.rows(torch.arange(whole.shape[0]), torch.empty(0))
    assert torch.equal(found, whole.dequantize(torch.float32))


def test_formats_by_name() -> None:
    def form(kernels: str, quantization: str, dtype: torch.dtype = torch.float32) -> WeightFormat:
        made: WeightFormat = KERNELS[kernels].weight_format(quantization, CPU, dtype)
        return made

    assert type(form("cpu", "auto")) is NativeFormat
    assert type(form("torch", "auto", torch.bfloat16)) is PlainFormat
    for bits in (4, 8):
        made = form("cpu", f"int{bits}")
        assert isinstance(made, QuantizedFormat) and made.bits == bits
    with pytest.raises(ConfigError, match="needs kernels: auto or cpu, not torch"):
        check_form("int8", "kernels", "torch")
    with pytest.raises(ConfigError, match="quantization 'int3' is unknown; choose one of int8"):
        form("cpu", "int3")


@pytest.mark.parametrize(
    ("form", "agreement", "difference"), [("int8", 0.96, 0.03), ("int4", 0.8, 0.3)]
)
def test_predictions_of_the_carried_model_agree(
    kernels: Any, form: str, agreement: float, difference: float
) -> None:
    """benchmarks/quality.py publishes this for more positions."""
    dtype = "bfloat16" if kernels.isa() in ("avx512bf16", "amx") else "float32"
    before = predictions(str(CARRIED), 1500, dtype=dtype, kernels="cpu")
    quality = compare(str(CARRIED), dtype, form, "auto", before)
    assert quality.positions == 1500
    assert quality.agreement >= agreement
    assert quality.logprob_difference < difference
    assert quality.perplexity < quality.perplexity_before * (1.02 if form == "int8" else 1.2)
