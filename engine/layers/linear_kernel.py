"""How one weight matrix is multiplied: chosen once, when the weight is loaded.

Which form is fastest depends on its size, its type and the number of rows (docs/performance.md,
"CPU kernels").
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.native.library import require_kernels

# Elements up to which a transposed float32 matrix beats the packed one on CPU.
TRANSPOSED_MAX_NUMEL = 1 << 19
INT8_MAX = 127
# Rows that are quantized at once: a float32 copy of a whole matrix would take too much memory.
QUANTIZED_ROWS = 256
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


class Int8Kernel(LinearKernel):
    """The same with a byte for each weight, made from a plain matrix (`quantize_rows`).

    At one row it reads half of bfloat16's bytes. Sums are float32, as those of the plain kernel.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._kernels: Any = require_kernels()
        self.out_size = weight.shape[0]
        numbers, self.scale = quantize_rows(weight)
        dtype = str(weight.dtype).removeprefix("torch.")
        self.packed: Tensor = self._kernels.pack_int8(numbers, dtype)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, False)

    def logits(self, x: Tensor) -> Tensor:
        return self._multiply(x, True)

    def _multiply(self, x: Tensor, as_float: bool) -> Tensor:
        out: Tensor = self._kernels.linear_int8(
            x, self.packed, self.scale, self.bias, self.out_size, as_float
        )
        return out


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [out, in] and float32 scales [out], whose products are nearest to `weight` [out, in].

    A scale is the row's largest absolute value / 127. Halves are rounded to even. A row that has
    infinities or NaN gets such a scale, so that they show in its outputs.
    """
    numbers = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(weight.shape[0], dtype=torch.float32)
    for start in range(0, weight.shape[0], QUANTIZED_ROWS):
        block = slice(start, start + QUANTIZED_ROWS)
        rows = weight[block].float()
        scale[block] = rows.abs().amax(1) / INT8_MAX
        divisor = scale[block].masked_fill(scale[block] == 0, 1.0).unsqueeze(1)
        numbers[block] = (rows / divisor).round_().clamp_(-INT8_MAX, INT8_MAX)
    return numbers, scale


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
