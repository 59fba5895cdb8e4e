"""Finding and loading the library of CPU kernels; one warning where it can't be had."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.common import REPO_ROOT
from engine.native import library, machine
from engine.native.build import build, build_into
from engine.native.compiler import ISA_FLAGS
from engine.native.key import installed_torch, library_stem
from engine.native.library import KernelLibrary
from tests.support.native_sources import Compiler, needs_compiler

BREAK = 'case "$*" in */kernels.cpp*) exit 1;; esac'


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """The folder of shipped libraries."""
    folder = tmp_path / "lib"
    folder.mkdir()
    return folder


@pytest.fixture
def kernels(sources: Path, shipped: Path) -> KernelLibrary:
    return KernelLibrary(sources, shipped)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def has(processor_flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processor have these flags."""
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nflags\t\t: fpu sse {processor_flags}\n\nprocessor\t: 1\n")
    monkeypatch.setattr(machine, "CPU_INFO", info)


@pytest.fixture(autouse=True)
def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some processors of test machines lack what is needed; the stubs need nothing."""
    has("avx2 fma f16c", tmp_path, monkeypatch)


# Where it is found


@needs_compiler
def test_it_is_built_and_loaded_once(
    kernels: KernelLibrary, sources: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    loaded: list[object] = []
    threads = [threading.Thread(target=lambda: loaded.append(kernels.load())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    module = kernels.load()
    assert module is not None and loaded == [module] * 4
    assert module.sets() == " ".join(machine.instruction_sets(ISA_FLAGS))
    assert kernels.reason == "" and not warnings(caplog) and compiler.links == 1
    assert KernelLibrary(sources).load() is not None and compiler.links == 1


@needs_compiler
def test_a_shipped_library_needs_no_compiler_and_no_cache(
    kernels: KernelLibrary,
    sources: Path,
    shipped: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build_into(shipped, sources)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("MANTA_CACHE_DIR", str(tmp_path / "other"))
    assert not kernels.needs_build()
    module = kernels.load()
    assert module is not None and module.__file__ is not None
    assert Path(module.__file__).parent == shipped
    assert not (tmp_path / "other").exists()


@needs_compiler
def test_a_shipped_library_of_another_torch_is_not_taken(
    kernels: KernelLibrary, sources: Path, shipped: Path, cache: Path
) -> None:
    other = library_stem(sources, installed_torch()._replace(version="9.9"))
    (shipped / f"{other}.so").write_text("not for us")
    module = kernels.load()
    assert module is not None and str(module.__file__).startswith(str(cache))


@needs_compiler
def test_a_shipped_library_that_does_not_load_is_built_anew(
    kernels: KernelLibrary,
    sources: Path,
    shipped: Path,
    cache: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (shipped / f"{library_stem(sources, installed_torch())}.so").write_text("no library")
    module = kernels.load()
    assert module is not None and str(module.__file__).startswith(str(cache))
    assert not warnings(caplog)


def test_a_shipped_library_that_does_not_load_is_named(
    no_compiler: None, kernels: KernelLibrary, sources: Path, shipped: Path
) -> None:
    file = shipped / f"{library_stem(sources, installed_torch())}.so"
    file.write_text("no library")
    assert kernels.load() is None
    assert f"{file} can't be loaded" in kernels.reason


@needs_compiler
def test_an_earlier_build_is_taken_when_the_compiler_is_gone(
    kernels: KernelLibrary, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(sources)
    monkeypatch.setenv("PATH", "/nowhere")
    module = kernels.load()
    assert module is not None and module.__file__ == str(built)


# Why it can't be had


def test_the_user_can_switch_it_off(
    kernels: KernelLibrary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MANTA_CPU_KERNELS", "off")
    # Of this logger: another test may have set the level of `engine`.
    caplog.set_level(logging.INFO, "engine.native.library")
    assert not kernels.needs_build()
    assert kernels.load() is None
    assert kernels.reason == "MANTA_CPU_KERNELS switches them off"
    assert not warnings(caplog) and len(caplog.records) == 1


def test_without_a_compiler_there_is_one_warning(
    no_compiler: None, kernels: KernelLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    assert not kernels.needs_build()
    assert kernels.load() is None and kernels.load() is None
    (warning,) = warnings(caplog)
    assert "there is no C++ compiler; install g++ 11 or newer, then restart" in warning
    assert kernels.reason in warning


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("avx avx2 fma", "no F16C"),
        ("", "no AVX2 and no FMA and no F16C"),
        ("avx2x fma f16c", "no AVX2"),
    ],
)
def test_the_processor_must_have_what_the_first_set_needs(
    kernels: KernelLibrary,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    says: str,
) -> None:
    has(flags, tmp_path, monkeypatch)
    assert not kernels.needs_build()
    assert kernels.load() is None
    assert f"this processor has {says};" in kernels.reason
    assert "MANTA_CPU_KERNELS=off" in kernels.reason


def test_another_platform_is_told(kernels: KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert not kernels.needs_build()
    assert kernels.load() is None
    assert "Linux on x86-64 only" in kernels.reason and "aarch64" in kernels.reason


@needs_compiler
def test_a_failed_build_costs_the_next_process_nothing(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Compiler(tmp_path / "broken", BREAK)
    monkeypatch.setenv("CXX", str(broken.path))
    first, second = KernelLibrary(sources), KernelLibrary(sources)
    assert first.needs_build()
    assert first.load() is None
    count = len(broken.calls("-DMANTA_ISA"))
    assert not second.needs_build()
    assert second.load() is None and second.reason == first.reason
    assert "failed on kernels" in second.reason
    assert len(broken.calls("-DMANTA_ISA")) == count


@needs_compiler
def test_a_cache_that_cannot_be_written_is_told(
    kernels: KernelLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MANTA_CACHE_DIR", str(tmp_path / "file/cache"))
    assert kernels.load() is None
    assert "set MANTA_CACHE_DIR to a folder that can be written" in kernels.reason


@needs_compiler
def test_a_cache_that_is_only_read_is_enough_once_it_is_filled(
    kernels: KernelLibrary, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(sources)

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError("read-only")

    monkeypatch.setattr("os.replace", refuse)
    monkeypatch.setattr("os.mkdir", refuse)
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert kernels.load() is not None


@needs_compiler
def test_a_library_for_other_symbols_is_told(kernels: KernelLibrary, sources: Path) -> None:
    """As one would be that was compiled for another torch."""
    text = (sources / "kernels.cpp").read_text()
    declared = text.replace("int JOIN", "int of_another_torch();\nint JOIN")
    (sources / "kernels.cpp").write_text(
        declared.replace("int count = 0", "int count = of_another_torch()")
    )
    assert kernels.load() is None
    assert "can't be loaded" in kernels.reason and "of_another_torch" in kernels.reason
    assert "remove it, then restart" in kernels.reason


# What it shares with torch

_THREADS = """
import sys
from pathlib import Path
from engine.native.library import KernelLibrary
import torch
module = KernelLibrary(Path(sys.argv[1])).load()
torch.set_num_threads(3)
print(module.threads())
torch.set_num_threads(2)
print(module.threads())
maps = [line.split()[-1] for line in open("/proc/self/maps")]
print(len({path for path in maps if "omp" in path.rpartition("/")[2] and ".so" in path}))
"""


@needs_compiler
def test_it_has_torchs_threads_and_no_second_libgomp(sources: Path) -> None:
    command = [sys.executable, "-c", _THREADS, str(sources)]
    ran = subprocess.run(command, cwd=REPO_ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert ran.stdout.split() == ["3", "2", "1"]


_NEED = """
import sys
from pathlib import Path
from engine.native.library import KernelLibrary
print(KernelLibrary(Path(sys.argv[1])).needs_build(), "torch" in sys.modules)
"""


@needs_compiler
def test_the_launcher_asks_without_torch(sources: Path, kernels: KernelLibrary) -> None:
    command = [sys.executable, "-c", _NEED, str(sources)]
    machine_has_it = not machine.unsuitable_processor()
    for needed in (True, False):
        assert kernels.needs_build() == needed
        ran = subprocess.run(command, cwd=REPO_ROOT, stdout=subprocess.PIPE, text=True, check=True)
        assert ran.stdout.split() == [str(needed and machine_has_it), "False"]
        build(sources)


def test_the_processs_library_is_one(monkeypatch: pytest.MonkeyPatch, sources: Path) -> None:
    monkeypatch.setenv("MANTA_CPU_KERNELS", "off")
    monkeypatch.setattr(library, "_LIBRARY", KernelLibrary(sources))
    assert library.load() is None and not library.needs_build()
    assert library.reason() == "MANTA_CPU_KERNELS switches them off"
