"""Whether Triton, which CUDA builds of torch bring, can be used on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

from engine.errors import ConfigError


def lack_of_triton() -> str:
    """Why kernels in Triton can't run here; "" if they can. Doesn't import the package."""
    if importlib.util.find_spec("triton") is None:
        return "Triton isn't installed"
    # Triton compiles a small launcher in C for each kernel, at its first use.
    if not any((os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang"))):
        return "Triton needs a C compiler, and there is no gcc on the PATH"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return "" if header.is_file() else f"Triton needs Python's headers, and there is no {header}"


def require_triton() -> None:
    """Raise `ConfigError` with advice if kernels in Triton can't run here."""
    if lack := lack_of_triton():
        raise ConfigError(
            f"Kernels in Triton can't run here: {lack}. Install what is missing (a CUDA build of "
            "torch brings Triton), or set kernels: torch and sampling_backend: auto."
        )
