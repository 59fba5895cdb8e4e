"""Multi-head latent attention over latents: which modules get it, and that numbers stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from engine.attention.cpu_backend import expands_from
from engine.attention.flashinfer_backend import lack_of_attention
from engine.checkpoint import model_config
from engine.checkpoint.layout import AttentionCall, HeadSizes
from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig, KernelChoice
from engine.memory_need import MemoryNeed
from engine.models import recording
from engine.models.latents import Absorbed, Latents, LatentSizes
from engine.models.transformers_model import TransformersModel
from engine.native import library
from engine.worker.auto_config import make_worker_config
from tests.support.models import THROUGH_TRANSFORMERS, make_model
from tests.support.other_architectures import SHARED, assert_same_as_transformers
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


@pytest.mark.skipif(library.load() is None, reason="needs the CPU kernels")
@pytest.mark.parametrize("num_bytes", [1 << 20, 20_000])
def test_long_chunks_attend_to_keys_and_values_that_are_made_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    """All heads at once or not, beside decodes and short chunks."""
    folder = deepseek(tmp_path, kv_lora_rank=64)
    call = ModelConfig.from_pretrained(folder).calls[0]
    assert expands_from(call) == 64 * 32 // (72 + 64 - 24 - 16) + 1 == 22
    assert expands_from(msgspec.structs.replace(call, k_dim=16, v_dim=8)) is None
    odd = msgspec.structs.replace(call, latent_of=HeadSizes(4, 25, 16))
    assert expands_from(odd) is None
    heads: list[int] = []
    expand = Latents.expand

    def watch(self: Latents, latents: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        heads.append(some.stop - some.start)
        return expand(self, latents, some)

    monkeypatch.setattr(Latents, "expand", watch)
    monkeypatch.setattr("engine.attention.cpu_backend.EXPANDED_BYTES", num_bytes)
    runs = [{"chunked_prefill_size": -1}, {"chunked_prefill_size": 32, "warm": [SHARED]}]
    assert_same_as_transformers(folder, runs, kernels="cpu")
    assert (max(heads), min(heads)) == ((4, 4) if num_bytes > 20_000 else (3, 1))
    heads.clear()
    assert_same_as_transformers(folder, [{"chunked_prefill_size": 16}], kernels="cpu")
    assert not heads, "chunks were too short"


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
        backend: MemoryNeed.of(resolved, "float32", backend).per_token()
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
    latents = Latents(up_keys.to(rounded), up_values.transpose(1, 2).to(rounded))
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
            return torch.cat((keys, rotated.expand(*keys.shape[:-1], -1)), -1), values

    found = Latents.of(Module(), LatentSizes(8, 4), torch.empty(0))
    assert found is not None
    assert torch.equal(found.keys, matrix[..., :6].transpose(1, 2))
    assert torch.equal(found.values, matrix[..., 6:].transpose(1, 2))
    given = torch.randn(4, 12)
    latent, rotated = given.split([8, 4], -1)
    wanted = Module().expand_kv(latent, rotated)
    for mine, own in zip(found.expand(given, slice(1, 3)), wanted, strict=True):
        torch.testing.assert_close(mine, own[1:3].transpose(0, 1))
    second = found.on_rank(1, 3, 1)
    assert torch.equal(second.values, found.values[1:2])


def test_a_plain_call_is_its_own_expansion() -> None:
    call = AttentionCall(4, 2, 8, 8, 1.0)
    assert call.expanded is call
