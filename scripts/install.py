"""Install Manta and what it needs into the environment of the Python that runs this.

    .venv/bin/python scripts/install.py                 # what running needs
    .venv/bin/python scripts/install.py --extras dev    # tests and lint, too

Versions are those of constraints.txt. torch's ordinary build for Linux brings gigabytes of CUDA.
So without an NVIDIA GPU its CPU build is taken from PyTorch's own index. Exceptions: pip is
configured with a folder of wheels that has torch, or `--torch cuda` asks for CUDA.

Without an NVIDIA GPU the CPU kernels are compiled too. If that fails, the reason is printed, and
Manta computes without them.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""The index of torch's CPU builds (https://pytorch.org/get-started); `TORCH_INDEX` overrides it."""
RETRIES = ("--retries", "1", "--timeout", "15")

Run = Callable[[Sequence[str]], int]
"""Runs pip, or a module of Manta, with arguments and returns the exit status."""


def main(
    argv: Sequence[str] | None = None, pip: Run | None = None, module: Run | None = None
) -> int:
    """Install. Returns pip's exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--extras", default="", help="of pyproject.toml, separated by commas")
    parser.add_argument(
        "--torch",
        choices=("auto", "cpu", "cuda"),
        default=os.environ.get("TORCH") or "auto",
        help="auto (default, or $TORCH): cuda with an NVIDIA GPU, else cpu",
    )
    options = parser.parse_args(argv)
    run = pip or _run_pip
    if wants_cpu_torch(options.torch, has_nvidia_gpu()) and not _installed(pinned_torch()):
        install_cpu_torch(run)
    extras = f"[{options.extras}]" if options.extras else ""
    status = run(["install", "-c", str(CONSTRAINTS), "-e", f"{ROOT}{extras}"])
    if status == 0 and not has_nvidia_gpu():
        (module or _run_module)(["engine.native.build"])  # a failure is told, and is none of ours
    return status


def wants_cpu_torch(choice: str, has_gpu: bool) -> bool:
    """Whether to look for a build without CUDA. Except on Linux x86-64 the usual build has none."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return False
    return choice == "cpu" or (choice == "auto" and not has_gpu)


def install_cpu_torch(pip: Run) -> None:
    """Install torch without CUDA; its dependencies come with the other packages."""
    torch = f"torch=={pinned_torch()}"
    # If pip is configured with a folder of wheels, respect that: fetch nothing.
    offline = ["install", "--dry-run", "--quiet", "--no-index", "--no-deps", torch]
    if pip(offline) == 0:
        return
    index = os.environ.get("TORCH_INDEX") or CPU_INDEX
    print(f"no NVIDIA GPU here: taking torch's CPU build from {index}", flush=True)
    if pip(["install", "--no-deps", "--index-url", index, *RETRIES, torch]) != 0:
        print(
            f"warning: {index} doesn't answer or has no {torch}; pip's own index may bring CUDA, "
            "which is gigabytes. Set TORCH_INDEX to an index with CPU builds to avoid that.",
            flush=True,
        )


def pinned_torch() -> str:
    """The version in constraints.txt."""
    pins = dict(line.split("==") for line in CONSTRAINTS.read_text().split() if "==" in line)
    return pins["torch"]


def has_nvidia_gpu() -> bool:
    """Whether the kernel has a device for an NVIDIA GPU; under WSL 2 it has another name."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def _installed(version: str) -> bool:
    try:
        return metadata.version("torch").partition("+")[0] == version
    except metadata.PackageNotFoundError:
        return False


def _run_pip(arguments: Sequence[str]) -> int:
    quiet = subprocess.DEVNULL if "--dry-run" in arguments else None
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, stdout=quiet, stderr=quiet).returncode


def _run_module(arguments: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
