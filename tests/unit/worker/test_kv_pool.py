"""The KV cache's memory: what is written is what is read, rounded where the type is smaller."""

from __future__ import annotations

import pytest
import torch

from engine.attention.kv_pool import MHATokenToKVPool, resolve_kv_dtype
from engine.checkpoint.layout import AttentionCall, HeadSizes
from engine.config import EngineConfig, ResolvedConfig, load_config
from engine.errors import ConfigError
from engine.native import library
from engine.worker.auto_config import make_worker_config
from engine.worker.sizing.estimate import kv_bytes_per_token, profile_max_tokens
from tests.support.models import changed

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_gather_returns_what_was_set(dtype: torch.dtype) -> None:
    calls = [AttentionCall(6, 3, 8, 4, 1.0)] * 2
    pool = MHATokenToKVPool(32, 4, calls, dtype, CPU)
    model_dtype = torch.float32 if dtype == FP8 else dtype
    k, v = (torch.randn(5, 3, dim).to(model_dtype) for dim in (8, 4))
    slots = torch.tensor([4, 9, 33, 7, 35])
    pool.set_kv(1, slots, k, v)
    order = torch.tensor([2, 0, 4], dtype=torch.int32)
    found = pool.gather(1, slots[order.long()].int(), model_dtype)
    assert torch.equal(found.k, pool.as_stored(k)[order.long()])
    assert torch.equal(found.v, pool.as_stored(v)[order.long()])
    assert found.k.dtype == model_dtype
    assert not pool.gather(0, slots, model_dtype).k.any()
    assert pool.num_bytes == 36 * 2 * 3 * (8 + 4) * dtype.itemsize


def test_keys_of_another_call_take_no_memory() -> None:
    own, other = AttentionCall(4, 2, 8, 8, 1.0), AttentionCall(4, 1, 16, 16, 1.0)
    shared = AttentionCall(4, 2, 8, 8, 1.0, kv_of=0)
    pool = MHATokenToKVPool(4, 1, [own, other, shared], torch.float32, CPU)
    assert pool.num_bytes == 5 * 4 * (2 * 16 + 32)
    assert pool.get(2) is pool.get(0) and pool.get(1).k.shape == (5, 1, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_of_latents_the_values_are_in_the_keys(dtype: torch.dtype) -> None:
    plain = AttentionCall(4, 2, 8, 8, 1.0)
    call = AttentionCall(4, 1, 12, 8, 1.0, latent_of=HeadSizes(4, 10, 6))
    pool = MHATokenToKVPool(32, 4, [plain, call], dtype, CPU)
    assert pool.num_bytes == 36 * (2 * 16 + 12) * dtype.itemsize
    model_dtype = torch.float32 if dtype == FP8 else dtype
    k, slots = torch.randn(3, 1, 12).to(model_dtype), torch.tensor([4, 33, 7])
    pool.set_kv(1, slots, k, torch.full((3, 1, 8), torch.nan).to(model_dtype))
    found = pool.gather(1, slots.int(), model_dtype)
    assert torch.equal(found.k, pool.as_stored(k)) and torch.equal(found.v, found.k[..., :8])
    kv = pool.get(1)
    assert kv.v.data_ptr() == kv.k.data_ptr() and kv.v.shape == (36, 1, 8)


def test_float8_rounds_and_clamps() -> None:
    pool = MHATokenToKVPool(4, 1, [AttentionCall(1, 1, 4, 4, 1.0)], FP8, CPU)
    x = torch.tensor([[[0.1, -3.3, 1e6, -1e6]]])
    stored = pool.as_stored(x)
    assert stored.flatten().tolist()[2:] == [448.0, -448.0]
    torch.testing.assert_close(stored[..., :2], x[..., :2], rtol=1 / 16, atol=0)
    assert stored.flatten().tolist()[:2] != x.flatten().tolist()[:2]


def test_words() -> None:
    assert resolve_kv_dtype("auto", torch.bfloat16) is torch.bfloat16
    assert resolve_kv_dtype("fp8_e4m3", torch.bfloat16) is FP8
    with pytest.raises(ConfigError, match="auto or fp8_e4m3"):
        resolve_kv_dtype("int4", torch.bfloat16)


def resolved(**values: object) -> ResolvedConfig:
    config = {"model": "models/manta-small", "device": "cpu", **values}
    return load_config(EngineConfig, config).resolve()


def test_float8_holds_more_tokens() -> None:
    config = make_worker_config(
        resolved(dtype="float32", memory_fraction=0.5, attention_backend="torch")
    )
    assert kv_bytes_per_token(config, FP8) * 4 == kv_bytes_per_token(config, torch.float32)
    plain = profile_max_tokens(config)
    small = profile_max_tokens(changed(config, kv_cache_dtype="fp8_e4m3"))
    # In the torch backend the contiguous float32 copies stay: 8 bytes a number become 5.
    assert small > 1.4 * plain
    # Our kernels keep none. Half a page of the budget may be free in either.
    assert profile_max_tokens(changed(config, attention_backend="cpu")) > 1.9 * plain
    assert (
        make_worker_config(resolved(kv_cache_dtype="fp8_e4m3")).engine.kv_cache_dtype == "fp8_e4m3"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_backend", "flashinfer"),
        ("attention_backend", "flashinfer-fa3"),
        ("sampling_backend", "triton"),
    ],
)
def test_flashinfer_needs_a_gpu(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} {value} needs a GPU.*{key}: auto or torch"):
        make_worker_config(resolved(**{key: value}))


@pytest.mark.parametrize("has_kernels", [True, False])
def test_auto_on_cpu(has_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels where the library is, otherwise torch."""
    monkeypatch.setattr(library, "load", lambda: object() if has_kernels else None)
    monkeypatch.setattr(library, "reason", lambda: "no compiler")
    name = "cpu" if has_kernels else "torch"
    config = make_worker_config(resolved())
    assert (config.kernels.attention, config.kernels.sampling) == (name, name)
    plain = make_worker_config(resolved(attention_backend="torch"))
    assert (plain.kernels.attention, plain.kernels.sampling) == ("torch", "torch")
    if not has_kernels:
        with pytest.raises(ConfigError, match=r"no compiler.*attention_backend: torch"):
            make_worker_config(resolved(attention_backend="cpu"))
