"""Multi-head latent attention over latents: which modules get it, and that numbers stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from engine.attention.flashinfer_backend import lack_of_attention
from engine.checkpoint import model_config
from engine.checkpoint.layout import AttentionCall, HeadSizes
from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig, KernelChoice
from engine.memory_need import MemoryNeed
from engine.models import recording
from engine.models.latents import Absorbed, Latents, LatentSizes
from engine.models.transformers_model import TransformersModel
from engine.worker.auto_config import make_worker_config
from tests.support.models import THROUGH_TRANSFORMERS, make_model
from tests.support.other_architectures import assert_same_as_transformers
from tests.support.step_driver import make_runner

ATTENTION: Any = modeling_deepseek_v3.DeepseekV3Attention
Expand = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]
EXPANDED = HeadSizes(4, 24, 16)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers.utils.logging.set_verbosity_error()
    monkeypatch.setattr("engine.checkpoint.model_config.read_layout", recording.record)


def deepseek(folder: Path, **changes: Any) -> Path:
    arch, keys = THROUGH_TRANSFORMERS["deepseek_v3"]
    return make_model(folder, arch, **keys | changes)


def test_the_cache_keeps_the_latent_and_the_rotated_key_once(tmp_path: Path) -> None:
    model = ModelConfig.from_pretrained(deepseek(tmp_path))
    assert {(call.num_kv_heads, call.k_dim, call.v_dim) for call in model.calls} == {(1, 24, 16)}
    assert {call.kv_size for call in model.calls} == {16 + 8}
    assert {call.latent_of for call in model.calls} == {EXPANDED}
    runner = make_runner(str(tmp_path), kernels=KernelChoice("torch", "torch", "torch"))
    pool = runner.kv_pool
    rows = pool.num_slots + pool.page_size
    assert pool.num_bytes == rows * len(model.calls) * 24 * 4
    stored = {pool.get(layer).k.untyped_storage().data_ptr() for layer in range(len(model.calls))}
    values = {pool.get(layer).v.untyped_storage().data_ptr() for layer in range(len(model.calls))}
    assert stored == values
    assert isinstance(runner.model, TransformersModel)
    linears = [m for n, m in runner.model.decoder.named_modules() if n.endswith("kv_b_proj")]
    assert all(isinstance(linear, Absorbed) for linear in linears) and linears


def test_ranks_divide_the_queries_and_have_the_latents_whole(tmp_path: Path) -> None:
    call = ModelConfig.from_pretrained(deepseek(tmp_path)).calls[0]
    mine = call.on_rank(2)
    assert (mine.num_heads, mine.num_kv_heads, mine.kv_size) == (2, 1, 24)
    assert mine.latent_of == HeadSizes(2, 24, 16)
    assert mine.expanded == call.expanded.on_rank(2)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_backend_that_knows_latents_gives_the_tokens_of_transformers(
    tmp_path: Path, backend: str
) -> None:
    assert_same_as_transformers(deepseek(tmp_path), kernels=backend)


def test_a_backend_without_them_gets_all_keys_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is then as large as was calculated, and the tokens are the same."""
    folder = deepseek(tmp_path)
    model = ModelConfig.from_pretrained(folder)
    lack = lack_of_attention(torch.bfloat16, model.calls)
    assert "latents, of which values are a part of the keys" in lack
    expanded = model.for_backend("flashinfer")
    assert (expanded.num_kv_heads, expanded.head_dim) == (4, 24)
    assert {call.kv_size for call in expanded.calls} == {4 * (24 + 16)}
    assert "latents" not in lack_of_attention(torch.bfloat16, expanded.calls)
    monkeypatch.setattr(model_config, "LATENT_BACKENDS", frozenset())
    worker = make_worker_config(EngineConfig(model=str(folder)).resolve())
    assert worker.model.calls == expanded.calls
    assert_same_as_transformers(folder)


def test_the_memory_that_is_calculated_is_that_of_the_backend(tmp_path: Path) -> None:
    resolved = EngineConfig(model=str(deepseek(tmp_path))).resolve()
    layers = resolved.model.num_layers
    sizes = {
        backend: MemoryNeed.of(
            resolved, "float32", resolved.engine.kernel_choice(backend)
        ).per_token()
        for backend in ("cpu", "flashinfer")
    }
    assert sizes == {"cpu": layers * 24 * 4, "flashinfer": layers * 160 * 4}


def scaled(own: Expand) -> Expand:
    def expand(self: Any, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        return own(self, latent, rotated * 1.1)

    return expand


def bent(own: Expand) -> Expand:
    def expand(self: Any, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = own(self, latent, rotated)
        return keys, torch.tanh(values)

    return expand


def of_sizes(own: Expand) -> Expand:
    """What shows only where numbers are below 0: not as matrices are found."""

    def expand(self: Any, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        return own(self, latent.abs(), rotated)

    return expand


@pytest.mark.parametrize("change", [scaled, bent, of_sizes])
def test_what_computes_something_else_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Expand], Expand]
) -> None:
    monkeypatch.setattr(ATTENTION, "expand_kv", change(ATTENTION.expand_kv))
    folder = deepseek(tmp_path)
    calls = ModelConfig.from_pretrained(folder).calls
    assert {(call.latent_of, call.kv_size) for call in calls} == {(None, 4 * (24 + 16))}
    assert_same_as_transformers(folder)


@pytest.mark.parametrize(("rounded", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_scores_and_results_are_those_of_all_heads(rounded: torch.dtype, tolerance: float) -> None:
    heads, dim, rotated, latent, v_dim, tokens = 3, 6, 4, 8, 5, 7
    torch.manual_seed(0)
    up_keys, up_values = torch.randn(heads, dim, latent), torch.randn(heads, latent, v_dim)
    latents = Latents(up_keys.to(rounded), up_values.to(rounded))
    q = torch.randn(tokens, heads, dim + rotated)
    stored = torch.randn(tokens, latent + rotated)
    keys = torch.einsum("hdl,tl->thd", up_keys, stored[:, :latent])
    turned = stored[:, None, latent:].expand(-1, heads, -1)
    wanted = torch.einsum("qhd,thd->hqt", q, torch.cat((keys, turned), -1))
    absorbed = latents.queries(q.to(rounded))
    found = torch.einsum("qhd,td->hqt", absorbed.float(), stored)
    assert float((found - wanted).norm() / wanted.norm()) < tolerance
    weights = torch.rand(heads, tokens, tokens)
    values = torch.einsum("hlv,tl->thv", up_values, stored[:, :latent])
    wanted = torch.einsum("hqt,thv->qhv", weights, values)
    sums = torch.einsum("hqt,tl->qhl", weights, stored[:, :latent])
    found = latents.results(sums.to(rounded)).float()
    assert float((found - wanted).norm() / wanted.norm()) < tolerance


def test_matrices_are_found_by_what_they_do() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(3, 8, 11)

    class Module:
        def expand_kv(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
            made = latent @ matrix
            keys, values = made.split([6, 5], -1)
            return torch.cat((keys, rotated.expand(-1, 3, -1, -1)), -1), values

    found = Latents.of(Module(), LatentSizes(8, 4), torch.empty(0))
    assert found is not None
    assert torch.equal(found.keys, matrix[..., :6].transpose(1, 2))
    assert torch.equal(found.values, matrix[..., 6:])
    second = found.on_rank(1, 3, 1)
    assert torch.equal(second.values, found.values[1:2])


def test_a_plain_call_is_its_own_expansion() -> None:
    call = AttentionCall(4, 2, 8, 8, 1.0)
    assert call.expanded is call
