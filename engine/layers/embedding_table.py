"""The matrix in which an embedding looks up its rows."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch.nn.functional as F
from torch import Tensor

from engine.layers.linear_kernel import GroupedKernel, NativeKernel


class EmbeddingTable(ABC):
    """A matrix [rows, size]; it may be the one that the output head multiplies by."""

    @abstractmethod
    def __call__(self, ids: Tensor) -> Tensor:
        """int64 [T], contiguous -> new [T, size]: the rows `ids`, to the last bit.

        Raises `RuntimeError` or `IndexError` if there is no such row.
        """


class RowTable(EmbeddingTable):
    """Row after row, as in the checkpoint."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class PackedTable(EmbeddingTable):
    """The rows lie in the panels of our kernel, which multiplies by them."""

    def __init__(self, kernel: NativeKernel) -> None:
        self.kernel = kernel

    def __call__(self, ids: Tensor) -> Tensor:
        return self.kernel.rows(ids)


class GroupedTable(EmbeddingTable):
    """The rows lie quantized in the panels of our kernel."""

    def __init__(self, kernel: GroupedKernel, like: Tensor) -> None:
        """Rows are of the type of `like`."""
        self.kernel, self._like = kernel, like

    def __call__(self, ids: Tensor) -> Tensor:
        return self.kernel.rows(ids, self._like)
