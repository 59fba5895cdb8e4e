"""The launcher and its child."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.start import gpus, kernels
from deploy.start.target import load_target
from tests.support.native_sources import Compiler, needs_compiler

_IN_BACKGROUND = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from deploy.start.child import prepare_child
child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
for prepare in (None, prepare_child):
    subprocess.run([sys.executable, "-c", child], preexec_fn=prepare)
"""


def test_serve_run_hears_ctrl_c_where_the_launcher_runs_in_the_background() -> None:
    """Shells start background commands with SIGINT ignored, which children inherit."""
    ran = subprocess.run(
        [sys.executable, "-c", _IN_BACKGROUND], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["False", "True"]


# CPU kernels

SMALL = "models/manta-small"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file that appears when kernels are built. They are needed, there is no GPU, and the build
    fails."""
    file = tmp_path / "built"
    code = f"import pathlib, sys; pathlib.Path({str(file)!r}).touch(); sys.exit(1)"
    monkeypatch.setattr(kernels, "BUILD", (sys.executable, "-c", code))
    monkeypatch.setattr(kernels, "needs_build", lambda: True)
    monkeypatch.setattr(gpus, "has_nvidia_gpu", lambda: False)
    return file


def test_the_launcher_builds_cpu_kernels_and_goes_on_without(built: Path) -> None:
    kernels.build_kernels(load_target(SMALL, []))
    assert built.exists()


def test_built_kernels_cost_no_process(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "needs_build", lambda: False)
    kernels.build_kernels(load_target(SMALL, []))
    assert not built.exists()


@pytest.mark.parametrize("device", ["cuda", "simulated"])
def test_other_devices_need_no_cpu_kernels(built: Path, device: str) -> None:
    kernels.build_kernels(load_target(SMALL, [f"device={device}"]))
    assert not built.exists()


_BUILD = """
from deploy.start import kernels
from deploy.start.target import load_target
from deploy.start import gpus
gpus.has_nvidia_gpu = lambda: False
kernels.needs_build = lambda: True
kernels.build_kernels(load_target("models/manta-small", []))
"""


@needs_compiler
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_during_the_build_leaves_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    slow = Compiler(tmp_path / "slow", 'case "$*" in */kernels.cpp*) sleep 20;; esac')
    monkeypatch.setenv("CXX", str(slow.path))
    monkeypatch.setenv("MANTA_CACHE_DIR", str(tmp_path / "cache"))
    launcher = subprocess.Popen([sys.executable, "-c", _BUILD], stderr=subprocess.PIPE, text=True)
    compiling = slow.wait_for("-DMANTA_ISA=avx2")
    launcher.send_signal(number)
    _, said = launcher.communicate(timeout=30)
    assert "building the CPU kernels with g++" in said
    deadline = time.monotonic() + 10
    while Path(f"/proc/{compiling}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not list((tmp_path / "cache").glob("*.so"))
