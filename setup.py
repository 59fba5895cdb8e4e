"""Puts `configs/` and `models/` into the wheel; everything else is in pyproject.toml.

A wheel is for one platform if `python -m engine.native.build --into engine/native/lib` has put the
library of CPU kernels there. Otherwise it is for all, and the first start compiles the kernels.
"""

import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
LIBRARIES = "engine/native/lib"


class BuildWithFiles(build_py):
    """Copies them to `manta_files/`, where `engine.process.shipped` looks."""

    def run(self) -> None:
        # An earlier build may have left a library that isn't among the sources any more.
        shutil.rmtree(Path(self.build_lib, LIBRARIES), ignore_errors=True)
        super().run()
        if self.editable_mode:
            return  # they are read where they lie
        for name in ("configs", "models"):
            target = Path(self.build_lib, "manta_files", name)
            shutil.copytree(ROOT / name, target, dirs_exist_ok=True)


class WithLibraries(Distribution):
    """Is for one platform if there is a library to ship."""

    def has_ext_modules(self) -> bool:
        return any(ROOT.glob(f"{LIBRARIES}/*.so"))


setup(cmdclass={"build_py": BuildWithFiles}, distclass=WithLibraries)
