"""Triton's interpreter: its kernels as numpy's operators, without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.source_files import ROOT


def use_interpreter() -> None:
    """Make kernels that are imported from now on run interpreted, or skip the calling module.

    Skipped with a GPU, where tests/gpu runs the kernels themselves: the interpreter would stay on
    in this process.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton isn't installed", allow_module_level=True)
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the kernels themselves", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl

    if "Interpreted" not in type(tl.cdiv).__name__:
        pytest.skip("Triton was imported before, to compile", allow_module_level=True)


def run_compiling(code: str, folder: Path) -> str:
    """What Python code prints that compiles kernels, which this process can't. Its cache is in
    `folder`."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    env["PYTHONPATH"] = os.pathsep.join(map(str, [ROOT, *sys.path]))
    del env["TRITON_INTERPRET"]
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.check_output(command, env=env, text=True)


def use_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter compute with bfloat16, which numpy hasn't: by float32, rounded after each
    operation to the nearest, as GPUs do."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder

    def wide(handle: Any) -> Any:
        numbers = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(numbers, tl.float32)

    def narrow(numbers: Any) -> Any:
        found = torch.from_numpy(np.ascontiguousarray(numbers)).to(torch.bfloat16)
        bits = found.view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(bits, tl.bfloat16)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar != tl.bfloat16:
            return plain_op(self, lhs, rhs, op)
        return narrow(op(wide(lhs).data, wide(rhs).data))

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = wide(a), wide(b)
        return plain_dot(self, a, b, *rest)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        # The interpreter cuts bits off.
        if (src.dtype.scalar, dst_type.scalar) == (tl.float32, tl.bfloat16):
            return narrow(src.data)
        return plain_cast(self, src, dst_type)

    plain_op, plain_dot = builder.binary_op, builder.create_dot
    plain_cast = builder.cast_impl
    patch.setattr(builder, "cast_impl", cast_impl)
    patch.setattr(builder, "binary_op", binary_op)
    patch.setattr(builder, "create_dot", create_dot)
