"""The tests of the CPU kernels with a library that AddressSanitizer and UBSan watch.

A kernel that reads or writes beyond a tensor, or does what C++ doesn't define, fails here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from benchmarks.common import REPO_ROOT
from engine.native.machine import SWITCH, unsuitable_platform, unsuitable_processor
from tests.support.gguf_files import write_gguf
from tests.support.kernels import EXAMPLES_VARIABLE
from tests.support.models import make_model

SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
TESTS = ("tests/unit/csrc", "tests/unit/sampling/test_cpu_sampling.py")
EXAMPLES = 4
BUILD_LIMIT_S = 900
TEST_LIMIT_S = 1800
OVERRUN = """
import torch
from engine.native import library
kernels = library.load()
kernels.use("{isa}")
x, ints = torch.ones(2, 1, 16), torch.tensor
pool = torch.zeros(8, 1, 16)
table = torch.tensor([[{slot}, 7]], dtype=torch.int32)
rows = ints([7, 6]), table, ints([0]), ints([0, 2]), ints([2])
print(kernels.attention(x, x, x, pool, pool.clone(), *rows, 1.0, 0, 0, 0.0, None).shape)
"""
"""The caller must see to it that the table's slots are in the pool, which has 8."""
FUZZ = """
from pathlib import Path
import torch
from tests.support.gguf_fuzz import products
torch.set_num_threads(1)
print(products(Path({file!r}), range({num_files})))
"""
GGUF_KINDS = {"attn_q": Kind.Q4_0, "attn_k": Kind.Q4_1, "attn_v": Kind.Q5_1, "ffn_up": Kind.F16}
"""By a part of the names of tensors."""


def runtime(compiler: str, name: str) -> str | None:
    """A library that the compiler brings or finds."""
    words = [compiler, f"-print-file-name={name}"]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return found if os.path.isabs(found) and os.path.exists(found) else None


class Sanitized:
    """A library of its own, and processes that find it in their cache."""

    def __init__(self, compiler: str, preloaded: list[str], folder: Path) -> None:
        wrapper = folder / "g++"
        # The last -O counts.
        wrapper.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O1 -g {SANITIZERS}\n')
        wrapper.chmod(0o755)
        self.env = {
            **os.environ,
            "CXX": str(wrapper),
            "MANTA_CACHE_DIR": str(folder / "cache"),
            EXAMPLES_VARIABLE: str(EXAMPLES),
        }
        self.env.pop(SWITCH, None)
        words = [sys.executable, "-m", "engine.native.build"]
        subprocess.run(words, cwd=REPO_ROOT, env=self.env, timeout=BUILD_LIMIT_S, check=True)
        self.env["LD_PRELOAD"] = " ".join(preloaded)
        self.env["ASAN_OPTIONS"] = "detect_leaks=0"  # Python has its own ideas about them
        self.env["UBSAN_OPTIONS"] = "print_stacktrace=1"

    def run(self, *words: str) -> tuple[int, str]:
        """Run Python. Returns the exit status and the output."""
        done = subprocess.run(
            [sys.executable, *words],
            cwd=REPO_ROOT,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TEST_LIMIT_S,
        )
        return done.returncode, done.stdout[-20_000:]


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Sanitized:
    if why := unsuitable_platform() or unsuitable_processor():
        pytest.skip(f"no CPU kernels: {why}")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    # libstdc++ is named because libasan looks for what throws exceptions before torch is loaded.
    names = ("libasan.so", "libstdc++.so.6")
    found = {name: runtime(compiler, name) for name in names}
    preloaded = [path for path in found.values() if path is not None]
    if len(preloaded) < len(names):
        pytest.skip(f"g++ has no {next(name for name in names if found[name] is None)}")
    return Sanitized(compiler, preloaded, tmp_path_factory.mktemp("sanitized"))


@pytest.mark.timeout(BUILD_LIMIT_S + TEST_LIMIT_S)
def test_the_kernels_stay_within_their_tensors(sanitized: Sanitized) -> None:
    tests = [name for name in TESTS if (REPO_ROOT / name).exists()]
    # Nothing that is captured is left of a process that a sanitizer ends.
    options = ["-q", "-x", "--capture=sys", "-p", "no:cacheprovider", "-n", "2"]
    status, output = sanitized.run("-m", "pytest", *options, *tests)
    assert status == 0, output
    assert " passed" in output


@pytest.mark.timeout(BUILD_LIMIT_S + TEST_LIMIT_S)
@pytest.mark.parametrize("num_files", [8_000, pytest.param(100_000, marks=pytest.mark.full_chaos)])
def test_damaged_gguf_files_reach_nothing_else(
    sanitized: Sanitized, num_files: int, tmp_path: Path
) -> None:
    """Whatever numbers they have, the kernels multiply by them. (Reading them is Python's work.)"""
    sizes = {"num_hidden_layers": 1, "vocab_size": 70, "hidden_size": 64, "intermediate_size": 64}
    model = make_model(tmp_path / "model", "LlamaForCausalLM", **sizes)
    write_gguf(tmp_path / "model.gguf", model, lambda name: GGUF_KINDS.get(name[6:12], Kind.Q8_0))
    code = FUZZ.format(file=str(tmp_path / "model.gguf"), num_files=num_files)
    status, output = sanitized.run("-c", code)
    assert status == 0, output
    assert int(output.split()[-1]) > num_files // 20, output


@pytest.mark.timeout(BUILD_LIMIT_S + TEST_LIMIT_S)
def test_a_read_beyond_a_tensor_is_found(sanitized: Sanitized) -> None:
    """So that the test above can fail: a table with a slot that the pool doesn't have."""
    for isa in library_sets(sanitized):
        status, output = sanitized.run("-c", OVERRUN.format(isa=isa, slot=6))
        assert (status, "[2, 16]" in output) == (0, True), output
        status, output = sanitized.run("-c", OVERRUN.format(isa=isa, slot=8))
        assert status != 0 and "AddressSanitizer: heap-buffer-overflow" in output, output
        assert "attention.h" in output


def library_sets(sanitized: Sanitized) -> list[str]:
    """The instruction sets that the library has here."""
    code = "from engine.native import library; print(*library.load().available())"
    status, output = sanitized.run("-c", code)
    assert status == 0, output
    return output.split()
