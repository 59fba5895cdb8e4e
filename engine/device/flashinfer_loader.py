"""The one place that imports FlashInfer, an optional package.

mypy doesn't see FlashInfer: its classes are looked up by name where they are used, and
`tests/support/fake_flashinfer.py` holds copies of the signatures that calls are checked against.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch

from engine.errors import ConfigError

FLASHINFER = "flashinfer"
"""The word of its kernels (`engine.registry.kernels_of`)."""
FLASHINFER_FA3 = "flashinfer-fa3"
"""The word of `attention_backend` for FlashAttention 3's prefill kernels."""
HEAD_DIMS = (64, 128, 256)
"""Head sizes that both the prefill and the decode kernels exist for."""
HALF_DTYPES = (torch.float16, torch.bfloat16)
_ATTRIBUTES = ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer")
"""Attributes of the wrappers that the attention backend sets; all public ways to do so wait."""


def flashinfer_installed() -> bool:
    """Whether `load_flashinfer` would find the package; doesn't import it."""
    return importlib.util.find_spec("flashinfer") is not None


def load_flashinfer(part: str = "flashinfer") -> Any:
    """The module `flashinfer`, or one below it. Raises `ConfigError` with advice if it is missing
    or broken."""
    # FlashInfer reads this at import. Its default norm kernels need a 100 MB compiler,
    # nvidia-cutlass-dsl.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    # FlashInfer brings ninja and runs it by name. Where the virtual environment isn't activated, it
    # lies beside Python only.
    beside = str(Path(sys.executable).parent)
    if beside not in os.get_exec_path():
        os.environ["PATH"] = os.pathsep.join([*os.get_exec_path(), beside])
    try:
        return importlib.import_module(part)
    except ImportError as error:
        raise ConfigError(
            f"FlashInfer can't be imported ({error}). Install it with "
            "`pip install 'manta-serve[gpu]'`, or set kernels: torch."
        ) from error


def check_wrapper(wrapper: object) -> None:
    """Raise `ConfigError` if this version's wrappers keep their buffers under other names."""
    missing = [name for name in _ATTRIBUTES if not hasattr(wrapper, name)]
    if missing:
        raise ConfigError(
            f"this version of flashinfer-python has no {' and '.join(missing)} in its wrappers; "
            "install the version that pyproject.toml names."
        )


def pin_ranges(largest: int) -> None:
    """Make plans copy the constant 0, 1, 2, ... up to `largest` numbers from pinned memory.

    FlashInfer keeps them, by powers of two, in memory that CUDA may wait for when it copies.
    """
    kept = load_flashinfer("flashinfer.utils")._cache_buf
    size = 1 << (largest - 1).bit_length()
    numbers = torch.arange(size, dtype=torch.int32).pin_memory()
    while size:
        kept[f"range_{size}", "cpu"] = numbers[:size]
        size //= 2


def lack_of_kernels(dtype: torch.dtype, head_dim: int) -> str:
    """What to tell if FlashInfer has no attention for queries of this type and size; "" if it
    has."""
    if dtype in HALF_DTYPES and head_dim in HEAD_DIMS:
        return ""
    half = (str(known).removeprefix("torch.") for known in HALF_DTYPES)
    return (
        f"FlashInfer has no kernels for dtype {str(dtype).removeprefix('torch.')} with head_dim "
        f"{head_dim} (it has {' and '.join(half)}, and {', '.join(map(str, HEAD_DIMS))})"
    )


def check_fa3(capability: tuple[int, int]) -> None:
    """Raise `ConfigError` unless a GPU of this compute capability runs FlashAttention 3."""
    if capability[0] != 9:
        raise ConfigError(
            "attention_backend flashinfer-fa3 needs a Hopper GPU (H100, H200); set "
            "attention_backend: flashinfer."
        )
