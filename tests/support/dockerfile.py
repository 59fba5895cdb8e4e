"""The Dockerfile: its stages, and their lines executed in folders as Docker would.

Each stage gets a folder that stands for `/`: a copy of that of the stage it begins with, and what
it COPYs of the build's context. Absolute paths in RUN lines are led into it. Programs that change
the machine, need the network or a compiler are scripts that write down how they were called;
Python is this one, without the packages of the repository.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.flashinfer_package import write_package
from tests.support.source_files import ROOT

_NO_PROJECT = """
import sys

# An editable installation would find all of the repository, whatever a stage COPYs.
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
sys.path[:] = [path for path in sys.path if "__editable__" not in path]
"""
_NOTE = 'echo "$(basename "$0") $*" >> {calls}\n'
_OUTPUT = """
case "$1" in --version) echo "g++ (stand-in) 13"; exit 0;; esac
while [ $# -gt 0 ]; do
    if [ "$1" = -o ] || [ "$1" = --output-file ]; then echo stand-in > "$2"; fi
    shift
done
"""
_PYTHON = """
if [ "$1 $2" = "-m venv" ]; then
    mkdir -p "$3/bin" && cp {bin}/pip {bin}/cyclonedx-py "$3/bin/"
else
    exec {python} "$@"
fi
"""


@dataclass
class Stage:
    """From one FROM to the next. The first has what stands before all stages."""

    name: str
    base: str
    lines: list[tuple[str, str]] = field(default_factory=list)
    """Instructions with their arguments."""

    def arguments(self, word: str) -> list[str]:
        """Arguments of every instruction `word`."""
        return [arguments for instruction, arguments in self.lines if instruction == word]


def stages() -> list[Stage]:
    """The stages in order; continued lines are joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M)
    found = [Stage("", "")]
    for line in filter(str.strip, text.replace("\\\n", " ").splitlines()):
        word, arguments = line.split(None, 1)
        if word == "FROM":
            base, _, name = arguments.partition(" AS ")
            found.append(Stage(name, base))
        else:
            found[-1].lines.append((word, arguments))
    return found


def copies(arguments: str) -> tuple[str, list[str], str]:
    """Of a COPY: the stage that it copies from ("": the context), its sources and its target."""
    *sources, target = arguments.split()
    stage = sources.pop(0).partition("=")[2] if sources[0].startswith("--from=") else ""
    return stage, sources, target


class ImageBuild:
    """Executes stages one after the other, below `folder`."""

    def __init__(self, folder: Path, **arguments: str) -> None:
        """`arguments`: those of --build-arg."""
        self._folder = folder
        self._arguments = arguments
        self._stages = {stage.name: stage for stage in stages()}
        self._env: dict[str, dict[str, str]] = {}
        """Of each finished stage."""
        self.calls = folder / "calls.txt"
        """The stand-ins' calls, one a line."""
        self.python = folder / "bin" / "python"
        self.package = write_package(folder / "packages")
        """FlashInfer's folder, in all stages."""
        self._write_programs()

    def run(self, name: str) -> Path:
        """Execute stage `name`, and before it those that it needs. Returns what stands for `/`.

        Raises `CalledProcessError` at the first RUN line that fails.
        """
        root, stage = self._folder / "stages" / name, self._stages[name]
        if name in self._env:
            return root
        env = {"PATH": f"{self._folder / 'bin'}:/usr/bin:/bin", "HOME": str(self._folder)}
        shutil.rmtree(root, ignore_errors=True)
        if stage.base in self._stages:
            shutil.copytree(self.run(stage.base), root)
            env = dict(self._env[stage.base])
        else:
            (root / "usr/local/cuda/bin").mkdir(parents=True)
            (root / "tmp").mkdir()
            (root / "var/lib/apt/lists").mkdir(parents=True)
        for word, arguments in stage.lines:
            if word == "WORKDIR":
                env["WORKDIR"] = arguments
                (root / arguments.lstrip("/")).mkdir(parents=True)
            elif word == "ENV":
                env |= dict(part.split("=", 1) for part in shlex.split(arguments))
            elif word == "ARG":
                key, _, default = arguments.partition("=")
                env[key] = self._arguments.get(key, "".join(shlex.split(default)))
            elif word == "COPY":
                self._copy(root, env, arguments)
            elif word == "RUN":
                self._execute(root, env, arguments)
        self._env[name] = env
        return root

    def _copy(self, root: Path, env: dict[str, str], arguments: str) -> None:
        other, sources, target = copies(arguments)
        context = self.run(other) if other else ROOT
        for source in sources:
            path = context / source.lstrip("/")
            place = (
                root / target.lstrip("/") if target.startswith("/") else self._in(root, env, target)
            )
            if path.is_dir():
                shutil.copytree(path, place, dirs_exist_ok=True, ignore=None if other else _ignored)
                continue
            if target.endswith("/"):
                place = place / path.name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)

    def _execute(self, root: Path, env: dict[str, str], line: str) -> None:
        inside = re.sub(r"(?<=[\s'\"=(])/(?=(?:aot|opt|tmp|usr|var)\b)", f"{root}/", line)
        self._run(root, env, ["sh", "-ec", inside])

    def run_python(self, name: str, code: str) -> None:
        """Run `code` in the finished stage `name`. Raises `CalledProcessError` if it fails."""
        self._run(self.run(name), self._env[name], [str(self.python), "-c", code])

    def _run(self, root: Path, env: dict[str, str], command: list[str]) -> None:
        led = {
            key: f"{root}{value}"
            if value.startswith("/") and key not in ("HOME", "PATH")
            else value
            for key, value in env.items()
        }
        packages = [str(self._folder / "packages"), led.get("PYTHONPATH", "")]
        led["PYTHONPATH"] = os.pathsep.join(packages)
        place = self._in(root, env, ".")
        subprocess.run(command, cwd=place, env=led, check=True, capture_output=True, text=True)

    def _in(self, root: Path, env: dict[str, str], path: str) -> Path:
        """`path` from the working folder."""
        return root / os.path.join(env.get("WORKDIR", "/"), path).lstrip("/")

    def _write_programs(self) -> None:
        folder = self._folder / "bin"
        folder.mkdir(parents=True)
        note = _NOTE.format(calls=self.calls)
        programs = dict.fromkeys(("apt-get", "useradd", "pip", "dpkg-query"), note)
        programs |= dict.fromkeys(("g++", "cc", "cyclonedx-py"), note + _OUTPUT)
        programs["python"] = _PYTHON.format(bin=folder, python=sys.executable)
        for name, text in programs.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}")
            (folder / name).chmod(0o755)
        (self.package.parent / "sitecustomize.py").write_text(_NO_PROJECT)


def _ignored(folder: str, names: list[str]) -> list[str]:
    """What .dockerignore keeps out of copied folders."""
    kept_out = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and line != "*" and line[0] not in "#!"
    ]
    found = []
    for name in names:
        path = str((Path(folder) / name).relative_to(ROOT))
        if any(path == p or fnmatch.fnmatch(f"/{path}", p.replace("**/", "*/")) for p in kept_out):
            found.append(name)
    return found
