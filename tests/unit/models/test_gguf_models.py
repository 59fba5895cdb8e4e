"""Models in GGUF files compute what transformers computes of the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from engine.checkpoint.gguf.tensor_types import TENSOR_TYPES
from engine.models import recording
from engine.protocol.sampling_params import SamplingParams
from tests.support.engines import engine_for, greedy_reference, load_reference, reference_logprobs
from tests.support.gguf_files import keep_folders_in, write_gguf
from tests.support.models import LLAMA3_ROPE, make_model

SIZES: dict[str, Any] = {"intermediate_size": 64, "vocab_size": 300}
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama3-tied": (
        "LlamaForCausalLM",
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    ),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": 24}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
}
MIXED: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**MIXED, "head_dim": 16, "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**MIXED, "shared_expert_intermediate_size": 32}),
    "phi3": ("Phi3ForCausalLM", {}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 9.0,
            "sliding_window": 24,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "config_name": "Gemma3TextConfig",
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 24,
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "tie_word_embeddings": True,
        },
    ),
}
MAX_NEW = 8


@pytest.fixture(autouse=True)
def folders(tmp_path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        keep_folders_in(tmp_path / "made", patch)
        patch.setattr("engine.checkpoint.model_config.read_layout", recording.record)
        yield


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(1)
    first = generator.integers(3, 200, 40).tolist()
    return [first, first[:25] + generator.integers(3, 200, 9).tolist(), first[:7]]


def check(
    model: Path, reference: Path, kernels: str = "torch", limit: float = 1e-4, **config: Any
) -> None:
    """Greedy tokens are those of transformers, and their logprobs within `limit`."""
    hub = load_reference(reference)
    params = SamplingParams(max_tokens=MAX_NEW, temperature=0, ignore_eos=True, logprobs=0)
    with engine_for(model, kernels=kernels, **config) as engine:
        outputs = engine.run(prompts(), params)
        assert outputs == greedy_reference(hub, prompts(), MAX_NEW)
        for number, ids in enumerate(prompts()):
            wanted = reference_logprobs(hub, ids + outputs[number])[len(ids) - 1 : -1]
            rows = wanted[np.arange(MAX_NEW), outputs[number]]
            found = [entry.logprob for entry in engine.logprobs[number]]
            assert np.abs(np.array(found) - rows).max() < limit


@pytest.mark.parametrize("arch", OWN)
def test_own_architectures(arch: str, tmp_path: Path) -> None:
    name, changes = OWN[arch]
    made = make_model(tmp_path / "model", name, **SIZES, **changes)
    reference = write_gguf(tmp_path / "model.gguf", made)
    check(tmp_path / "model.gguf", reference)


@pytest.mark.parametrize("arch", OTHERS)
def test_architectures_through_transformers(arch: str, tmp_path: Path) -> None:
    name, changes = OTHERS[arch]
    made = make_model(tmp_path / "model", name, **SIZES, **changes)
    reference = write_gguf(tmp_path / "model.gguf", made)
    check(tmp_path / "model.gguf", reference)


K_SIZES = {**SIZES, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "kind",
    [kind for kind in Kind if kind.name in {known.name for known in TENSOR_TYPES.values()}],
)
def test_types_of_tensors(kind: Kind, tmp_path: Path) -> None:
    made = make_model(tmp_path / "model", "LlamaForCausalLM", **K_SIZES)
    reference = write_gguf(tmp_path / "model.gguf", made, kind)
    check(tmp_path / "model.gguf", reference)
    # Our kernels round inputs where they multiply by what is quantized.
    check(tmp_path / "model.gguf", reference, "auto", 1e-3)


@pytest.mark.parametrize("arch", ["qwen3_moe", "gemma3"])
def test_workers_share_other_architectures(arch: str, tmp_path: Path) -> None:
    name, changes = OTHERS[arch]
    made = make_model(tmp_path / "model", name, **SIZES, **changes)
    reference = write_gguf(tmp_path / "model.gguf", made)
    check(tmp_path / "model.gguf", reference, tp_size=2)


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"pp_size": 2}])
def test_workers_share_a_split_file(sizes: dict[str, int], tmp_path: Path) -> None:
    """Half of the columns of the output projection cut through blocks."""
    made = make_model(tmp_path / "model", "LlamaForCausalLM", **SIZES)
    reference = write_gguf(tmp_path / "model.gguf", made, num_files=3)
    check(tmp_path / "model-00001-of-00003.gguf", reference, **sizes)
    check(tmp_path / "model-00001-of-00003.gguf", reference, "auto", 1e-3, **sizes)


def test_prefix_hits(tmp_path: Path) -> None:
    made = make_model(tmp_path / "model", "LlamaForCausalLM", **SIZES)
    reference = load_reference(write_gguf(tmp_path / "model.gguf", made, Kind.Q5_1))
    params = SamplingParams(max_tokens=MAX_NEW, temperature=0, ignore_eos=True)
    with engine_for(tmp_path / "model.gguf", page_size=1) as engine:
        outputs = engine.run(prompts(), params, warm=prompts()[:1])
        assert engine.cached[0] == 39 and engine.cached[1] == 25
    assert outputs == greedy_reference(reference, prompts(), MAX_NEW)
