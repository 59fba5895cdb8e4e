"""Quantized experts on GPUs, by Triton's interpreter; tests/gpu runs them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from tests.support.triton_interpreter import use_bfloat16, use_interpreter

use_interpreter()

from engine.device.distributed import ParallelState  # noqa: E402
from engine.layers import kernel_set, triton_kernels  # noqa: E402
from engine.layers.expert_share import ExpertShare  # noqa: E402
from engine.layers.experts import set_kernels  # noqa: E402
from engine.layers.gpu_experts import GpuExperts  # noqa: E402
from engine.layers.gpu_format import GpuFormat  # noqa: E402
from engine.layers.gpu_kernel import GpuKernel  # noqa: E402
from engine.layers.gpu_tile import TILES, Tile  # noqa: E402
from engine.layers.gpu_weight import Kind  # noqa: E402
from engine.layers.grouped import quantize  # noqa: E402
from engine.layers.grouped_experts import GroupedExperts  # noqa: E402
from engine.layers.kernel_set import KernelSet  # noqa: E402
from engine.models import recording, transformers_model  # noqa: E402
from engine.protocol.sampling_params import SamplingParams  # noqa: E402
from tests.support.engines import engine_for, load_reference, reference_logprobs  # noqa: E402
from tests.support.gpu_weights import (  # noqa: E402
    Case,
    check_experts,
    ends_of,
    experts_of,
    meant_by,
    rows_for,
)
from tests.support.models import leave_ranks_alone, make_model  # noqa: E402
from tests.support.quantized import make_forms, write, write_experts_float4  # noqa: E402

CPU = torch.device("cpu")
CASES = (
    Case(4, 128),
    Case(4, 32, has_mins=True),
    Case(8, 0),
    Case("float4", 32, outputs=65, inputs=96),
    Case("float8", 128),
    Case("float8", 0, outputs=33, inputs=200),
    Case("two scales", 32, inputs=512),
)
COUNTS = (3, 0, 17, 1, 0, 33)
"""Rows of each expert; some behind them are none's."""


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    use_bfloat16(monkeypatch)


@pytest.mark.parametrize("has_bias", [False, True], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case: Case, dtype: torch.dtype, has_bias: bool) -> None:
    check_experts(experts_of(case, len(COUNTS), CPU, dtype if has_bias else None), COUNTS, dtype)


@pytest.mark.parametrize("counts", [(0,) * 5, (0, 0, 0, 0, 1), (70, 0, 0, 0, 0), (400, 1, 0, 0, 9)])
def test_rows_may_be_anyones(counts: tuple[int, ...]) -> None:
    """Of all tiles, as few and as many rows as there may be."""
    check_experts(experts_of(Case(4, 64), 5, CPU), counts, torch.float16)


@pytest.mark.parametrize("tile", [Tile(16, 32, 2, 2), Tile(32, 64, 4, 3)])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_inputs_may_be_split_and_rows_of_none_stay(splits: int, tile: Tile) -> None:
    experts = experts_of(Case(4, 64, has_mins=True), len(COUNTS), CPU)
    weight, num_rows = experts.weight, sum(COUNTS) + 5
    x, ends = rows_for(weight, num_rows, torch.float16), ends_of(COUNTS, CPU)
    arrived = torch.zeros(99, dtype=torch.int32)
    found = torch.full((num_rows, 72), 7.0, dtype=torch.float16)
    for _ in range(2):
        triton_kernels.multiply(x, weight, None, found, arrived, tile, splits, ends)
        wanted = meant_by(experts, x, COUNTS)
        error = (found[: len(wanted)].double() - wanted).abs().max()
        assert error < 2e-3 * wanted.abs().max()
        assert (found[len(wanted) :] == 7).all() and not arrived.any()


def test_a_row_has_the_same_result_beside_any_others() -> None:
    experts = experts_of(Case(4, 32, inputs=2048), 4, CPU)
    assert TILES[0].splits(experts.weight) > 1
    x = rows_for(experts.weight, 16, torch.float16)
    found = experts(x, ends_of((2, 3, 0, 11), CPU))
    assert torch.equal(experts(x[2:6], ends_of((0, 3, 0, 1), CPU)), found[2:6])
    assert torch.equal(experts(x[15:], ends_of((0, 0, 0, 1), CPU)), found[15:])


def test_experts_are_one_weight_or_plain() -> None:
    """Minima of some, and scales of other types, become those of all."""
    cases = [Case(4, 32), Case(4, 32, has_mins=True)]
    parts = [[case.source(seed)] for seed, case in enumerate(cases)]
    wide: Any = parts[0][0]
    parts.append([replace(wide, scales=wide.scales.float() * 1e-7)])
    experts = GpuExperts.of(parts, None)
    assert experts is not None and len(experts) == 3
    assert experts.weight.scales.dtype == torch.float32 and experts.weight.mins is not None
    check_experts(experts, (2, 1, 3), torch.bfloat16)
    others: list[Any] = [Case(8, 32), Case(4, 64), Case("float8", 32), Case(4, 32, outputs=64)]
    for other in others:
        assert GpuExperts.of([parts[0], [other.source()]], None) is None
    assert GpuExperts.of([parts[0], None], None) is None
    assert GpuExperts.of([parts[0], [parts[0][0], Case(8, 32).source()]], None) is None


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 6}
KINDS: dict[str, tuple[Any, Any]] = {
    "gated": (MixtralExperts, MixtralConfig(**SIZES)),
    "biased and transposed": (GptOssExperts, GptOssConfig(**SIZES)),
}


@pytest.mark.parametrize("mine", [range(6), [1, 2, 5]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_mixtures(kind: str, mine: Any) -> None:
    """As with the plain matrices that quantized ones stand for; also before the gates alone."""
    torch.manual_seed(3)
    make_module, config = KINDS[kind]
    module: Any = make_module(config)
    for name, value in [*module.named_parameters()]:
        made = torch.randn(value.shape)[list(mine)].bfloat16() * 0.2
        setattr(module, name, nn.Parameter(made, requires_grad=False))
    share = ExpertShare(list(mine), 6, ParallelState.single())
    names = ("gate_up_proj", "down_proj")
    packed = {}
    for name in names:
        matrices: Tensor = getattr(module, name).data
        turned = matrices.transpose(1, 2) if module.is_transposed else matrices
        parts = [quantize(one.contiguous(), 8) for one in turned]
        bias = getattr(module, f"{name}_bias").data if module.has_bias else None
        packed[name] = GpuFormat(torch.bfloat16).experts([[part] for part in parts], bias)
        plain = torch.stack([part.dequantize(torch.bfloat16) for part in parts])
        plain = plain.transpose(1, 2) if module.is_transposed else plain
        setattr(module, name, nn.Parameter(plain.contiguous(), requires_grad=False))
    hidden = torch.randn(20, 64).bfloat16()
    chosen = torch.stack([torch.randperm(6)[:2] for _ in range(20)])
    chosen[3, 1], chosen[4, 1] = 6, -1
    weights = torch.rand(20, 2)
    wanted = GroupedExperts(copy.deepcopy(module), share)(hidden, chosen, weights)
    for kept in (names, names[:1]):
        half = copy.deepcopy(module)
        for name in kept:
            set_kernels(half, name, packed[name])
            assert getattr(half, name).shape == (len(list(mine)), 1, 1)
        found = GroupedExperts(half, share)
        assert [*found.packed] == [*kept] and "manta_kernels" not in half.__dict__
        torch.testing.assert_close(found(hidden, chosen, weights), wanted, atol=0.1, rtol=0.03)


MODEL: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16}
QWEN: dict[str, Any] = {
    **MODEL,
    "intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
GPT_OSS: dict[str, Any] = {**MODEL, "intermediate_size": 64, "num_local_experts": 4}


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Models of transformers' code are loaded as on a GPU; their mixtures."""
    made: list[Any] = []

    def grouped(module: Any, form: Any, share: ExpertShare) -> GroupedExperts:
        made.append(GroupedExperts(module, share))
        return made[-1]

    own = KernelSet(lambda device, dtype: GpuFormat(dtype), kernel_set.TORCH.fused_ops)
    monkeypatch.setattr(kernel_set, "TORCH", own)
    monkeypatch.setattr(transformers_model, "Experts", grouped)
    monkeypatch.setattr("engine.checkpoint.model_config.read_layout", recording.record)
    leave_ranks_alone(monkeypatch)
    yield made


@pytest.mark.parametrize("name", ["ct-w4-zeros", "fp8-blocks", "mxfp4"])
def test_models_keep_their_experts(name: str, like_a_gpu: list[Any], tmp_path: Path) -> None:
    """Linears of float8 numbers, too, where no kernel for CPU is."""
    if name == "mxfp4":
        plain = make_model(tmp_path / "plain", "GptOssForCausalLM", **GPT_OSS)
        quantized, reference = write_experts_float4(plain, tmp_path)
    else:
        plain = make_model(tmp_path / "plain", "Qwen3MoeForCausalLM", **QWEN)
        quantized, reference = write(plain, make_forms()[name], tmp_path)
    kind = {"mxfp4": Kind.FLOAT4, "fp8-blocks": Kind.FLOAT8}.get(name, Kind.WHOLE4)
    hub, prompt = load_reference(reference), [3, 50, 7, 120, 9, 11, 200, 45]
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, logprobs=0)
    given: dict[str, Any] = {"dtype": "bfloat16", "kernels": "torch", "device": "cpu"}
    with engine_for(quantized, **given) as engine:
        (tokens,) = engine.run([prompt], params)
        found = [entry.logprob for entry in engine.logprobs[0]]
    assert len(like_a_gpu) == 2
    for mixture in like_a_gpu:
        assert sorted(mixture.packed) == ["down_proj", "gate_up_proj"]
        assert {one.weight.kind for one in mixture.packed.values()} == {kind}
        assert all(len(one) == 4 for one in mixture.packed.values())
    wanted = reference_logprobs(hub, prompt + tokens)[len(prompt) - 1 : -1]
    assert np.abs(np.array(found) - wanted[np.arange(2), tokens]).max() < 0.1


def test_linears_of_float8_stay_so_in_code_of_transformers(
    like_a_gpu: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[GpuKernel] = []
    plain_init = GpuKernel.__init__
    monkeypatch.setattr(
        GpuKernel, "__init__", lambda self, *args: (made.append(self), plain_init(self, *args))[1]
    )
    plain = make_model(tmp_path / "plain", "Qwen3MoeForCausalLM", **QWEN)
    quantized, _ = write(plain, make_forms()["fp8-blocks"], tmp_path)
    with engine_for(quantized, dtype="bfloat16", kernels="torch", device="cpu"):
        assert len(made) == 2 * 2  # query with key and value, and what is behind attention
        assert {weight.kind for one in made for weight in one.weights} == {Kind.FLOAT8}
