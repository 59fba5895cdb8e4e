"""Programs from Debian's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

import pytest


def install(programs: Mapping[str, str]) -> None:
    """Install the packages of programs or files that are missing, without starting their services.
    `programs` has the package of each. Skips the test where that isn't possible."""
    missing = missing_packages(programs)
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip(f"needs Debian's {', '.join(sorted(missing))}")
    env = {**os.environ, "RUNLEVEL": "1", "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *sorted(missing)]):
        done = subprocess.run(
            ["apt-get", "--quiet", *command], env=env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"apt-get {command[0]}: {done.stderr[-500:]}")


def missing_packages(programs: Mapping[str, str]) -> set[str]:
    """The packages of those programs and files that aren't there."""
    return {package for program, package in programs.items() if not _is_there(program)}


def _is_there(program: str) -> bool:
    return os.path.exists(program) if "/" in program else shutil.which(program) is not None
