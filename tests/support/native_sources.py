"""Sources that compile in a moment, and compilers that misbehave, for tests of `engine.native`."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import REPO_ROOT

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or os.uname().machine != "x86_64", reason="needs g++ on x86-64"
)

_KERNELS = """
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
int JOIN(threads_, MANTA_ISA)() {
  int count = 0;
#pragma omp parallel reduction(+ : count)
  count += 1;
  return count;
}
"""
_BINDINGS = """
#include <Python.h>
int threads_avx2();
static PyObject* threads(PyObject*, PyObject*) { return PyLong_FromLong(threads_avx2()); }
static PyObject* sets(PyObject*, PyObject*) {
  return PyUnicode_FromString("avx2"
#ifndef MANTA_WITHOUT_AVX512
  " avx512"
#endif
#ifndef MANTA_WITHOUT_AVX512BF16
  " avx512bf16"
#endif
#ifndef MANTA_WITHOUT_AMX
  " amx"
#endif
  );
}
static PyMethodDef methods[] = {
  {"threads", threads, METH_NOARGS, nullptr},
  {"sets", sets, METH_NOARGS, nullptr},
  {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module_def = {
  PyModuleDef_HEAD_INIT, "manta_cpu_kernels", nullptr, -1, methods, nullptr, nullptr, nullptr,
  nullptr};
PyMODINIT_FUNC PyInit_manta_cpu_kernels() { return PyModule_Create(&module_def); }
"""


def write_sources(folder: Path) -> Path:
    """A module with `threads()`, the size of OpenMP's pool, and `sets()`, what was compiled."""
    folder.mkdir()
    (folder / "kernels.cpp").write_text(_KERNELS)
    (folder / "bindings.cpp").write_text(_BINDINGS)
    return folder


class Compiler:
    """A script around g++ that notes its calls; `lines` of shell run before g++ does."""

    def __init__(self, folder: Path, *lines: str) -> None:
        folder.mkdir()
        self.path = folder / "g++"
        self._calls = folder / "calls"
        self._calls.touch()
        real = shutil.which("g++")
        note = f'echo "$$ $*" >> {self._calls}'
        self.path.write_text("\n".join(["#!/bin/sh", note, *lines, f'exec {real} "$@"', ""]))
        self.path.chmod(0o755)

    def calls(self, *words: str) -> list[str]:
        """The calls in which all `words` occur, each with its process id in front."""
        calls = self._calls.read_text().splitlines()
        return [call for call in calls if all(word in call for word in words)]

    @property
    def links(self) -> int:
        """How many libraries were linked."""
        return len(self.calls("-shared"))

    def wait_for(self, *words: str) -> int:
        """Wait for such a call; returns its process id."""
        deadline = time.monotonic() + 60
        while not self.calls(*words):
            assert time.monotonic() < deadline, self._calls.read_text()
            time.sleep(0.02)
        return int(self.calls(*words)[0].split()[0])


def building(sources: Path) -> dict[str, Any]:
    """Arguments of `subprocess.Popen` for a process that builds `sources` as a worker would."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from engine.native.build import build\n"
        "print(build(Path(sys.argv[1])))\n"
    )
    return {"args": [sys.executable, "-c", code, str(sources)], "cwd": REPO_ROOT, "text": True}
