"""Which sampling backend a configuration gets on CPU."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig, load_config
from engine.errors import ConfigError
from engine.native import library
from engine.worker.auto_config import make_worker_config


def resolve(**values: str) -> str:
    """What `sampling_backend` becomes on this machine."""
    config = {"model": "models/manta-small", "device": "cpu", "dtype": "float32", **values}
    return make_worker_config(load_config(EngineConfig, config).resolve()).sampling_backend


@pytest.mark.skipif(library.load() is None, reason="no CPU kernels")
def test_auto_follows_the_attention_backend() -> None:
    assert resolve() == "cpu"
    assert resolve(attention_backend="torch") == "torch"
    assert resolve(attention_backend="torch", sampling_backend="cpu") == "cpu"
    assert resolve(sampling_backend="torch") == "torch"


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda: None)
    monkeypatch.setattr(library, "reason", lambda: "no compiler")
    assert resolve() == "torch"
    with pytest.raises(ConfigError, match=r"sampling_backend cpu needs .*: no compiler\. samp"):
        resolve(sampling_backend="cpu")


def test_cpu_backend_needs_the_cpu() -> None:
    with pytest.raises(ConfigError, match="sampling_backend cpu needs device cpu"):
        resolve(sampling_backend="cpu", device="simulated")
