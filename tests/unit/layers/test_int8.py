"""int8 weights: how exact they are, what their kernel computes, how they are split and sized."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.int8_quality import compare
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weight_formats import check_form
from engine.device.distributed import ParallelState
from engine.errors import ConfigError
from engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from engine.layers.embedding_table import RowTable
from engine.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from engine.layers.linear_kernel import (
    QUANTIZED_ROWS,
    Int8Kernel,
    LinearKernel,
    NativeKernel,
    quantize_rows,
)
from engine.layers.weight_format import (
    Int8Format,
    MatrixSlice,
    NativeFormat,
    PlainFormat,
    WeightFormat,
)
from engine.layers.weights import DummySource, WeightSource
from engine.models.llama import EMBEDDING, LlamaModel
from engine.models.loader import load_model
from engine.native.compiler import ISA_FLAGS
from engine.registry import KERNELS
from engine.worker.sizing.estimate import stage_weight_bytes
from tests.support.kernels import TYPES, Numbers, assert_within, load_kernels, same_bits
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


@pytest.mark.parametrize("dtype", TYPES)
def test_weights_are_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    """Also across blocks of rows, in rows of zeros, and of numbers near a type's limits."""
    numbers = Numbers(1)
    weight = numbers.normal((2 * QUANTIZED_ROWS + 3, 70), dtype)
    weight[5], weight[QUANTIZED_ROWS, 2:] = 0.0, 0.0
    weight[7] *= torch.finfo(dtype).smallest_normal
    weight[9] *= torch.finfo(dtype).max / weight[9].abs().max().float()
    found, scale = quantize_rows(weight)
    assert found.dtype == torch.int8 and scale.dtype == torch.float32
    assert torch.equal(scale, weight.float().abs().amax(1) / 127)
    error = (found.double() * scale.double()[:, None] - weight.double()).abs()
    assert (error <= scale.double()[:, None] * 0.5001).all()
    largest = found.abs().amax(1)
    assert largest[5] == 0 and (largest[[0, 7, 9, QUANTIZED_ROWS, -1]] == 127).all()


def test_numbers_are_rounded_to_even_and_keep_within_bounds() -> None:
    weight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0, 3.4]])
    found, scale = quantize_rows(weight)
    assert found.tolist() == [[127, 0, 2, 2, 0, -2, -127, 3]] and scale.item() == 1.0
    # The scale of a subnormal number has hardly any bits.
    tiny = torch.tensor([[190 * 2.0**-149, 1 * 2.0**-149], [2.0**-149, 0.0]])
    found, scale = quantize_rows(tiny)
    assert found.tolist() == [[127, 1], [0, 0]] and scale[1] == 0.0


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_in_its_output_only(kernels: Any, wrong: float) -> None:
    weight = torch.ones(5, 8)
    weight[3, 2] = wrong
    out = Int8Kernel(weight, None)(torch.ones(2, 8))
    assert out[:, 3].isnan().all() and out[:, [0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 2), (37, 30), (64, 128), (131, 258), (200, 1000)])
def test_kernel_multiplies_by_the_quantized_weight(
    isa: str, dtype: torch.dtype, bias: bool, shape: tuple[int, int]
) -> None:
    numbers = Numbers(2)
    weight = numbers.normal(shape, dtype)
    offset = numbers.normal(shape[:1], dtype) if bias else None
    kernel = Int8Kernel(weight, offset)
    found, scale = quantize_rows(weight)
    exact = found.double() * scale.double()[:, None]
    for rows in (1, 2, 7, 33, 130):
        x = numbers.normal((rows, shape[1]), dtype)
        expected, size = x.double() @ exact.t(), x.double().abs() @ exact.abs().t()
        if offset is not None:
            expected, size = expected + offset.double(), size + offset.double().abs()
        assert kernel(x).dtype == dtype and kernel.logits(x).dtype == torch.float32
        assert_within(kernel(x), expected, size)
        assert_within(kernel.logits(x), expected, size)


@pytest.mark.parametrize("shape", [(9, 33), (70, 65)])
def test_odd_inputs_of_float32(isa: str, shape: tuple[int, int]) -> None:
    weight, x = Numbers(3).normal(shape, torch.float32), Numbers(4).normal((3, shape[1]), TYPES[0])
    found, scale = quantize_rows(weight)
    exact = found.double() * scale.double()[:, None]
    size = x.double().abs() @ exact.abs().t()
    assert_within(Int8Kernel(weight, None)(x), x.double() @ exact.t(), size)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_has_the_same_bits_in_any_batch(isa: str, dtype: torch.dtype) -> None:
    numbers = Numbers(5)
    kernel = Int8Kernel(numbers.normal((300, 512), dtype), numbers.normal((300,), dtype))
    x = numbers.normal((200, 512), dtype)
    whole = kernel(x)
    for count in (1, 2, 5, 6, 7, 13, 32, 96, 97, 199):
        for number in (1, 2, 3):
            with threads(number):
                assert same_bits(kernel(x[-count:]), whole[-count:])


@pytest.mark.parametrize("dtype", TYPES)
def test_int8_computes_as_the_plain_kernel_does(isa: str, dtype: torch.dtype) -> None:
    """Weights that int8 holds exactly, with a scale of 1, give the plain kernel's bits."""
    numbers = Numbers(6)
    weight = torch.randint(-127, 128, (130, 200), generator=numbers.generator).to(dtype)
    weight[:, 0] = 127
    x = numbers.normal((40, 200), dtype)
    assert same_bits(Int8Kernel(weight, None)(x), NativeKernel(weight, None)(x))


FORMATS = [PlainFormat(), NativeFormat(), Int8Format()]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: type(form).__name__)
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
    """Rows have the same scales on any rank, so the same bits. Slices of columns have scales of
    their own: each rank is as exact as one rank would be."""
    source = source_of(Int8Format())
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
    summed = torch.stack([down(Int8Format(), state) for state in states]).sum(0)
    alone = down(Int8Format(), SINGLE)
    weight = source.get("down.weight", (96, config.hidden_size))
    half_step = weight.abs().amax(1) / 254
    bound = x.abs().sum(1, keepdim=True) * half_step * 1.001 + 1e-4
    assert ((summed - exact).abs() <= bound).all() and ((alone - exact).abs() <= bound).all()
    assert not torch.equal(summed, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_is_the_same_on_a_stage_of_its_own(kernels: Any, dtype: torch.dtype) -> None:
    """One stage shares the embedding's table, the last of several reads its own."""
    source, x = source_of(Int8Format(), dtype), Numbers(9).normal((3, 32), dtype)
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
def test_sizes_are_those_in_memory(kernels: Any, tied: bool, dtype: str) -> None:
    """On one rank and on both stages of two by two; no matrix but the table stays as it was."""
    config = make_config(CARRIED, dtype=dtype, attention_backend="cpu", quantization="int8")
    shape = replace(config.model, tie_word_embeddings=tied)
    config = changed(config, model=shape, load_format="dummy")
    for parallel in (SINGLE, ParallelState(0, 2, 0, 2), ParallelState(1, 2, 1, 2)):
        model = load_model(config, parallel, CPU)
        taken = 0
        if model.embedding is not None:
            assert isinstance(model.embedding.table, RowTable)
            taken = model.embedding.table.weight.nbytes
        for kernel in linears_of(model):
            assert isinstance(kernel, Int8Kernel)
            assert (kernel.packed.dtype, kernel.bias) == (torch.int8, None)
            taken += kernel.packed.nbytes + kernel.scale.nbytes
        assert stage_weight_bytes(config, parallel) == taken
        assert taken < stage_weight_bytes(changed(config, quantization="auto"), parallel)


@pytest.mark.parametrize("stored", TYPES)
def test_any_plain_checkpoint_is_quantized(
    kernels: Any, tmp_path: Path, stored: torch.dtype
) -> None:
    folder = make_model(tmp_path / "model", "LlamaForCausalLM")
    weights = {name: w.to(stored) for name, w in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    config = make_config(folder, attention_backend="cpu", quantization="int8")
    model = load_model(config, SINGLE, CPU)
    kernel = model.layers[1].mlp.down.kernel
    assert isinstance(kernel, Int8Kernel)
    _, scale = quantize_rows(weights["model.layers.1.mlp.down_proj.weight"])
    assert torch.equal(kernel.scale, scale)


def test_quantized_checkpoints_stay_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "LlamaForCausalLM")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.int8)
    save_file(weights, folder / "model.safetensors")
    load_kernels()
    config = make_config(folder, attention_backend="cpu", quantization="int8")
    with pytest.raises(ConfigError, match=r"up_proj\.weight.*quantized type int8.*not supported"):
        load_model(config, SINGLE, CPU)


def test_formats_by_name() -> None:
    assert type(KERNELS["cpu"].weight_format("auto")) is NativeFormat
    assert type(KERNELS["torch"].weight_format("auto")) is PlainFormat
    assert type(KERNELS["cpu"].weight_format("int8")) is Int8Format
    with pytest.raises(ConfigError, match="needs kernels: auto or cpu, not torch"):
        check_form("int8", "kernels", "torch")
    with pytest.raises(ConfigError, match="quantization 'int4' is unknown; choose one of int8"):
        KERNELS["cpu"].weight_format("int4")


def test_predictions_of_the_carried_model_agree(kernels: Any) -> None:
    """benchmarks/int8_quality.py publishes this for more positions."""
    dtype = "bfloat16" if kernels.isa() in ("avx512bf16", "amx") else "float32"
    quality = compare(str(CARRIED), dtype, 1500)
    assert quality.positions == 1500
    assert quality.agreement >= 0.96
    assert quality.logprob_difference < 0.03
    assert abs(quality.loss_int8 - quality.loss) < 0.02
