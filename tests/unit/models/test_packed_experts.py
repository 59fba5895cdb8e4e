"""Experts of mixtures stay as a quantized checkpoint has them, on CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine.config import EngineConfig
from engine.device.distributed import ParallelState
from engine.layers.experts import Experts
from engine.layers.linear_kernel import GroupedKernel, LinearKernel, NativeKernel
from engine.models import recording
from engine.models.loader import load_model
from engine.protocol.sampling_params import SamplingParams
from engine.worker.auto_config import make_worker_config
from tests.support.engines import engine_for, greedy_reference, load_reference, reference_logprobs
from tests.support.gguf_files import keep_folders_in, write_gguf
from tests.support.kernels import load_kernels
from tests.support.models import leave_ranks_alone, make_model
from tests.support.quantized import make_forms, write, write_experts_float4

CPU = torch.device("cpu")
FORMS = make_forms()
SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2}
QWEN: dict[str, Any] = {
    **SIZES,
    "intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "head_dim": 16,
}
GPT_OSS: dict[str, Any] = {
    **SIZES,
    "intermediate_size": 64,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 24,
}
MAX_NEW = 8


@pytest.fixture(autouse=True)
def folders(tmp_path: Path) -> Iterator[None]:
    load_kernels()
    with pytest.MonkeyPatch.context() as patch:
        keep_folders_in(tmp_path / "made", patch)
        patch.setattr("engine.checkpoint.model_config.read_layout", recording.record)
        leave_ranks_alone(patch)
        yield


def check(model: Path, reference: Path, **config: Any) -> None:
    """Greedy tokens are those of transformers, and their log-probabilities within 1e-4."""
    generator = np.random.default_rng(1)
    prompts = [generator.integers(3, 200, size).tolist() for size in (40, 9, 1)]
    hub = load_reference(reference)
    params = SamplingParams(max_tokens=MAX_NEW, temperature=0, ignore_eos=True, logprobs=0)
    with engine_for(model, kernels="cpu", **config) as engine:
        outputs = engine.run(prompts, params)
        found = [[entry.logprob for entry in engine.logprobs[n]] for n in range(len(prompts))]
    assert outputs == greedy_reference(hub, prompts, MAX_NEW)
    for prompt, ids, logprobs in zip(prompts, outputs, found, strict=True):
        wanted = reference_logprobs(hub, prompt + ids)[len(prompt) - 1 : -1]
        assert np.abs(np.array(logprobs) - wanted[np.arange(MAX_NEW), ids]).max() < 1e-4


def kernels_of(
    model: Path, rank: int = 0, **config: Any
) -> list[tuple[list[LinearKernel], list[LinearKernel]]]:
    """The products of each mixture that a rank has, for what is before the gate and behind it."""
    given = EngineConfig(model=str(model), kernels="cpu", max_model_len=128, **config)
    worker = make_worker_config(given.resolve())
    parallel = ParallelState(rank, given.tp_size, 0, given.pp_size, ep_size=given.ep_size)
    loaded: Any = load_model(worker, parallel, CPU)
    mixtures = [m.manta_experts for m in loaded.decoder.modules() if hasattr(m, "manta_experts")]
    assert all(type(mixture) is Experts for mixture in mixtures)
    return [(mixture._up, mixture._down) for mixture in mixtures]


def assert_kinds(model: Path, kinds: tuple[type, type], count: int, **config: Any) -> None:
    """Each rank's experts, `count` in each of two layers, are of these kinds before and behind
    their gates."""
    for rank in range(config.get("tp_size", 1)):
        found = kernels_of(model, rank, **config)
        assert len(found) == 2
        for up, down in found:
            assert [type(product) for product in up] == [kinds[0]] * count
            assert [type(product) for product in down] == [kinds[1]] * count


PACKED = (GroupedKernel, GroupedKernel)


def by_name(tensor: str) -> Kind:
    """As files named Q4_K_M have them."""
    return Kind.Q6_K if "ffn_down" in tensor else Kind.Q4_K


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q5_1, by_name])
def test_a_qwen3_moe_of_gguf(kind: Any, tmp_path: Path) -> None:
    keys = {**QWEN, "norm_topk_prob": True}
    if kind is by_name:  # blocks have 256 numbers
        keys |= {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
    made = make_model(tmp_path / "model", "Qwen3MoeForCausalLM", **keys)
    reference = write_gguf(tmp_path / "model.gguf", made, kind)
    assert_kinds(tmp_path / "model.gguf", PACKED, 4)
    check(tmp_path / "model.gguf", reference)


@pytest.mark.parametrize("split", [{}, {"tp_size": 2, "ep_size": 2}, {"tp_size": 2, "ep_size": 1}])
def test_a_mixtral_of_gguf(split: dict[str, int], tmp_path: Path) -> None:
    keys = {**SIZES, "intermediate_size": 64, "num_local_experts": 4}
    made = make_model(tmp_path / "model", "MixtralForCausalLM", **keys)
    reference = write_gguf(tmp_path / "model.gguf", made, Kind.Q5_0)
    count = 4 // split.get("ep_size", 1)
    assert_kinds(tmp_path / "model.gguf", PACKED, count, **split)
    check(tmp_path / "model.gguf", reference, **split)


@pytest.mark.parametrize("name", ["gptq", "awq", "ct-w4-zeros", "ct-int8", "ct-nvfp4"])
def test_a_mixture_of_safetensors(name: str, tmp_path: Path) -> None:
    plain = make_model(tmp_path / "plain", "Qwen3MoeForCausalLM", **QWEN)
    quantized, reference = write(plain, FORMS[name], tmp_path)
    assert_kinds(quantized, PACKED, 4)
    check(quantized, reference)


@pytest.mark.parametrize("split", [{}, {"tp_size": 2}, {"tp_size": 2, "ep_size": 1}])
def test_stacked_experts_of_gpt_oss(split: dict[str, int], tmp_path: Path) -> None:
    """Gates and ups lie in turns, and all have biases."""
    plain = make_model(tmp_path / "plain", "GptOssForCausalLM", **GPT_OSS)
    quantized, reference = write_experts_float4(plain, tmp_path)
    count = 2 if split == {"tp_size": 2} else 4
    assert_kinds(quantized, PACKED, count, **split)
    check(quantized, reference, **split)


def test_what_has_no_kernel_is_dequantized(tmp_path: Path) -> None:
    """All of it, or of what a rank's part cuts through."""
    plain = make_model(tmp_path / "plain", "Qwen3MoeForCausalLM", **QWEN)
    for name in ("fp8-blocks", "gptq-order", "nf4"):
        quantized, reference = write(plain, FORMS[name], tmp_path / name)
        assert_kinds(quantized, (NativeKernel, NativeKernel), 4)
    check(quantized, reference)
    sizes = {**QWEN, "moe_intermediate_size": 96, "norm_topk_prob": True}
    made = make_model(tmp_path / "model", "Qwen3MoeForCausalLM", **sizes)
    reference = write_gguf(tmp_path / "model.gguf", made, Kind.Q4_0)
    # 48 inner numbers are one block and a half.
    split = {"tp_size": 2, "ep_size": 1}
    assert_kinds(tmp_path / "model.gguf", (GroupedKernel, NativeKernel), 4, **split)
    check(tmp_path / "model.gguf", reference, **split)
