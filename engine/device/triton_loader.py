"""Whether Triton, which CUDA builds of torch bring, can be used on this machine."""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from engine.errors import ConfigError


def lack_of_triton() -> str:
    """Why kernels in Triton can't run here; "" if they can. Doesn't import the package."""
    if find_spec("triton") is None:
        return "Triton isn't installed"
    compilers = os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang")
    # Triton compiles a launcher for its kernels: a module of Python, in C.
    if not any(compilers):
        return "Triton needs a C compiler, and there is no gcc on the PATH"
    # The path that Triton takes, on Debian too.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme)["include"], "Python.h")
    return "" if header.is_file() else f"Triton needs Python's headers, and there is no {header}"


def require_triton() -> None:
    """Raise `ConfigError` with advice if kernels in Triton can't run here."""
    if lack := lack_of_triton():
        raise ConfigError(
            f"Kernels in Triton can't run here: {lack}. Install what is missing (a CUDA build of "
            "torch brings Triton), or set kernels: torch and sampling_backend: auto."
        )
