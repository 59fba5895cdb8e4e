"""scripts/install.py: no gigabytes of CUDA where there is no GPU, unless asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "scripts/install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install = _load()


class Pip:
    """Notes what pip is asked; `fails` are words of commands that fail."""

    def __init__(self, *fails: str) -> None:
        self.asked: list[list[str]] = []
        self._fails = fails

    def __call__(self, arguments: Sequence[str]) -> int:
        self.asked.append(list(arguments))
        return int(any(word in arguments for word in self._fails))


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A fresh machine with Linux; what is run of Manta itself is noted, and fails."""
    run: list[list[str]] = []
    monkeypatch.setattr(install, "_run_module", lambda words: run.append(list(words)) or 1)
    monkeypatch.setattr(install, "_installed", lambda version: False)
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(install.platform, "system", lambda: "Linux")
    monkeypatch.setattr(install.platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("TORCH", raising=False)
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    return run


def test_without_a_gpu_torch_comes_from_the_index_of_cpu_builds() -> None:
    pip = Pip("--no-index")
    assert install.main([], pip) == 0
    _, torch, rest = pip.asked
    assert torch[torch.index("--index-url") + 1] == install.CPU_INDEX
    assert torch[-1] == f"torch=={install.pinned_torch()}" and "--no-deps" in torch
    assert rest == ["install", "-c", str(ROOT / "constraints.txt"), "-e", str(ROOT)]


def test_another_index_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_INDEX", "https://mirror.example/cpu")
    pip = Pip("--no-index")
    install.main([], pip)
    assert "https://mirror.example/cpu" in pip.asked[1]


def test_a_folder_of_wheels_with_torch_wins() -> None:
    pip = Pip()
    assert install.main(["--extras", "dev"], pip) == 0
    assert ["--no-index" in asked for asked in pip.asked] == [True, False]
    assert pip.asked[-1][-1] == f"{ROOT}[dev]"


def test_an_index_that_does_not_answer_is_told_and_the_rest_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pip = Pip("--no-index", "--index-url")
    assert install.main([], pip) == 0
    assert "may bring CUDA" in capsys.readouterr().out
    assert len(pip.asked) == 3


@pytest.mark.parametrize("asked", [["--torch", "cuda"], []])
def test_with_a_gpu_or_when_asked_for_it_is_the_ordinary_build(
    monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: not asked)
    pip = Pip()
    assert install.main(asked, pip) == 0
    assert len(pip.asked) == 1


def test_an_installed_torch_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "_installed", lambda version: version == install.pinned_torch())
    pip = Pip()
    assert install.main([], pip) == 0
    assert len(pip.asked) == 1


def test_pips_failure_is_the_commands(modules: list[list[str]]) -> None:
    assert install.main([], Pip("-e")) == 1
    assert modules == []


def test_cpu_kernels_are_built_and_may_fail(modules: list[list[str]]) -> None:
    assert install.main([], Pip()) == 0
    assert modules == [["engine.native.build"]]


def test_with_a_gpu_no_cpu_kernels_are_built(
    monkeypatch: pytest.MonkeyPatch, modules: list[list[str]]
) -> None:
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: True)
    assert install.main([], Pip()) == 0
    assert modules == []
