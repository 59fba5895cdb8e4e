"""Memory of huge pages, for what a step on CPU reads all over: with pages of 4 KiB the processor
looks up addresses instead."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_PAGE = 2 << 20


def zeros_in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros of `shape` on the CPU, in huge pages where the system has them. All of the memory is
    taken at once. Raises `OSError` if the system gives no memory."""
    size = math.prod(shape) * dtype.itemsize
    if size < _PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them has small pages, which do, too
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_().view(dtype).view(tuple(shape))
