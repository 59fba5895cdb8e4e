"""Puts `configs/` and `models/` into the wheel; everything else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithFiles(build_py):
    """Copies them to `manta_files/`, where `engine.shipped` looks."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # they are read where they lie
        for name in ("configs", "models"):
            target = Path(self.build_lib, "manta_files", name)
            shutil.copytree(Path(__file__).parent / name, target, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithFiles})
