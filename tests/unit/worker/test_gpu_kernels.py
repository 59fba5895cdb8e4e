"""FlashInfer's kernels are chosen only where they can be had; the rest is said by name."""

from __future__ import annotations

import logging
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.start.child import OUR_WARNING
from engine.attention import flashinfer_backend
from engine.checkpoint.layout import AttentionCall
from engine.config import EngineConfig, WorkerConfig, load_config
from engine.device import flashinfer_modules, triton_loader
from engine.errors import ConfigError
from engine.registry import KERNELS
from engine.worker import auto_config, gpu_kernels
from engine.worker.auto_config import make_worker_config
from tests.support.flashinfer_package import forget_package, install_package
from tests.support.source_files import ROOT

CUDA = torch.device("cuda")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """FlashInfer is installed without compiled modules, and the machine has no compiler."""
    monkeypatch.setattr(auto_config, "detect_device", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    has_triton(monkeypatch)
    found = install_package(tmp_path / "packages", monkeypatch)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX", "FLASHINFER_DISABLE_JIT"):
        monkeypatch.delenv(name, raising=False)
    yield found
    forget_package(monkeypatch)


def has_triton(monkeypatch: pytest.MonkeyPatch, lack: str = "") -> None:
    for module in (triton_loader, gpu_kernels):
        monkeypatch.setattr(module, "lack_of_triton", lambda: lack)


def resolve(head_dim: int = 128, window: int | None = None, **values: Any) -> WorkerConfig:
    """The configuration of a GPU's worker for a model with such heads."""
    values = {"model": "models/manta-small", "device": "cuda", "dtype": "bfloat16", **values}
    resolved = load_config(EngineConfig, values).resolve()
    windows = (None, *[window] * (resolved.model.num_layers - 1))
    model = replace(resolved.model, head_dim=head_dim, layer_windows=windows)
    return make_worker_config(replace(resolved, model=model))


def compile_all(package: Path, **options: Any) -> None:
    """Put modules into the package, as scripts/build_kernels.py does."""
    dtype = torch.bfloat16
    kv_dtype = options.get("kv_dtype", dtype)
    modules = list(flashinfer_modules.operator_modules())
    for window in options.get("windows", (False,)):
        for fa3 in options.get("fa3", (False,)):
            modules += flashinfer_modules.prefill_modules(dtype, kv_dtype, 128, window, fa3=fa3)
        modules += flashinfer_modules.decode_modules(dtype, kv_dtype, 128, window)
    for spec in modules:
        path = package / "data" / "aot" / spec.name / f"{spec.name}.so"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_torch_needs_nothing_of_flashinfer(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its compiler nor its import: the configuration that the advice names."""
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    config = resolve(attention_backend="torch")
    assert (config.kernels.attention, config.kernels.sampling) == ("torch", "torch")
    assert KERNELS[config.kernels.layers].fused_ops(CUDA, torch.bfloat16) is None


@pytest.mark.parametrize("name", ["auto", "flashinfer"])
def test_no_modules_and_no_compiler(package: Path, name: str) -> None:
    with pytest.raises(ConfigError) as told:
        resolve(attention_backend=name)
    text = str(told.value)
    assert "norms, RoPE and activations" in text and "there is no nvcc" in text
    assert "`flashinfer download-kernels`" in text
    assert "set kernels: torch" in text


def test_a_compiler_is_nvcc_with_ninja_and_a_host_compiler(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [("bin/nvcc", "there is no nvcc at"), ("ninja", "no ninja"), ("c++", r"no c\+\+")]
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    for program, lack in wanted:
        with pytest.raises(ConfigError, match=lack):
            resolve()
        path = tmp_path / ("cuda" if "/" in program else "bin") / program
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    assert resolve().kernels.attention == "flashinfer"
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "bin" / "ninja").rename(tmp_path / "venv" / "bin" / "ninja")
    assert resolve().kernels.attention == "flashinfer", "FlashInfer's own lies beside Python"
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    with pytest.raises(ConfigError, match="FLASHINFER_DISABLE_JIT is set"):
        resolve()


def test_compiled_modules_are_enough(package: Path) -> None:
    compile_all(package)
    config = resolve()
    assert (config.kernels.attention, config.kernels.sampling) == ("flashinfer", "triton")


@pytest.mark.parametrize(
    ("options", "config", "lack"),
    [
        ({}, {"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype fp8_e4m3"),
        ({}, {"window": 64}, "sliding windows"),
        ({}, {"attention_backend": "flashinfer-fa3"}, "FlashAttention 3"),
        ({}, {"head_dim": 256}, "head_dim 256"),
        ({}, {"dtype": "float16"}, "attention of float16"),
        ({"kv_dtype": torch.float8_e4m3fn}, {}, "kv_cache_dtype auto"),
    ],
)
def test_what_the_image_lacks_is_refused_by_name(
    package: Path, options: dict[str, Any], config: dict[str, Any], lack: str
) -> None:
    compile_all(package, **options)
    with pytest.raises(ConfigError, match=f"no compiled kernels for [^;]*{lack}[^;]*, and can't"):
        resolve(**config)


def test_what_was_compiled_for_it_runs(package: Path) -> None:
    compile_all(package, windows=(False, True), fa3=(False, True))
    compile_all(package, windows=(False, True), kv_dtype=torch.float8_e4m3fn)
    for config in ({"kv_cache_dtype": "fp8_e4m3", "window": 64}, {"window": 64}):
        assert resolve(**config).kernels.attention == "flashinfer"
    fa3 = resolve(attention_backend="flashinfer-fa3")
    assert fa3.kernels.attention == "flashinfer-fa3"


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (["9.0a"], (9, 0), True),
        (["9.0a"], (8, 0), False),
        (["9.0a"], (10, 0), False),
        (["8.0"], (8, 9), True),
        (["8.9"], (8, 0), False),
        (["8.0", "9.0a"], (9, 0), True),
    ],
)
def test_another_card_than_the_image_is_for(
    package: Path,
    monkeypatch: pytest.MonkeyPatch,
    built: list[str],
    capability: tuple[int, int],
    runs: bool,
) -> None:
    compile_all(package)
    flashinfer_modules.write_manifest(package / "data" / "aot", built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if runs:
        assert resolve().kernels.attention == "flashinfer"
        return
    with pytest.raises(ConfigError, match=r"capability .*, and the GPU has \d+\.\d.*CUDA_ARCHS"):
        resolve()
    assert resolve(attention_backend="torch").kernels.sampling == "torch"


def test_flashinfer_needs_triton_too(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_all(package)
    monkeypatch.setattr(triton_loader, "lack_of_triton", lambda: "it is broken")
    with pytest.raises(ConfigError, match="Triton can't run here: it is broken"):
        resolve()
    assert resolve(kernels="torch").kernels.attention == "torch"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "kv_dtype", "rows"),
    [
        (32, 8, torch.bfloat16, 1626),
        (64, 8, torch.bfloat16, 1355),
        (64, 64, torch.float8_e4m3fn, 240),
        (64, 64, torch.bfloat16, None),
    ],
)
def test_rows_that_the_workspace_has_room_for(
    heads: int, kv_heads: int, kv_dtype: torch.dtype, rows: int | None
) -> None:
    """The numbers that FlashInfer's compiled planner takes; of one more it says that its workspace
    is too small."""
    call = AttentionCall(heads, kv_heads, 128, 128, 1.0)
    assert flashinfer_backend.max_captured_rows(call, kv_dtype) == rows


def test_graphs_are_no_larger_than_the_workspace(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_all(package)
    monkeypatch.setattr(gpu_kernels, "max_captured_rows", lambda call, kv_dtype: 200)
    assert resolve().cuda_graph_max_batch_size == 200
    few = resolve(cuda_graph_max_batch_size=150)
    assert few.cuda_graph_max_batch_size == 150
    with pytest.raises(ConfigError, match=r"cuda_graph_max_batch_size 201: .* at most 200 rows"):
        resolve(cuda_graph_max_batch_size=201)
    assert resolve(kernels="torch").cuda_graph_max_batch_size == 256


def test_a_gpu_without_flashinfer_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(auto_config, "detect_device", lambda: "cuda")
    monkeypatch.setattr(gpu_kernels, "flashinfer_installed", lambda: False)
    has_triton(monkeypatch)
    config = resolve()
    assert (config.kernels.attention, config.kernels.sampling) == ("torch", "triton")
    (line,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "FlashInfer isn't installed" in line.getMessage() and "[gpu]" in line.getMessage()


def test_a_gpu_without_triton_says_so(
    package: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without FlashInfer auto goes on with torch; what needs Triton is refused."""
    compile_all(package)
    has_triton(monkeypatch, "Triton isn't installed")
    asked: tuple[dict[str, str], ...] = (
        {},
        {"kernels": "flashinfer"},
        {"kernels": "torch", "sampling_backend": "triton"},
    )
    for keys in asked:
        with pytest.raises(ConfigError, match=r"Triton isn't installed.* kernels: torch"):
            resolve(**keys)
    monkeypatch.setattr(gpu_kernels, "flashinfer_installed", lambda: False)
    assert resolve().kernels == ("torch", "torch", "torch")
    assert "Triton isn't installed: tokens are drawn with torch's operators" in caplog.text


@pytest.mark.parametrize(
    ("installed", "programs", "lack"),
    [
        (False, ["gcc"], "Triton isn't installed"),
        (True, [], "no gcc on the PATH"),
        (True, ["gcc"], ""),
        (True, ["clang"], ""),
    ],
)
def test_triton_needs_a_c_compiler(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    installed: bool,
    programs: list[str],
    lack: str,
) -> None:
    for program in programs:
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(triton_loader, "find_spec", lambda name: object() if installed else None)
    include = tmp_path / "include"
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(include)})
    include.mkdir()
    (include / "Python.h").touch()
    found = triton_loader.lack_of_triton()
    assert lack in found and bool(found) == bool(lack)
    (include / "Python.h").unlink()
    assert "there is no" in triton_loader.lack_of_triton() or not installed
    if lack:
        with pytest.raises(ConfigError, match=f"{lack}.*set kernels: torch"):
            triton_loader.require_triton()


_PREPARE = """
from engine.actors.worker_actor import WorkerActor
from engine.config import EngineConfig
from engine.worker import auto_config
auto_config.detect_device = lambda: "cuda"
WorkerActor(0).prepare(EngineConfig(device="cuda"), 1)
"""


def test_the_warning_reaches_the_terminal_of_a_server() -> None:
    """The launcher shows lines that look like this; a worker decides before it runs."""
    done = subprocess.run(
        [sys.executable, "-c", _PREPARE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = [match for line in done.stderr.splitlines() if (match := OUR_WARNING.search(line))]
    assert {match[2].partition(":")[0] for match in found} == {"engine.worker.gpu_kernels"}
    assert "FlashInfer has no kernels for dtype bfloat16 with head_dim 32" in found[0][2]


def test_a_model_without_kernels_says_so(package: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert resolve(head_dim=96).kernels == ("torch", "torch", "triton")
    assert "FlashInfer has no kernels for dtype bfloat16 with head_dim 96" in caplog.text
    with pytest.raises(ConfigError, match=r"no kernels for dtype .* head_dim 96"):
        resolve(head_dim=96, attention_backend="flashinfer")


def test_fa3_needs_hopper(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match="flashinfer-fa3 needs a Hopper GPU"):
        resolve(attention_backend="flashinfer-fa3")


def test_fa3_has_no_float8_cache() -> None:
    with pytest.raises(ConfigError, match="flashinfer-fa3 can't read a KV cache of another type"):
        resolve(attention_backend="flashinfer-fa3", kv_cache_dtype="fp8_e4m3")


def test_a_draft_model_on_a_gpu_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto_config, "detect_device", lambda: "cuda")
    drafts = {"method": "draft_model", "model": "models/manta-small"}
    config = {"model": "models/manta-small", "speculative_config": drafts}
    with pytest.raises(ConfigError, match="draft_model runs on CPU only so far"):
        load_config(EngineConfig, {**config, "device": "cuda"}).resolve()
    resolved = load_config(EngineConfig, config).resolve()
    with pytest.raises(ConfigError, match="draft_model runs on CPU only so far"):
        make_worker_config(resolved)
    assert load_config(EngineConfig, {**config, "device": "cpu"}).resolve()
