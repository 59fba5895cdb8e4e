"""Our products in place of a model's linears; their weights, where a checkpoint quantized them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.device.distributed import ParallelState
from engine.layers.float8_groups import Quantized
from engine.layers.linear_kernel import LinearKernel
from engine.layers.weight_format import WeightFormat

_GROUPS = "manta_groups"


def set_groups(linear: nn.Linear, groups: Quantized, dtype: torch.dtype) -> None:
    """Give `linear` its weight as `groups`. What stands for it is of its shape and of `dtype`,
    takes no memory, and is all zeros."""
    nothing = torch.zeros((), dtype=dtype, device=groups.numbers.device)
    weight = nn.Parameter(nothing.expand(groups.shape), False)
    weight._is_hf_initialized = True  # type: ignore[attr-defined]
    linear.weight = weight
    setattr(linear, _GROUPS, groups)


def groups_of(linear: nn.Linear) -> Quantized | None:
    """What `set_groups` gave."""
    found: Quantized | None = getattr(linear, _GROUPS, None)
    return found


class Product:
    """Linears of one input as one product: the first that is asked computes for all."""

    def __init__(
        self, linears: list[nn.Linear], form: WeightFormat, kernel: LinearKernel | None = None
    ) -> None:
        """`kernel`: what multiplies by them, if there is one already."""
        self.in_size = linears[0].in_features
        self.sizes = [linear.out_features for linear in linears]
        self.out_size = sum(self.sizes)
        self.kernel = kernel or self._kernel(linears, form)
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    @staticmethod
    def _kernel(linears: list[nn.Linear], form: WeightFormat) -> LinearKernel:
        found = [linear.bias.data for linear in linears if linear.bias is not None]
        bias = torch.cat(found) if found else None
        groups = [groups_of(linear) for linear in linears]
        parts = [part for part in groups if part is not None]
        if len(parts) == len(linears):
            return form.grouped(parts, bias)
        weights = [
            linear.weight.data if part is None else part.dequantize(linear.weight.dtype)
            for linear, part in zip(linears, groups, strict=True)
        ]
        return form.linear(weights[0] if len(weights) == 1 else torch.cat(weights), bias)

    def whole(self, x: Tensor) -> Tensor:
        """[..., in_size] of T tokens -> [T, out_size]"""
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_size)
        return self.kernel(rows if rows.stride(-1) == 1 else rows.contiguous())

    def part(self, x: Tensor, number: int) -> Tensor:
        """[..., in_size] -> [..., sizes[number]]"""
        if len(self.sizes) == 1:
            found = self.whole(x)
            return found if x.dim() == 2 else found.view(*x.shape[:-1], self.out_size)
        if self._input is not x:
            out = self.whole(x).view(*x.shape[:-1], self.out_size)
            self._parts = torch.split(out, self.sizes, -1)
            self._input = x
        found = self._parts[number]
        if number == len(self.sizes) - 1:
            self._input, self._parts = None, ()
        return found


class Linear(nn.Module):
    """In place of an `nn.Linear`."""

    def __init__(
        self,
        product: Product,
        number: int,
        dtype: torch.dtype,
        *,
        sum_over: ParallelState | None = None,
        gather_from: ParallelState | None = None,
    ) -> None:
        """`sum_over`: the ranks that have the other inputs. `gather_from`: those that have the
        other outputs, which are wanted, too."""
        super().__init__()
        self.product, self.number = product, number
        self.sum_over, self.gather_from = sum_over, gather_from
        self.in_features, self.out_features = product.in_size, product.sizes[number]
        self.weight = torch.empty((self.out_features, self.in_features), dtype=dtype, device="meta")
        """For code that looks at its type or shape."""

    def of_rows(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]"""
        if self.gather_from is not None or len(self.product.sizes) > 1:
            return self.forward(x)
        found = self.product.kernel(x)
        return found if self.sum_over is None else self.sum_over.all_reduce(found)

    def forward(self, x: Tensor) -> Tensor:
        found = self.product.part(x, self.number)
        if self.gather_from is not None:
            whole = self.gather_from.all_gather_last_dim(found.flatten(0, -2))
            return whole.view(*found.shape[:-1], -1)
        return found if self.sum_over is None else self.sum_over.all_reduce(found)
