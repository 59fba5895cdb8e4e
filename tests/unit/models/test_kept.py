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
from engine.models import recording
from engine.models.loader import load_model
from engine.worker.auto_config import make_worker_config
from engine.worker.sizing.estimate import stage_weight_bytes
from tests.support.gguf_files import keep_folders_in, write_gguf
from tests.support.kernels import load_kernels
from tests.support.models import make_model
from tests.support.quantized import make_forms, write

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
        # Of each group of ranks there is one.
        patch.setattr(ParallelState, "all_reduce", lambda self, x: x)
        patch.setattr(
            ParallelState,
            "all_gather_last_dim",
            lambda self, x: torch.cat([x] * self.tp_size, -1),
        )
        yield


def in_memory(kind: type[Any]) -> dict[int, Any]:
    gc.collect()
    return {id(found): found for found in gc.get_objects() if issubclass(type(found), kind)}


def taken(config: Any, parallel: ParallelState) -> int:
    """Bytes of the tensors and quantized matrices that a model has."""
    before = in_memory(Tensor), in_memory(GroupedKernel)
    model = load_model(config, parallel, CPU)
    tensors = {key: t for key, t in in_memory(Tensor).items() if key not in before[0]}
    kernels = {key: k for key, k in in_memory(GroupedKernel).items() if key not in before[1]}
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors.values()
        if not t.is_meta and t.layout == torch.strided
    }
    packed = sum(t.numel() * t.element_size() for t in tensors.values() if t.is_mkldnn)
    del model
    return sum(storages.values()) + packed + sum(k.num_bytes for k in kernels.values())


def assert_is_calculated(model: Path, **keys: Any) -> None:
    """On the first and last rank, alone and as one of two."""
    for tp_size, pp_size in SPLITS:
        given = {"model": str(model), "tp_size": tp_size, "pp_size": pp_size, **keys}
        config = make_worker_config(EngineConfig(**given, max_model_len=128).resolve())
        for stage in range(pp_size):
            parallel = ParallelState(0, tp_size, stage, pp_size)
            calculated, real = stage_weight_bytes(config, parallel), taken(config, parallel)
            assert calculated == pytest.approx(real, rel=0.15), (tp_size, pp_size, stage, keys)


def by_name(tensor: str) -> Kind:
    """As files named Q4_K_M have them: some finer than others."""
    if "attn_v" in tensor or "ffn_down" in tensor:
        return Kind.Q6_K
    return Kind.Q8_0 if "token_embd" in tensor else Kind.Q4_K


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("arch", "changes", "kind"),
    [
        ("LlamaForCausalLM", {}, Kind.Q4_1),
        ("LlamaForCausalLM", TIED, by_name),
        ("Qwen2ForCausalLM", TIED, Kind.Q5_0),
        ("Phi3ForCausalLM", {}, Kind.Q8_0),
        ("Gemma3ForCausalLM", GEMMA, Kind.Q5_K),
        ("Qwen3MoeForCausalLM", EXPERTS, Kind.Q4_0),
    ],
)
def test_gguf(arch: str, changes: dict[str, Any], kind: Any, dtype: str, tmp_path: Path) -> None:
    made = make_model(tmp_path / "model", arch, **SIZES, **changes)
    write_gguf(tmp_path / "model.gguf", made, kind)
    for kernels in ("cpu", "torch"):
        assert_is_calculated(tmp_path / "model.gguf", dtype=dtype, kernels=kernels)


@pytest.mark.parametrize("name", make_forms())
def test_safetensors(name: str, tmp_path: Path) -> None:
    made = make_model(tmp_path / "model", "LlamaForCausalLM", **SIZES)
    quantized, _ = write(made, make_forms()[name], tmp_path)
    for keys in ({}, {"quantization": "int8"}):
        assert_is_calculated(quantized, dtype="float32", kernels="cpu", **keys)
