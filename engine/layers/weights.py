"""Where weights come from: layers pull exactly the slices that they own."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoint.files import find_weight_files, locate_tensors
from engine.checkpoint.quantization import format_of, stored_matrices
from engine.checkpoint.quantized.headers import TensorHeader, TensorHeaders
from engine.errors import ConfigError
from engine.layers.float8_groups import Float8Groups
from engine.layers.grouped import Grouped
from engine.layers.quantized.base import Box, MatrixReader, make_reader, part_box, whole_box
from engine.layers.weight_format import MatrixSlice, PlainFormat, WeightFormat


class WeightSource(ABC):
    """Named tensors, read slice by slice. `format` says how layers keep their matrices."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.format: WeightFormat = PlainFormat()

    @abstractmethod
    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dim: int = 0,
        start: int = 0,
        count: int | None = None,
    ) -> Tensor:
        """Elements [start, start + count) along `dim` of the tensor `name` of full size `shape`.

        The result has this source's dtype and device. Raises `ConfigError` naming the tensor if it
        is missing or has another shape.
        """

    @abstractmethod
    def holds(self, name: str) -> bool:
        """Whether a checkpoint has the tensor `name`. Without a checkpoint there is none."""

    def quantized(self, part: MatrixSlice) -> Grouped | None:
        """`part` as the checkpoint has it, if it has it as whole numbers in groups that the part
        can be divided into; None: it is to be had by `get`, in this source's dtype.

        Raises `ConfigError` as `get` does.
        """
        return None

    def float8(self, part: MatrixSlice) -> Float8Groups | None:
        """The same for float8 numbers."""
        return None


class CheckpointSource(WeightSource):
    """The tensors of a model folder."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self.folder = folder

    @abstractmethod
    def names(self) -> list[str]:
        """All tensors that can be read, under the names that transformers saves them by."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """All of the tensor `name`, on the device: in the type that it has in the file, or in this
        source's dtype if it is quantized there. Raises `ConfigError` if it is missing."""

    def quantized_of(
        self, part: MatrixSlice, number: int, *, is_transposed: bool
    ) -> Grouped | None:
        """As `quantized`, of one of the matrices that are stacked as the tensor `part.name`,
        [matrices, out, in], or [matrices, in, out] if `is_transposed`."""
        return None


class SafetensorsSource(CheckpointSource):
    """The *.safetensors files of a Hugging Face model folder, single or sharded.

    Files are memory-mapped; only the slices asked for are read, straight to the device, and
    converted there: the host never holds a copy of the model. Layers come in the order of the
    files, so that one shard after the other is read. Checkpoints for embedding may lack the prefix
    "model." of names, because they were saved without the output head.

    Quantized matrices go by the names that they have in a plain checkpoint, and are dequantized
    slice by slice in float32.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises `ConfigError` if files are damaged, or quantized in a way that can't be read."""
        super().__init__(folder, dtype, device)
        self._files: dict[str, Any] = {}
        self._file_of = self._find()
        files = _Files(self)
        matrices = stored_matrices(format_of(folder), files.headers(folder))
        self._quantized: dict[str, MatrixReader[Any]] = {
            name: make_reader(matrix, files) for name, matrix in matrices.items()
        }
        taken = {tensor for matrix in matrices.values() for tensor in matrix.tensors}
        self._names = [name for name in self._file_of if name not in taken] + list(matrices)

    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dim: int = 0,
        start: int = 0,
        count: int | None = None,
    ) -> Tensor:
        name = self._stored(name)
        stop = shape[dim] if count is None else start + count
        reader = self._quantized.get(name)
        if reader is not None:
            self._check(name, reader.matrix.shape, shape)
            return reader.read(part_box(shape, dim, start, stop), self.dtype).contiguous()
        view = self.view(name)
        self._check(name, tuple(view.get_shape()), shape)
        index = (slice(None),) * dim + (slice(start, stop),)
        part: Tensor = view[index]
        return part.to(dtype=self.dtype).contiguous()

    def names(self) -> list[str]:
        return list(self._names)

    def read(self, name: str) -> Tensor:
        reader = self._quantized.get(name)
        if reader is not None:
            return reader.read(whole_box(reader.matrix.shape), self.dtype)
        whole: Tensor = self.view(name)[...]
        return whole

    def quantized(self, part: MatrixSlice) -> Grouped | None:
        reader = self._reader_of(part)
        return None if reader is None else reader.grouped(*_part_of(part))

    def quantized_of(
        self, part: MatrixSlice, number: int, *, is_transposed: bool
    ) -> Grouped | None:
        reader = self._quantized.get(self._stored(part.name))
        if reader is None or getattr(reader.matrix, "is_transposed", False) != is_transposed:
            return None
        sizes = (part.out_size, part.in_size)
        found, wanted = reader.matrix.shape, sizes[::-1] if is_transposed else sizes
        self._check(part.name, found, (*found[:-2], *wanted))
        return reader.grouped_of(number, *_part_of(part))

    def float8(self, part: MatrixSlice) -> Float8Groups | None:
        reader = self._reader_of(part)
        return None if reader is None else reader.float8(*_part_of(part))

    def holds(self, name: str) -> bool:
        return self._stored(name) in self._quantized or self._stored(name) in self._file_of

    def view(self, name: str) -> Any:
        """safetensors' slice of a tensor of the files, from which parts can be read. Raises
        `ConfigError` if it is missing."""
        if name not in self._file_of:
            raise ConfigError(
                f"the checkpoint in {self.folder} lacks the weight '{name}'; "
                "is config.json the one that belongs to it?"
            )
        return self._open(self._file_of[name]).get_slice(name)

    def stored_names(self) -> list[str]:
        """All tensors of the files, under their names there."""
        return list(self._file_of)

    def _reader_of(self, part: MatrixSlice) -> MatrixReader[Any] | None:
        """That of a quantized matrix; None: it is plain. Raises `ConfigError` if it has another
        shape."""
        name = self._stored(f"{part.name}.weight")
        reader = self._quantized.get(name)
        if reader is not None:
            self._check(name, reader.matrix.shape, (part.out_size, part.in_size))
        return reader

    def _check(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if found != wanted:
            raise ConfigError(
                f"the weight '{name}' in {self.folder} has shape {list(found)}, but config.json "
                f"asks for {list(wanted)}."
            )

    def _stored(self, name: str) -> str:
        """The name of a tensor as the files have it."""
        short = name.removeprefix("model.")
        for known in (self._file_of, self._quantized):
            if name in known:
                return name
        return short if short in self._file_of or short in self._quantized else name

    def _find(self) -> dict[str, str]:
        files = find_weight_files(self.folder)
        return locate_tensors(self.folder, files, lambda name: self._open(name).keys())

    def _open(self, name: str) -> Any:
        if name not in self._files:
            try:
                # Not used as a context manager: the mapping lives as long as this source.
                self._files[name] = safe_open(
                    str(self.folder / name), framework="pt", device=str(self.device)
                )
            except SafetensorError as error:
                raise ConfigError(
                    f"{self.folder / name} can't be read: {error}. Download it again."
                ) from error
        return self._files[name]


def _part_of(part: MatrixSlice) -> Box:
    return part_box((part.out_size, part.in_size), part.dim, part.start, part.start + part.count)


class _Files:
    """What readers of quantized matrices need of a source."""

    def __init__(self, source: SafetensorsSource) -> None:
        self._source = source
        self.device = source.device

    def box(self, name: str, box: Sequence[range] | None = None) -> Tensor:
        """See `Boxes`."""
        view = self._source.view(name)
        part: Tensor = view[...] if box is None else view[_index(box)]
        return part

    def headers(self, folder: Path) -> TensorHeaders:
        """Those of all tensors."""
        found = {}
        for name in self._source.stored_names():
            view = self._source.view(name)
            found[name] = TensorHeader(view.get_dtype(), tuple(view.get_shape()))
        return TensorHeaders(folder, found, self.box)


def _index(box: Sequence[range]) -> tuple[slice, ...]:
    return tuple(slice(part.start, part.stop) for part in box)


class DummySource(WeightSource):
    """Seeded random weights, made without a checkpoint. A name has the same weights under any
    split."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self.seed = seed

    def holds(self, name: str) -> bool:
        return False

    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dim: int = 0,
        start: int = 0,
        count: int | None = None,
    ) -> Tensor:
        stop = shape[dim] if count is None else start + count
        if name.endswith("norm.weight"):
            full = torch.ones(shape, dtype=self.dtype, device=self.device)
        else:
            generator = torch.Generator(self.device)
            generator.manual_seed(zlib.crc32(f"{self.seed}:{name}".encode()))
            full = torch.randn(shape, generator=generator, dtype=self.dtype, device=self.device)
            # Keeps the size of activations from layer to layer.
            full.mul_(shape[-1] ** -0.5)
        return full.narrow(dim, start, stop - start).clone()
