"""Triton's interpreter: its kernels as numpy's operators, without a GPU."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch


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
