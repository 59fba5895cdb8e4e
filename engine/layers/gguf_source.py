"""`GgufSource`: the weights of a GGUF file, under the names of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.checkpoint.gguf.folder import open_checkpoint
from engine.checkpoint.gguf.weights import StoredWeight, stored_weights
from engine.errors import ConfigError
from engine.layers.gguf_blocks import grouped_of
from engine.layers.grouped import Grouped
from engine.layers.weight_format import MatrixSlice
from engine.layers.weights import CheckpointSource

CHUNK_NUMBERS = 1 << 19
"""That are dequantized at once: their float32 take 2 MiB, which caches hold."""
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufSource(CheckpointSource):
    """The GGUF file that a model folder was made of, single or split.

    Files are memory-mapped, and only what is asked for is dequantized, in pieces: nothing of the
    model is in memory twice.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(folder, dtype, device)
        self._weights = stored_weights(open_checkpoint(folder))
        files = {weight.tensor.file for weight in self._weights.values()}
        self._data = {file: np.memmap(file, np.uint8, mode="r") for file in files}

    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dim: int = 0,
        start: int = 0,
        count: int | None = None,
    ) -> Tensor:
        weight = self._find(name)
        if weight.shape != shape:
            raise ConfigError(
                f"the weight '{name}' in {weight.tensor.file} has shape {list(weight.shape)}, but "
                f"its metadata ask for {list(shape)}."
            )
        part = slice(start, shape[dim] if count is None else start + count)
        if dim == len(shape) - 1:
            rows = slice(0, _num_rows(weight))
            return self._plain(weight, rows, part, self.dtype).view(*shape[:-1], -1)
        if len(shape) > 2:
            raise ConfigError(f"the weight '{name}' of GGUF files can't be divided.")
        return self._plain(weight, part, slice(0, shape[-1]), self.dtype)

    def holds(self, name: str) -> bool:
        return name in self._weights

    def names(self) -> list[str]:
        return list(self._weights)

    def read(self, name: str) -> Tensor:
        weight = self._find(name)
        dtype = _PLAIN.get(weight.tensor.kind.name, self.dtype)
        rows, columns = slice(0, _num_rows(weight)), slice(0, weight.shape[-1])
        return self._plain(weight, rows, columns, dtype).view(weight.shape)

    def quantized(self, part: MatrixSlice) -> Grouped | None:
        weight = self._weights.get(f"{part.name}.weight")
        if weight is None or weight.tensor.kind.is_plain or weight.offset:
            return None
        if weight.shape != (part.out_size, part.in_size):
            return None  # `get` says what is wrong
        rows, columns = slice(0, part.out_size), slice(0, part.in_size)
        chosen = slice(part.start, part.start + part.count)
        rows, columns = (chosen, columns) if part.dim == 0 else (rows, chosen)
        size = weight.tensor.kind.block_numbers
        if columns.start % size or columns.stop % size:
            return None
        return grouped_of(weight.tensor.kind, self._bytes(weight, rows, columns))

    def _find(self, name: str) -> StoredWeight:
        if name not in self._weights:
            raise ConfigError(
                f"{self._file} lacks the weight '{name}'; is it the file of a whole model?"
            )
        return self._weights[name]

    @property
    def _file(self) -> Path:
        return min(self._data)

    def _plain(
        self, weight: StoredWeight, rows: slice, columns: slice, dtype: torch.dtype
    ) -> Tensor:
        """[rows, columns] of `dtype`, dequantized if it is quantized."""
        size = weight.tensor.kind.block_numbers
        wide = slice(columns.start // size * size, -(-columns.stop // size) * size)
        within = slice(columns.start - wide.start, columns.stop - wide.start)
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        made = torch.empty(shape, dtype=dtype, device=self.device)
        step = max(1, CHUNK_NUMBERS // max(1, wide.stop - wide.start))
        for first in range(rows.start, rows.stop, step):
            chunk = slice(first, min(first + step, rows.stop))
            values = self._numbers(weight, chunk, wide)[:, within]
            made[first - rows.start : chunk.stop - rows.start] = values
        return made

    def _numbers(self, weight: StoredWeight, rows: slice, columns: slice) -> Tensor:
        kind = weight.tensor.kind
        stored = self._bytes(weight, rows, columns)
        if kind.is_plain:
            values = stored.view(_PLAIN[kind.name])
        else:
            values = grouped_of(kind, stored).dequantize(torch.float32)
        return values.float() - weight.offset if weight.offset else values

    def _bytes(self, weight: StoredWeight, rows: slice, columns: slice) -> Tensor:
        """uint8 [rows, bytes of the columns], which are whole blocks, on the device."""
        tensor, kind = weight.tensor, weight.tensor.kind
        stored = self._data[tensor.file][tensor.offset : tensor.offset + tensor.num_bytes]
        matrix = stored.reshape(-1, tensor.row_bytes)
        first, stop = (
            edge // kind.block_numbers * kind.block_bytes for edge in (columns.start, columns.stop)
        )
        if weight.heads and len(tensor.shape) == 1:
            inner = _interleaved(weight.heads, tensor.shape[0], columns)
            chosen = matrix.reshape(-1, kind.block_bytes)[inner].reshape(1, -1)
        elif weight.heads:
            chosen = matrix[_interleaved(weight.heads, tensor.shape[0], rows)][:, first:stop]
        else:
            base = weight.number * _num_rows(weight)
            chosen = matrix[base + rows.start : base + rows.stop, first:stop]
        return torch.from_numpy(np.array(chosen)).to(self.device)


def _num_rows(weight: StoredWeight) -> int:
    return int(np.prod(weight.shape[:-1], dtype=np.int64))


def _interleaved(heads: int, size: int, rows: slice) -> np.ndarray:
    """Where the rows of transformers lie in the file: it has row i of a head's first half as its
    row 2 i, and row i of the second half as 2 i + 1."""
    row = np.arange(rows.start, rows.stop)
    head, within = np.divmod(row, size // heads)
    half, number = np.divmod(within, size // heads // 2)
    stored: np.ndarray = head * (size // heads) + 2 * number + half
    return stored
