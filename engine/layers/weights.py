"""Where weights come from: layers pull exactly the slices that they own."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoint.files import find_weight_files, locate_tensors
from engine.checkpoint.quantization import refusal, refuse_type, sign_of
from engine.errors import ConfigError
from engine.layers.grouped import Grouped
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
        """`part` as the checkpoint has it, if it has it quantized in groups and the part cuts
        through none; None: it is to be had by `get`, in this source's dtype."""
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


class SafetensorsSource(CheckpointSource):
    """The *.safetensors files of a Hugging Face model folder, single or sharded.

    Files are memory-mapped; only the slices asked for are read, straight to the device, and
    converted there: the host never holds a copy of the model. Layers come in the order of the
    files, so that one shard after the other is read. Checkpoints for embedding may lack the prefix
    "model." of names, because they were saved without the output head.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(folder, dtype, device)
        self._files: dict[str, Any] = {}
        self._file_of = self._find()

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
        view = self._view(name)
        found = tuple(view.get_shape())
        if found != shape:
            raise ConfigError(
                f"the weight '{name}' in {self.folder} has shape {list(found)}, but config.json "
                f"asks for {list(shape)}."
            )
        stop = shape[dim] if count is None else start + count
        index = (slice(None),) * dim + (slice(start, stop),)
        part: Tensor = view[index]
        return part.to(dtype=self.dtype).contiguous()

    def names(self) -> list[str]:
        return list(self._file_of)

    def read(self, name: str) -> Tensor:
        whole: Tensor = self._view(name)[...]
        return whole

    def _view(self, name: str) -> Any:
        if name not in self._file_of:
            sign = sign_of(name, self._file_of)
            if sign:
                raise refusal(f"{self.folder} has quantized weights ({sign}) for '{name}'")
            raise ConfigError(
                f"the checkpoint in {self.folder} lacks the weight '{name}'; "
                "is config.json the one that belongs to it?"
            )
        view = self._open(self._file_of[name]).get_slice(name)
        refuse_type(self.folder, name, view.get_dtype(), self._file_of)
        return view

    def holds(self, name: str) -> bool:
        return self._stored(name) in self._file_of

    def _stored(self, name: str) -> str:
        """The name of a tensor in the files."""
        short = name.removeprefix("model.")
        return short if name not in self._file_of and short in self._file_of else name

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
