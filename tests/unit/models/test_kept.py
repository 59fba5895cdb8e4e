"""The memory that is calculated for quantized checkpoints is what their models take."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from engine.config import EngineConfig
from engine.device.distributed import ParallelState
from engine.layers.linear_kernel import GroupedKernel
from engine.memory_need import MemoryNeed, quantized_line
from engine.models import recording
from engine.models.loader import load_model
from engine.worker.auto_config import make_worker_config
from engine.worker.sizing.estimate import stage_weight_bytes
from tests.support.gguf_files import keep_folders_in, write_gguf
from tests.support.kernels import load_kernels
from tests.support.models import leave_ranks_alone, make_model
from tests.support.quantized import make_forms, write, write_experts_float4

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}
TIED = {"tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64}
GEMMA = {
    "config_name": "Gemma3TextConfig",
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0}
        for kind in ("full_attention", "sliding_attention")
    },
    **TIED,
}
CPU = torch.device("cpu")
SPLITS = [(1, 1), (2, 1), (1, 2)]


@pytest.fixture(autouse=True)
def folders(tmp_path: Path) -> Iterator[None]:
    load_kernels()
    with pytest.MonkeyPatch.context() as patch:
        keep_folders_in(tmp_path / "made", patch)
        patch.setattr("engine.checkpoint.model_config.read_layout", recording.record)
        leave_ranks_alone(patch)
        yield


def taken(config: Any, parallel: ParallelState) -> int:
    """Bytes of the tensors and quantized matrices that a model has."""
    gc.freeze()  # what is there before, garbage too, isn't looked at
    try:
        model = load_model(config, parallel, CPU)
        gc.collect()
        made = gc.get_objects()
    finally:
        gc.unfreeze()
    tensors = {id(found): found for found in made if issubclass(type(found), Tensor)}
    quantized = sum(found.num_bytes for found in made if type(found) is GroupedKernel)
    storages: dict[int, dict[int, int]] = {}
    mapped = {id(tensor._base) for tensor in tensors.values()}
    for key, tensor in tensors.items():
        if key not in mapped and not tensor.is_meta and not tensor.is_mkldnn:
            storage = tensor.untyped_storage()
            # A part of a tensor in a file, which is mapped, has all of it as its storage; so have
            # the matrices of experts that lie one behind the other.
            size = min(storage.nbytes(), tensor.numel() * tensor.element_size())
            parts = storages.setdefault(storage.data_ptr(), {})
            parts[tensor.data_ptr()] = max(size, parts.get(tensor.data_ptr(), 0))
    packed = sum(t.numel() * t.element_size() for t in tensors.values() if t.is_mkldnn)
    del model
    return sum(sum(parts.values()) for parts in storages.values()) + packed + quantized


def assert_is_calculated(model: Path, splits: Any = SPLITS, **keys: Any) -> None:
    """On each of two stages, on a rank of two, and alone."""
    for tp_size, pp_size in splits:
        given = {"model": str(model), "tp_size": tp_size, "pp_size": pp_size, **keys}
        config = make_worker_config(EngineConfig(**given, max_model_len=128).resolve())
        for stage in range(pp_size):
            parallel = ParallelState(0, tp_size, stage, pp_size, ep_size=keys.get("ep_size"))
            calculated, real = stage_weight_bytes(config, parallel), taken(config, parallel)
            assert calculated == pytest.approx(real, rel=0.15), (tp_size, pp_size, stage, keys)


def by_name(tensor: str) -> Kind:
    """As files named Q4_K_M have them: some finer than others."""
    if "attn_v" in tensor or "ffn_down" in tensor:
        return Kind.Q6_K
    return Kind.Q8_0 if "token_embd" in tensor else Kind.Q4_K


@pytest.mark.parametrize(
    ("arch", "changes", "kind", "dtype"),
    [
        ("LlamaForCausalLM", {}, Kind.Q4_1, "float32"),
        ("LlamaForCausalLM", TIED, by_name, "bfloat16"),
        ("Qwen2ForCausalLM", TIED, Kind.Q5_0, "float32"),
        ("Phi3ForCausalLM", {}, Kind.Q8_0, "bfloat16"),
        ("Gemma3ForCausalLM", GEMMA, Kind.Q5_K, "float32"),
        ("Qwen3MoeForCausalLM", EXPERTS, Kind.Q4_0, "float32"),
        ("MixtralForCausalLM", {"num_local_experts": 4}, by_name, "bfloat16"),
    ],
)
def test_gguf(arch: str, changes: dict[str, Any], kind: Any, dtype: str, tmp_path: Path) -> None:
    made = make_model(tmp_path / "model", arch, **SIZES, **changes)
    write_gguf(tmp_path / "model.gguf", made, kind)
    assert_is_calculated(tmp_path / "model.gguf", dtype=dtype, kernels="cpu")
    assert_is_calculated(tmp_path / "model.gguf", SPLITS[:1], dtype=dtype, kernels="torch")


@pytest.mark.parametrize("name", make_forms())
def test_safetensors(name: str, tmp_path: Path) -> None:
    made = make_model(tmp_path / "model", "LlamaForCausalLM", **SIZES)
    quantized, _ = write(made, make_forms()[name], tmp_path)
    for keys in ({}, {"quantization": "int8"}):
        assert_is_calculated(quantized, SPLITS[:2], dtype="float32", kernels="cpu", **keys)


@pytest.mark.parametrize("name", ["gptq", "awq", "ct-w4", "gptq-order", "fp8-blocks"])
def test_experts(name: str, tmp_path: Path) -> None:
    """Whole ones, and parts of them."""
    made = make_model(tmp_path / "model", "Qwen3MoeForCausalLM", **SIZES, **EXPERTS)
    quantized, _ = write(made, make_forms()[name], tmp_path)
    assert_is_calculated(quantized, SPLITS[:2], dtype="float32", kernels="cpu")
    assert_is_calculated(quantized, SPLITS[1:2], dtype="float32", kernels="cpu", ep_size=1)


def test_stacked_experts(tmp_path: Path) -> None:
    keys = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64}
    made = make_model(tmp_path / "model", "GptOssForCausalLM", **SIZES, **keys)
    quantized, _ = write_experts_float4(made, tmp_path)
    assert_is_calculated(quantized, dtype="float32", kernels="cpu")
    assert_is_calculated(quantized, SPLITS[1:2], dtype="float32", kernels="cpu", ep_size=1)


def test_what_is_kept_is_said(tmp_path: Path) -> None:
    """All of it, a part, or nothing; of GGUF files the types, too."""

    def line(**keys: Any) -> str:
        engine = EngineConfig(model=str(tmp_path / "model.gguf"), max_model_len=128, **keys)
        choice = engine.kernel_choice("cpu")
        return quantized_line(MemoryNeed.of(engine.resolve(), "bfloat16", choice))

    made = make_model(tmp_path / "model", "LlamaForCausalLM", **SIZES)
    write_gguf(tmp_path / "model.gguf", made, by_name)
    assert line() == "GGUF (Q4_K, Q6_K, Q8_0), kept as it is: 0.00 GiB"
    # Half of 256 inputs are half of a block.
    assert line(tp_size=2).startswith(
        "GGUF (Q4_K, Q6_K, Q8_0), 0.00 GiB kept as it is, the rest dequantized at load to bfloat16"
    )
    assert ", dequantized at load to bfloat16: 0.00 GiB instead of" in line(kernels="torch")
