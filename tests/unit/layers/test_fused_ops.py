"""Fused layers over the fake package compute what the torch layers do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.attention import flashinfer_backend
from engine.checkpoint.model_config import RopeConfig
from engine.device.distributed import ParallelState
from engine.layers import kernel_set
from engine.layers.activation import SiluAndMul
from engine.layers.fused_ops import FlashInferOps, FusedOps
from engine.layers.layernorm import RMSNorm
from engine.layers.rotary import RotaryEmbedding
from engine.layers.weights import DummySource
from engine.registry import KERNELS
from tests.support.fake_flashinfer import install
from tests.support.models import LLAMA3_ROPE, make_model
from tests.support.step_driver import DrivenReq, StepDriver, make_runner

CPU = torch.device("cpu")


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> FusedOps:
    torch.set_num_threads(1)
    install(monkeypatch)
    return FlashInferOps()


def norms(fused: FusedOps, size: int) -> tuple[RMSNorm, RMSNorm]:
    plain, fast = RMSNorm(size, 1e-5), RMSNorm(size, 1e-5, fused)
    source = DummySource(0, torch.float32, CPU)
    for norm in (plain, fast):
        norm.load(source, "norm.weight")
        norm.weight = torch.linspace(0.5, 1.5, size)
    return plain, fast


def test_norms(fused: FusedOps) -> None:
    plain, fast = norms(fused, 32)
    x, residual = torch.randn(5, 32), torch.randn(5, 32)
    torch.testing.assert_close(fast(x), plain(x))
    assert fast(x[:0]).shape == (0, 32)
    wanted = plain.add_and_norm(x, residual)
    found = fast.add_and_norm(x.clone(), residual.clone())
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    first, kept = fast.add_and_norm(x, None)
    assert kept is x
    torch.testing.assert_close(first, plain(x))


def test_norm_of_heads_leaves_its_view_alone(fused: FusedOps) -> None:
    plain, fast = norms(fused, 8)
    qkv = torch.randn(5, 6, 8)
    before = qkv.clone()
    torch.testing.assert_close(fast(qkv[:, :4]), plain(qkv[:, :4]))
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("scaled", [False, True])
def test_rope(fused: FusedOps, scaled: bool) -> None:
    rope = RopeConfig(10000.0)
    if scaled:
        params = {k: v for k, v in LLAMA3_ROPE.items() if k not in ("rope_type", "rope_theta")}
        rope = RopeConfig(10000.0, "llama3", params)
    plain = RotaryEmbedding(16, 100, rope, CPU)
    fast = RotaryEmbedding(16, 100, rope, CPU, fused)
    positions = torch.tensor([0, 5, 99, 7])
    qkv = torch.randn(4, 6, 16)
    wanted = plain.lookup(positions, torch.float32).rotate_joint(qkv[:, :4].clone(), 3)
    values = qkv[:, 4:].clone()
    found = fast.lookup(positions, torch.float32).rotate_joint(qkv[:, :4], 3)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(qkv[:, 4:], values)
    q, k = torch.randn(4, 2, 16), torch.randn(4, 1, 16)
    wanted = plain.lookup(positions, torch.float32).rotate(q.clone(), k.clone())
    found = fast.lookup(positions, torch.float32).rotate(q, k)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_activation(fused: FusedOps) -> None:
    gate_up = torch.randn(3, 20)
    torch.testing.assert_close(SiluAndMul(fused)(gate_up), SiluAndMul()(gate_up))


def test_only_where_they_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert KERNELS["torch"].fused_ops(CPU, torch.bfloat16) is None
    install(monkeypatch)
    assert KERNELS["flashinfer"].fused_ops(cuda, torch.float32) is None
    assert KERNELS["torch"].fused_ops(cuda, torch.bfloat16) is None
    found = KERNELS["flashinfer"].fused_ops(cuda, torch.bfloat16)
    assert isinstance(found, FlashInferOps)


def test_a_stage_leaves_its_input_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused norms add in place, but not to the hidden states that another stage sent."""
    torch.set_num_threads(1)
    install(monkeypatch)
    with_ops = replace(kernel_set.TORCH, fused_ops=lambda *args: FlashInferOps())
    monkeypatch.setattr(kernel_set, "TORCH", with_ops)
    parallel = ParallelState(0, 1, 1, 2)
    runner = make_runner(str(make_model(tmp_path, "LlamaForCausalLM")), parallel=parallel)
    driver = StepDriver(runner)
    batch = runner.prepare(driver.build([(driver.add([1, 2, 3]), 3)], []))
    runner.attention.init_forward(batch)
    hidden = torch.randn(3, runner.config.model.hidden_size)
    before = hidden.clone()
    out = runner.model.forward(batch, runner.attention, hidden)
    assert torch.equal(hidden, before)
    assert not torch.equal(out, before)


MODELS = {
    "LlamaForCausalLM": {"rope_parameters": LLAMA3_ROPE},
    "MistralForCausalLM": {"sliding_window": 20},
    "Qwen3ForCausalLM": {"head_dim": 16},
}


@pytest.mark.parametrize("arch", MODELS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_whole_models_give_the_same_tokens(
    arch: str, page_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention and layers of the package against torch: chunks, mixed steps, decode, graphs."""
    torch.set_num_threads(1)
    folder = str(make_model(tmp_path / arch, arch, **MODELS[arch]))
    plain = make_runner(folder, page_size=page_size)
    install(monkeypatch)
    monkeypatch.setattr(flashinfer_backend, "FLOAT_WORKSPACE_BYTES", 1024)
    monkeypatch.setattr(flashinfer_backend, "INT_WORKSPACE_BYTES", 4096)
    with_ops = replace(kernel_set.FLASHINFER, fused_ops=lambda *args: FlashInferOps())
    monkeypatch.setattr(kernel_set, "FLASHINFER", with_ops)
    fast = make_runner(folder, page_size=page_size, attention_backend="flashinfer")
    assert isinstance(fast.attention, flashinfer_backend.FlashInferAttentionBackend)
    # The rotation writes keys and values, in one kernel.
    monkeypatch.setattr(fast.attention.pool, "set_kv", None, raising=False)
    tokens = []
    for runner in (plain, fast):
        driver = StepDriver(runner)
        reqs = [
            driver.add([(7 * i + j * j) % 200 for j in range(n)]) for i, n in enumerate((40, 9))
        ]

        def step(extends: list[tuple[DrivenReq, int]], decodes: list[DrivenReq]) -> None:
            logits, _ = driver.run(extends, decodes)  # noqa: B023
            assert logits is not None
            rows = [*(req for req, _ in extends), *decodes]
            for req, token in zip(rows, logits.argmax(-1).tolist(), strict=True):
                if req.done == len(req.tokens):
                    req.tokens.append(token)

        step([(reqs[0], 25)], [])
        step([(reqs[0], 15), (reqs[1], 9)], [])
        for _ in range(6):
            step([], reqs)
        late = driver.add(list(range(50, 80)))
        step([(late, 30)], reqs)
        for _ in range(12):
            step([], [*reqs, late])
        tokens.append([req.tokens for req in (*reqs, late)])
    assert tokens[0] == tokens[1]
