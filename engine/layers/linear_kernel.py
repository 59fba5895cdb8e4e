"""How one weight matrix is multiplied: chosen once, when the weight is loaded.

Which form is fastest depends on its size, its type and the number of rows (docs/performance.md,
"CPU kernels").
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.grouped import Grouped
from engine.native.library import require_kernels

# Elements up to which a transposed float32 matrix beats the packed one on CPU.
TRANSPOSED_MAX_NUMEL = 1 << 19
MIN_BITS = 4
"""Numbers of fewer bits take so many in our kernels."""
# The row count that oneDNN packs for; no other was faster when measured for m = 1..512.
PACK_ROWS = 32


class LinearKernel(ABC):
    """y = x W^T + b for one weight W [out, in]; holds the only copy of W."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]"""

    def logits(self, x: Tensor) -> Tensor:
        """The same for an output head: of x's type or, where that costs nothing, float32."""
        return self(x)


class DenseKernel(LinearKernel):
    """`F.linear`, for which torch chooses the kernel; the fallback everywhere."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class TransposedKernel(LinearKernel):
    """W^T stored contiguously: the best form of small float32 matrices on CPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight_t = weight.t().contiguous()
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return torch.mm(x, self.weight_t)
        return torch.addmm(self.bias, x, self.weight_t)


class PackedKernel(LinearKernel):
    """oneDNN's blocked layout. It uses private operators of torch: call `can_pack` first."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


class SharedRowsKernel(LinearKernel):
    """For a weight that must stay in row form because an embedding looks rows up in it.

    W x^T is about twice as fast as `F.linear` for 8 or 32 rows of float32 on CPU.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.swap = weight.device.type == "cpu" and weight.dtype == torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        if self.swap and 2 < x.shape[0] < 64:
            return torch.mm(self.weight, x.t()).t().contiguous()
        return F.linear(x, self.weight)


class NativeKernel(LinearKernel):
    """Our own kernel on CPU (`engine/csrc/linear.h`), with the matrix in panels.

    A row's result is the same in any batch and with any number of threads.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._kernels: Any = require_kernels()
        self.out_size = weight.shape[0]
        self.packed: Tensor = self._kernels.pack(weight.contiguous())
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._kernels.linear(x, self.packed, self.bias, self.out_size, False)
        return out

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self._kernels.linear(x, self.packed, self.bias, self.out_size, True)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of W as they were packed: int64 [T] -> [T, in]. Raises `RuntimeError` if W has no
        such row."""
        out: Tensor = self._kernels.unpack_rows(self.packed, ids, self.out_size)
        return out


class GroupedKernel(LinearKernel):
    """Quantized matrices of one input as they are (`engine/csrc/grouped.h`), one below the other.

    Inputs are rounded to 14 bits beside the largest of 128 neighbours, those of float32 to 21.
    With `short_inputs` they are rounded to 8 bits beside the largest of 32 (of 16 where a matrix
    has such groups), which takes half the time. A row's result is the same in any batch, with any
    number of threads and any instruction set.
    """

    def __init__(
        self, parts: Sequence[Grouped], bias: Tensor | None, short_inputs: bool = False
    ) -> None:
        self._kernels: Any = require_kernels()
        self.short_inputs = short_inputs
        self.weights = [
            self._kernels.GroupedWeight(
                part.numbers,
                max(part.bits, MIN_BITS),
                part.center,
                part.group,
                part.scales,
                part.scale_codes,
                part.mins,
                part.min_codes,
            )
            for part in parts
        ]
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        """What the matrices take of memory."""
        return sum(int(weight.num_bytes) for weight in self.weights)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, False)

    def logits(self, x: Tensor) -> Tensor:
        return self._product(x, True)

    def _product(self, x: Tensor, as_float: bool) -> Tensor:
        out: Tensor = self._kernels.linear_grouped(
            x, self.weights, self.bias, self.short_inputs, as_float
        )
        return out

    def rows(self, ids: Tensor, like: Tensor) -> Tensor:
        """Rows of the first matrix, of the type of `like`: int64 [T] -> [T, in]. Raises
        `RuntimeError` if it has no such row."""
        out: Tensor = self.weights[0].rows(ids, like)
        return out


def make_linear_kernel(weight: Tensor, bias: Tensor | None) -> LinearKernel:
    """The fastest kernel for `weight` [out, in]. The caller must drop its reference."""
    if weight.device.type != "cpu":
        return DenseKernel(weight, bias)
    if weight.dtype == torch.float32 and weight.numel() <= TRANSPOSED_MAX_NUMEL:
        return TransposedKernel(weight, bias)
    if can_pack(weight.dtype):
        return PackedKernel(weight, bias)
    return DenseKernel(weight, bias)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch build has oneDNN's packed linear for `dtype` and computes it right."""
    mkldnn = torch.ops.mkldnn
    if not torch._C._has_mkldnn or not (
        hasattr(mkldnn, "_reorder_linear_weight") and hasattr(mkldnn, "_linear_pointwise")
    ):
        return False
    weight = torch.arange(-96, 96, dtype=torch.float32).view(6, 32).div_(64).to(dtype)
    x = torch.arange(64, dtype=torch.float32).view(2, 32).div_(64).to(dtype)
    try:
        out = PackedKernel(weight, None)(x)
    except RuntimeError:  # no oneDNN kernel for this type on this processor
        return False
    exact = x.float() @ weight.float().t()
    return bool(torch.allclose(out.float(), exact, rtol=2e-2, atol=2e-2))
