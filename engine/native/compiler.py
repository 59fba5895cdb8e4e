"""The C++ compiler of this machine, and the flags for the CPU kernels."""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from engine.native.errors import BuildError, NoCompilerError

logger = logging.getLogger(__name__)

NAMES = ("g++", "c++", "clang++")
"""Where `$CXX` is not set, the first of these that runs."""
ADVICE = "install g++ 11 or newer, then restart"

COMMON_FLAGS = (
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mavx2")
ISA_FLAGS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
    "amx": (*_AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"),
}
"""Flags of each instruction set. The first one is required, the others are optional."""
KERNEL_FLAGS = ("-O3", *COMMON_FLAGS)
BINDING_FLAGS = (
    "-O2",
    *COMMON_FLAGS,
    "-DTORCH_API_INCLUDE_EXTENSION_H",
    "-DTORCH_EXTENSION_NAME=manta_cpu_kernels",
)
# Without -fopenmp: the library has no libgomp of its own. It needs libtorch_cpu, which needs
# torch's libgomp, so GOMP_* resolve to that one. --no-as-needed keeps libtorch_cpu in the list
# even if nothing of it is used.
LINK_FLAGS = (
    "-shared",
    "-Wl,-Bsymbolic",
    "-Wl,--no-as-needed",
    "-ltorch",
    "-ltorch_cpu",
    "-lc10",
    "-ltorch_python",
)
# One instruction of each set, so that an old assembler is noticed too.
_PROBES = {
    "avx2": "vpaddd %ymm0, %ymm0, %ymm0",
    "avx512": "vpaddw %zmm0, %zmm0, %zmm0",
    "avx512bf16": "vdpbf16ps %zmm0, %zmm0, %zmm0",
    "amx": "tdpbf16ps %tmm0, %tmm1, %tmm2",
}
_PROBE_TIMEOUT_S = 30.0


class Compiler(NamedTuple):
    """`command` starts it; `version` is the first line that it prints for `--version`."""

    command: tuple[str, ...]
    version: str

    def __str__(self) -> str:
        """Such as "g++ 12.2"."""
        name = "clang++" if self.is_clang else self.version.split()[0]
        plain = re.sub(r"\(.*?\)", "", self.version)
        match = re.search(r"\d+\.\d+", plain) or re.search(r"\d+\.\d+", self.version)
        return f"{name} {match[0]}" if match else name

    @property
    def is_clang(self) -> bool:
        return "clang" in self.version.lower()

    def instruction_sets(self, folder: Path, wanted: Sequence[str]) -> list[str]:
        """Those of `wanted`, keys of `ISA_FLAGS`, that the compiler and its assembler know.
        `folder` may be written to. Raises `BuildError` if the first isn't among them."""
        known = [isa for isa in wanted if self._knows(isa, folder)]
        if left_out := [isa for isa in wanted if isa not in known]:
            logger.info("%s doesn't know %s: left out", self, ", ".join(left_out))
        required = next(iter(ISA_FLAGS))
        if required not in known:
            raise BuildError(f"{self} can't compile C++20 for {required.upper()}", ADVICE)
        return known

    def _knows(self, isa: str, folder: Path) -> bool:
        source = folder / f"probe_{isa}.cpp"
        source.write_text(f'void probe() {{ asm volatile("{_PROBES[isa]}"); }}\n')
        flags = (*KERNEL_FLAGS, *ISA_FLAGS[isa])
        command = [*self.command, *flags, "-c", str(source), "-o", str(source.with_suffix(".o"))]
        return _output(command) is not None


def find_compiler() -> Compiler:
    """`$CXX` if it is set, else the first of `NAMES` that runs. Raises `NoCompilerError`."""
    wanted = os.environ.get("CXX", "").strip()
    for name in [wanted] if wanted else NAMES:
        command = tuple(shlex.split(name))
        output = _output([*command, "--version"])
        lines = (output or "").strip().splitlines()
        if lines:
            return Compiler(command, lines[0].strip())
    if wanted:
        raise NoCompilerError(f"$CXX is {wanted}, which doesn't run", "set it to a C++ compiler")
    raise NoCompilerError("there is no C++ compiler", ADVICE)


def check_openmp(compiler: Compiler, torch_folder: Path) -> None:
    """Raise `BuildError` if torch brings no OpenMP library that the compiler's code can use."""
    # clang compiles for libomp (LLVM's) or libiomp5 (Intel's), torch's wheels bring libgomp (GCC's)
    names = ("libomp*.so*", "libiomp*.so*")
    if compiler.is_clang and not any(any(torch_folder.glob(f"lib/{name}")) for name in names):
        raise BuildError(f"{compiler} compiles for another OpenMP library than torch's", ADVICE)


def _output(command: list[str]) -> str | None:
    """What a short command prints; None if it fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_PROBE_TIMEOUT_S,
            env={**os.environ, "LC_ALL": "C"},
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
