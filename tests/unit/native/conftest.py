"""Each test has a cache of its own, and the compiler that it asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.native_sources import Compiler, write_sources


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache. It doesn't exist yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MANTA_CACHE_DIR", str(folder))
    for name in ("CXX", "MANTA_CPU_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def all_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process builds as for a processor with every instruction set."""
    monkeypatch.setattr("engine.native.build.instruction_sets", list)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return write_sources(tmp_path / "sources")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """g++, with its calls counted, as `$CXX`."""
    made = Compiler(tmp_path / "compiler")
    monkeypatch.setenv("CXX", str(made.path))
    return made


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
