"""`TensorHeaders`: names, types and shapes of a checkpoint's tensors, without their numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import ConfigError

FLOATS = ("F64", "F32", "F16", "BF16")
"""Safetensors' names of the types that plain weights have."""
FLOAT8 = ("F8_E4M3", "F8_E5M2")
MAX_CONTENT = 4096
"""Numbers of a tensor that is read for what it says of others."""


class TensorHeader(NamedTuple):
    """`type` is safetensors' name of it."""

    type: str
    shape: tuple[int, ...]


class TensorHeaders(Mapping[str, TensorHeader]):
    """Those of all files of a model folder, by name."""

    def __init__(
        self, folder: Path, found: Mapping[str, TensorHeader], read: Callable[[str], Any]
    ) -> None:
        """`read` gives a whole tensor, of numpy or torch."""
        self.folder = folder
        self._found, self._read = found, read

    def __getitem__(self, name: str) -> TensorHeader:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def present(self, base: str, names: Collection[str]) -> tuple[str, ...]:
        """Those of `names`, each behind `base`, that the files have."""
        return tuple(base + name for name in names if base + name in self._found)

    def numbers(self, name: str) -> list[int]:
        """All numbers of a small tensor of whole numbers."""
        if math.prod(self._found[name].shape) > MAX_CONTENT:
            raise self.error(name, f"has more than {MAX_CONTENT} numbers")
        found: list[int] = self._read(name).reshape(-1).tolist()
        return found

    def content(self, name: str) -> Any:
        """All of the tensor `name`, of numpy or torch, as `read` gives it."""
        return self._read(name)

    def check(
        self, name: str, of: str, types: Collection[str], shapes: Collection[tuple[int, ...]] = ()
    ) -> TensorHeader:
        """The header of the tensor `name`, which belongs to the quantized weight `of`.

        Raises `ConfigError` if it is missing, or its type is none of `types`, or its shape none of
        `shapes`.
        """
        if name not in self._found:
            raise ConfigError(
                f"the quantized weight '{of}' in {self.folder} lacks its tensor '{name}'; "
                "download the model again."
            )
        header = self._found[name]
        if header.type not in types:
            raise self.error(name, f"has the type {header.type} instead of {' or '.join(types)}")
        if shapes and header.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise self.error(name, f"has shape {list(header.shape)} instead of {wanted}")
        return header

    def error(self, name: str, problem: str) -> ConfigError:
        """The error of a tensor that doesn't fit its quantization."""
        return ConfigError(
            f"the tensor '{name}' in {self.folder} {problem}, as its quantization needs it; is "
            "config.json the one that belongs to it?"
        )
