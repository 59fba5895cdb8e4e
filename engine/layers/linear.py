"""Linear layers split over the tensor parallel group (Megatron-LM, Shoeybi et al. 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.checkpoint.model_config import ModelConfig
from engine.device.distributed import ParallelState
from engine.layers.adapted import AdaptedLinears, Projection
from engine.layers.linear_kernel import LinearKernel
from engine.layers.weight_format import MatrixSlice
from engine.layers.weights import WeightSource


class MergedColumnParallelLinear:
    """Several projections of one input as one matrix. Each rank owns a share of each projection.

    `sizes` are the full output sizes, which tp_size divides (`ModelConfig.check_split`). `copies`
    is the number of ranks that hold the same share of a projection. The output is
    [N, sum(local_sizes)], in the order of `sizes`.
    """

    kernel: LinearKernel
    slices: list[MatrixSlice]
    """What was loaded."""

    def __init__(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        parallel: ParallelState,
        copies: tuple[int, ...] | None = None,
    ) -> None:
        self.in_size = in_size
        self.sizes = sizes
        self.bias = bias
        self.parallel = parallel
        self.copies = copies or (1,) * len(sizes)
        self.local_sizes = tuple(
            size * count // parallel.tp_size for size, count in zip(sizes, self.copies, strict=True)
        )

    def load(self, source: WeightSource, prefixes: tuple[str, ...]) -> None:
        """Read this rank's rows of the checkpoint's matrices named `prefixes`, and merge them."""
        slices, biases = [], []
        for prefix, size, local, count in zip(
            prefixes, self.sizes, self.local_sizes, self.copies, strict=True
        ):
            start = self.parallel.tp_rank // count * local
            slices.append(MatrixSlice(prefix, size, self.in_size, 0, start, local))
            if self.bias:
                biases.append(source.get(f"{prefix}.bias", (size,), start=start, count=local))
        bias = torch.cat(biases) if biases else None
        self.slices = slices
        self.kernel = source.format.load(source, slices, bias)

    def adapt(self, linears: AdaptedLinears) -> None:
        """Let it have adapters."""
        linears.adapt(self, [_projection(part) for part in self.slices])

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in_size] -> [N, sum(local_sizes)]"""
        return self.kernel(x)


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projections as one matrix, split by heads.

    With more ranks than key/value heads, each of those heads is held by tp_size / num_kv_heads
    ranks.
    """

    def __init__(self, config: ModelConfig, parallel: ParallelState) -> None:
        kv_size = config.num_kv_heads * config.head_dim
        kv_copies = max(1, parallel.tp_size // config.num_kv_heads)
        super().__init__(
            config.hidden_size,
            (config.num_heads * config.head_dim, kv_size, kv_size),
            config.qkv_bias,
            parallel,
            (1, kv_copies, kv_copies),
        )
        self.num_heads = config.num_heads // parallel.tp_size
        self.num_kv_heads = config.local_kv_heads(parallel.tp_size)


class RowParallelLinear:
    """A projection whose inputs are split over the ranks; the partial results are summed."""

    kernel: LinearKernel
    part: MatrixSlice
    """What was loaded."""

    def __init__(self, in_size: int, out_size: int, bias: bool, parallel: ParallelState) -> None:
        self.in_size = in_size
        self.out_size = out_size
        self.bias = bias
        self.parallel = parallel
        self.local_size = in_size // parallel.tp_size

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read this rank's columns."""
        start = self.parallel.tp_rank * self.local_size
        self.part = MatrixSlice(prefix, self.out_size, self.in_size, 1, start, self.local_size)
        bias: Tensor | None = None
        if self.bias and self.parallel.tp_rank == 0:  # added once, not once per rank
            bias = source.get(f"{prefix}.bias", (self.out_size,))
        self.kernel = source.format.load(source, [self.part], bias)

    def adapt(self, linears: AdaptedLinears) -> None:
        """Let it have adapters: each rank adds what its inputs make, before the sum."""
        linears.adapt(self, [_projection(self.part)])

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in_size / tp_size] -> [N, out_size], the same on every rank."""
        return self.parallel.all_reduce(self.kernel(x))


def _projection(part: MatrixSlice) -> Projection:
    own = range(part.start, part.start + part.count)
    return Projection(part.name, part.out_size, part.in_size, part.dim, (own,))
