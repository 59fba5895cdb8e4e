"""Linear layers split over the tensor parallel group (Megatron-LM, Shoeybi et al. 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.distributed import ParallelState
from engine.errors import ConfigError
from engine.layers.linear_kernel import LinearKernel, make_linear_kernel
from engine.models.weights import WeightSource


def shard(name: str, size: int, parts: int) -> int:
    """`size / parts`; raises `ConfigError` naming `name` if it doesn't divide."""
    if size % parts:
        raise ConfigError(
            f"{name} ({size}) can't be split over tp_size {parts}; choose one that divides it."
        )
    return size // parts


def _rows(
    source: WeightSource, prefix: str, full: tuple[int, int], start: int, count: int, bias: bool
) -> tuple[Tensor, Tensor | None]:
    weight = source.get(f"{prefix}.weight", full, dim=0, start=start, count=count)
    if not bias:
        return weight, None
    return weight, source.get(f"{prefix}.bias", full[:1], dim=0, start=start, count=count)


class MergedColumnParallelLinear:
    """Several projections of one input as one matrix; each rank owns a share of each's outputs.

    `sizes` are the full output sizes; the output is [N, sum(sizes) / tp_size], in that order.
    """

    kernel: LinearKernel

    def __init__(
        self,
        name: str,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        parallel: ParallelState,
    ) -> None:
        self.in_size = in_size
        self.sizes = sizes
        self.bias = bias
        self.parallel = parallel
        self.local_sizes = tuple(shard(name, size, parallel.tp_size) for size in sizes)

    def load(self, source: WeightSource, prefixes: tuple[str, ...]) -> None:
        """Read this rank's rows of the checkpoint's matrices named `prefixes`."""
        parts = [
            self._part(source, prefix, size, local)
            for prefix, size, local in zip(prefixes, self.sizes, self.local_sizes, strict=True)
        ]
        self.process_weights_after_loading(parts)

    def process_weights_after_loading(self, parts: list[tuple[Tensor, Tensor | None]]) -> None:
        """Merge the parts and bring them into the form that multiplies fastest."""
        weight = torch.cat([weight for weight, _ in parts]) if len(parts) > 1 else parts[0][0]
        biases = [bias for _, bias in parts if bias is not None]
        self.kernel = make_linear_kernel(weight, torch.cat(biases) if biases else None)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in_size] -> [N, sum(local_sizes)]"""
        return self.kernel(x)

    def _part(
        self, source: WeightSource, prefix: str, size: int, local: int
    ) -> tuple[Tensor, Tensor | None]:
        start = self.parallel.tp_rank * local
        return _rows(source, prefix, (size, self.in_size), start, local, self.bias)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """One projection whose outputs are split over the ranks."""

    def __init__(
        self, name: str, in_size: int, out_size: int, bias: bool, parallel: ParallelState
    ) -> None:
        super().__init__(name, in_size, (out_size,), bias, parallel)


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projections as one matrix, split by heads.

    With more ranks than key/value heads, each of those heads is held by tp_size / num_kv_heads
    ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        parallel: ParallelState,
    ) -> None:
        self.in_size = hidden_size
        self.bias = bias
        self.parallel = parallel
        self.num_heads = shard("num_attention_heads", num_heads, parallel.tp_size)
        self.num_kv_heads = local_kv_heads(num_kv_heads, parallel.tp_size)
        self.replicas = max(1, parallel.tp_size // num_kv_heads)
        self.head_dim = head_dim
        self.sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        kv = self.num_kv_heads * head_dim
        self.local_sizes = (self.num_heads * head_dim, kv, kv)

    def load(self, source: WeightSource, prefixes: tuple[str, ...]) -> None:
        """`prefixes`: the names of the q, k and v projections."""
        ranks = (self.parallel.tp_rank,) + (self.parallel.tp_rank // self.replicas,) * 2
        parts = [
            _rows(source, prefix, (size, self.in_size), rank * local, local, self.bias)
            for prefix, size, local, rank in zip(
                prefixes, self.sizes, self.local_sizes, ranks, strict=True
            )
        ]
        self.process_weights_after_loading(parts)


class RowParallelLinear:
    """A projection whose inputs are split over the ranks; the partial results are summed."""

    kernel: LinearKernel

    def __init__(
        self, name: str, in_size: int, out_size: int, bias: bool, parallel: ParallelState
    ) -> None:
        self.in_size = in_size
        self.out_size = out_size
        self.bias = bias
        self.parallel = parallel
        self.local_size = shard(name, in_size, parallel.tp_size)

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read this rank's columns."""
        start = self.parallel.tp_rank * self.local_size
        weight = source.get(
            f"{prefix}.weight",
            (self.out_size, self.in_size),
            dim=1,
            start=start,
            count=self.local_size,
        )
        bias: Tensor | None = None
        if self.bias and self.parallel.tp_rank == 0:  # added once, not once per rank
            bias = source.get(f"{prefix}.bias", (self.out_size,))
        self.process_weights_after_loading(weight, bias)

    def process_weights_after_loading(self, weight: Tensor, bias: Tensor | None) -> None:
        """Bring the weight into the form that multiplies fastest."""
        self.kernel = make_linear_kernel(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in_size / tp_size] -> [N, out_size], the same on every rank."""
        return self.parallel.all_reduce(self.kernel(x))


def local_kv_heads(num_kv_heads: int, tp_size: int) -> int:
    """Key/value heads that one rank holds. Raises `ConfigError` if they can't be shared evenly."""
    if num_kv_heads % tp_size and tp_size % num_kv_heads:
        raise ConfigError(
            f"num_key_value_heads ({num_kv_heads}) and tp_size {tp_size}: one must divide the "
            "other; choose another tp_size."
        )
    return max(1, num_kv_heads // tp_size)
