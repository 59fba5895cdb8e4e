"""Which kernels a configuration gets on CPU."""

from __future__ import annotations

import pytest

from engine import LLM, SamplingParams
from engine.config import EngineConfig, KernelChoice, load_config
from engine.errors import ConfigError
from engine.native import library
from engine.worker.auto_config import make_worker_config


def chosen(**values: str) -> KernelChoice:
    """What the keys become on this machine."""
    config = {"model": "models/manta-small", "device": "cpu", "dtype": "float32", **values}
    return make_worker_config(load_config(EngineConfig, config).resolve()).kernels


def resolve(**values: str) -> str:
    """What `sampling_backend` becomes on this machine."""
    return chosen(**values).sampling


@pytest.mark.skipif(library.load() is None, reason="no CPU kernels")
def test_auto_follows_the_attention_backend() -> None:
    assert resolve() == "cpu"
    assert resolve(attention_backend="torch") == "torch"
    assert resolve(attention_backend="torch", sampling_backend="cpu") == "cpu"
    assert resolve(sampling_backend="torch") == "torch"


@pytest.mark.skipif(library.load() is None, reason="no CPU kernels")
@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, ("cpu", "cpu", "cpu")),
        ({"kernels": "torch"}, ("torch", "torch", "torch")),
        ({"attention_backend": "torch"}, ("torch", "torch", "torch")),
        ({"kernels": "cpu", "attention_backend": "torch"}, ("cpu", "torch", "cpu")),
        ({"kernels": "torch", "attention_backend": "cpu"}, ("torch", "cpu", "torch")),
        ({"kernels": "torch", "sampling_backend": "cpu"}, ("torch", "torch", "cpu")),
    ],
)
def test_one_word_chooses_all_and_each_can_be_overridden(
    keys: dict[str, str], wanted: tuple[str, str, str]
) -> None:
    assert chosen(**keys) == wanted
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM("models/manta-small", dtype="float32", kernels="torch") as llm:
        expected = llm.generate([[5, 6, 7, 8]], sampling)[0].outputs[0].token_ids
    with LLM("models/manta-small", dtype="float32", **keys) as llm:
        assert llm.generate([[5, 6, 7, 8]], sampling)[0].outputs[0].token_ids == expected


def test_int8_needs_its_kernels() -> None:
    for key in ("kernels", "attention_backend"):
        with pytest.raises(ConfigError, match=f"int8 needs {key}: auto or cpu, not torch"):
            chosen(quantization="int8", **{key: "torch"})


def test_kernels_need_their_device() -> None:
    with pytest.raises(ConfigError, match="kernels cpu needs device cpu"):
        chosen(kernels="cpu", device="simulated")
    with pytest.raises(ConfigError, match="kernels flashinfer needs a GPU"):
        chosen(kernels="flashinfer")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda: None)
    monkeypatch.setattr(library, "reason", lambda: "no compiler")
    assert resolve() == "torch"
    with pytest.raises(ConfigError, match=r"kernels cpu needs .*: no compiler\. kernels: torch"):
        chosen(kernels="cpu")
    with pytest.raises(ConfigError, match=r"sampling_backend cpu needs .*: no compiler\. samp"):
        resolve(sampling_backend="cpu")


def test_cpu_backend_needs_the_cpu() -> None:
    with pytest.raises(ConfigError, match="sampling_backend cpu needs device cpu"):
        resolve(sampling_backend="cpu", device="simulated")
