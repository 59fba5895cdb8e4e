"""A module of Manta's that another process runs, because of what it loads or may break."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from engine.errors import ConfigError


def module_environment() -> dict[str, str]:
    """This process's environment, in which `python -m engine...` finds this code."""
    paths = (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def ask_module(
    module: str, folder: Path, timeout_s: float, *, late: str, failed: str, **env: str
) -> bytes:
    """What `python -m module folder` prints, with the variables `env`.

    Raises `ConfigError`: `late` if it takes more than `timeout_s`; if it fails, with its last line,
    or `failed` if it says nothing.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, str(folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**module_environment(), **env},
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(late) from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise ConfigError(lines[-1] if lines else failed)
    return done.stdout
