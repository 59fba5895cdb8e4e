"""Weights that are read one group at a time: bit for bit what transformers loads."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from engine.device.distributed import ParallelState
from engine.errors import ConfigError
from engine.layers.weights import DummySource, SafetensorsSource
from engine.models.lazy_weights import LazyWeights
from engine.models.recording import record
from engine.models.share import Share
from tests.support.models import THROUGH_TRANSFORMERS, make_model

CPU = torch.device("cpu")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **THROUGH_TRANSFORMERS,
    "tied": ("SmolLM3ForCausalLM", {"tie_word_embeddings": True}),
    "gpt_oss": ("GptOssForCausalLM", {"head_dim": 8, "num_local_experts": 4}),
    "gpt2": ("GPT2LMHeadModel", {"config_name": "GPT2Config", "n_embd": 32, "n_head": 4}),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        {
            "head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}
"""Also: ties, biases of experts, transposed matrices, buffers that a checkpoint has."""


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.set_verbosity_error()


def loaded(folder: Path, dtype: torch.dtype = torch.float32, dummy: int | None = None) -> Any:
    """The model as one rank loads it, before its linears are replaced."""
    source: SafetensorsSource | DummySource = SafetensorsSource(folder, dtype, CPU)
    if dummy is not None:
        source = DummySource(dummy, dtype, CPU)
    hub = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(hub, dtype=dtype)
    weights = LazyWeights(model, source, dtype)
    layout = record(folder)
    share = Share(layout, range(layout.num_layers), ParallelState.single())
    with torch.no_grad():
        share.fill(model, weights, CPU)
    return model


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_it_is_what_transformers_loads(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    arch, keys = CASES[name]
    folder = make_model(tmp_path, arch, num_hidden_layers=4, **keys)
    wanted = tensors(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))
    found = tensors(loaded(folder, dtype))
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key
    assert len({id(x) for x in found.values()}) == len({id(x) for x in wanted.values()}), "ties"


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.embed_tokens.weight", "both"])
def test_a_tied_matrix_is_the_one_that_the_checkpoint_has(tmp_path: Path, kept: str) -> None:
    folder = make_model(tmp_path, "SmolLM3ForCausalLM", tie_word_embeddings=True)
    file = folder / "model.safetensors"
    weights = load_file(file)
    matrix = weights.pop("model.embed_tokens.weight")
    if kept == "both":
        weights |= {"model.embed_tokens.weight": matrix, "lm_head.weight": matrix * 2}
    else:
        weights[kept] = matrix
    save_file(weights, file, {"format": "pt"})
    model = loaded(folder)
    assert torch.equal(model.model.embed_tokens.weight, matrix)
    assert torch.equal(model.lm_head.weight, matrix * 2 if kept == "both" else matrix)


def changed(folder: Path, **changes: torch.Tensor | None) -> None:
    """Give a checkpoint other tensors; None: it lacks them."""
    file = folder / "model.safetensors"
    weights = load_file(file) | changes
    kept = {name: value for name, value in weights.items() if value is not None}
    save_file(kept, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("arch", "name", "value", "words"),
    [
        ("granite", "model.norm.weight", None, r"lacks the weight 'model\.norm\.weight'"),
        (
            "granite",
            "model.layers.1.mlp.up_proj.weight",
            torch.zeros(47, 32),
            r"'model\.layers\.1\.mlp\.up_proj\.weight' in .* shape \[47, 32\].*asks for \[48, 32\]",
        ),
        (
            "mixtral",
            "model.layers.0.block_sparse_moe.experts.3.w2.weight",
            None,
            r"'model\.layers\.0\.mlp\.experts\.down_proj'.* shape \[3, 32, 48\]",
        ),
        (
            "mixtral",
            "model.layers.0.block_sparse_moe.experts.3.w1.weight",
            None,
            r"'model\.layers\.0\.mlp\.experts\.gate_up_proj' can't be made of the weights",
        ),
        ("granite", "lm_head.weight", torch.zeros(211, 32).to(torch.int8), "quantized"),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, arch: str, name: str, value: torch.Tensor | None, words: str
) -> None:
    made, keys = THROUGH_TRANSFORMERS[arch]
    folder = make_model(tmp_path, made, **keys)
    assert name in load_file(folder / "model.safetensors")
    changed(folder, **{name: value})
    with pytest.raises(ConfigError, match=words):
        loaded(folder)


def test_a_rank_never_holds_more_than_its_share_and_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arch, keys = THROUGH_TRANSFORMERS["mixtral"]
    folder = make_model(tmp_path, arch, num_hidden_layers=6, **keys)
    layout = record(folder)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    read = SafetensorsSource.read

    def noting(self: SafetensorsSource, name: str) -> torch.Tensor:
        nonlocal most
        tensor = read(self, name)
        alive.append(weakref.ref(tensor))
        found = (ref() for ref in alive)
        most = max(most, sum(x.numel() for x in found if x is not None))
        return tensor

    monkeypatch.setattr(SafetensorsSource, "read", noting)
    hub = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(hub)
    weights = LazyWeights(model, SafetensorsSource(folder, torch.float32, CPU), torch.float32)
    share = Share(layout, range(6), ParallelState(1, 4, 0, 1))
    with torch.no_grad():
        share.fill(model, weights, CPU)
    group = 2 * 4 * 48 * 32  # gates and inputs of a layer's experts
    assert group < most < layout.rank_parameters(4, range(6)) + group
    assert sum(layout.layer_parameters) > 2 * most


def test_dummy_weights_are_those_of_their_seed(tmp_path: Path) -> None:
    arch, keys = THROUGH_TRANSFORMERS["qwen3_moe"]
    folder = make_model(tmp_path, arch, **keys)
    first, again, other = (tensors(loaded(folder, dummy=seed)) for seed in (1, 1, 2))
    name = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])
    assert all(bool(value.isfinite().all()) for value in first.values())
