"""`read_header`: what a GGUF file says of itself. A file is not trusted: every number is checked
against the file's size and against limits before anything is made of it.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.checkpoint.gguf.tensor_types import TENSOR_TYPES, TensorType, refused_type
from engine.errors import ConfigError

MAX_HEADER_BYTES = 64 << 20
"""Of metadata and table of tensors. Those with the largest vocabularies have some 15 MB."""
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_STRINGS = 1 << 21
"""In all lists of the metadata together."""
MAX_KEY_BYTES = 1 << 16
MAX_NAME_BYTES = 256
MAX_NESTING = 4
"""Lists in lists."""
MAX_DIMS = 4

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_FLOAT32, _STRING, _LIST = 6, 8, 9


class GgufTensor(NamedTuple):
    """A tensor, and where its bytes lie."""

    shape: tuple[int, ...]
    """Slowest dimension first, as in torch. The last one has whole blocks."""
    kind: TensorType
    file: Path
    offset: int
    """In the file."""

    @property
    def row_bytes(self) -> int:
        """Bytes of the numbers along the last dimension."""
        return self.shape[-1] // self.kind.block_numbers * self.kind.block_bytes

    @property
    def num_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


class GgufHeader(NamedTuple):
    """Numbers of lists in the metadata are arrays, texts are lists of `str`."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(file: Path) -> GgufHeader:
    """Read the metadata and the table of tensors of one file.

    Raises `ConfigError`, which names the file, if it isn't a GGUF file that Manta can read.
    """
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            if size < 24:
                raise ConfigError(f"{file} is too short for a GGUF file. Download it again.")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(file, data).header()
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error.strerror}.") from error


class _Reader:
    """Goes forward through a header."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self.file, self._data = file, data
        self._end = min(len(data), MAX_HEADER_BYTES)
        self._position = 0
        self._strings = 0

    def header(self) -> GgufHeader:
        if self._take(4) != b"GGUF":
            raise self._error("isn't a GGUF file")
        (version,) = self._numbers("<I")
        if version not in (2, 3):
            if version & 0xFFFF == 0:
                raise self._error("is a GGUF file for big-endian machines, which Manta can't read")
            raise self._error(f"is a GGUF file of version {version}; Manta reads versions 2 and 3")
        num_tensors, num_keys = self._numbers("<QQ")
        if num_keys > MAX_KEYS or num_tensors > MAX_TENSORS:
            raise self._damaged(f"it claims {num_keys} keys and {num_tensors} tensors")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string(MAX_KEY_BYTES)
            if key in metadata:
                raise self._damaged(f"it has the key {key!r} twice")
            (kind,) = self._numbers("<I")
            metadata[key] = self._value(kind, 0)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment % 8:
            raise self._damaged(f"general.alignment is {alignment!r}")
        return GgufHeader(metadata, self._tensors(num_tensors, alignment))

    def _tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        found: dict[str, GgufTensor] = {}
        for _ in range(count):
            name = self._string(MAX_NAME_BYTES)
            if name in found:
                raise self._damaged(f"it has the tensor {name!r} twice")
            (num_dims,) = self._numbers("<I")
            if not 1 <= num_dims <= MAX_DIMS:
                raise self._damaged(f"the tensor {name!r} has {num_dims} dimensions")
            shape = self._numbers(f"<{num_dims}Q")[::-1]
            number, offset = self._numbers("<IQ")
            kind = TENSOR_TYPES.get(number)
            if kind is None:
                raise ConfigError(f"the tensor {name!r} in {self.file} {refused_type(number)}")
            if prod(shape) == 0 or shape[-1] % kind.block_numbers:
                raise self._damaged(
                    f"the tensor {name!r} has the shape {list(shape)}, which {kind.name} can't have"
                )
            if offset % alignment:
                raise self._damaged(f"the tensor {name!r} isn't aligned")
            found[name] = GgufTensor(shape, kind, self.file, offset)
        start = -(-self._position // alignment) * alignment
        placed = {name: t._replace(offset=start + t.offset) for name, t in found.items()}
        end, last = 0, ""
        for name, tensor in sorted(placed.items(), key=lambda item: item[1].offset):
            if tensor.offset < end:
                raise self._damaged(f"the tensors {last!r} and {name!r} overlap")
            end, last = tensor.offset + tensor.num_bytes, name
        if end > len(self._data):
            raise ConfigError(
                f"{self.file} is cut short: it has {len(self._data)} bytes, and the tensor "
                f"{last!r} ends at {end}. Download it again."
            )
        return placed

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _SCALARS:
            (value,) = self._numbers(_SCALARS[kind])
            # The shortest decimal of a float32 is what it was made of: 1e-05, not 9.99999975e-06.
            return float(str(np.float32(value))) if kind == _FLOAT32 else value
        if kind == _STRING:
            return self._string(MAX_HEADER_BYTES)
        if kind != _LIST:
            raise self._damaged(f"its metadata has a value of the unknown type {kind}")
        inner, count = self._numbers("<IQ")
        if inner in _SCALARS:
            numbers = np.dtype(_SCALARS[inner])
            return np.frombuffer(self._take(count * numbers.itemsize), numbers)
        if depth == MAX_NESTING:
            raise self._damaged("its metadata has lists in lists in lists")
        self._strings += count
        if self._strings > MAX_STRINGS:
            raise self._damaged(f"its metadata has a list of {count} values")
        if inner == _STRING:
            return [self._string(MAX_HEADER_BYTES) for _ in range(count)]
        return [self._value(inner, depth + 1) for _ in range(count)]

    def _string(self, most: int) -> str:
        (length,) = self._numbers("<Q")
        if length > most:
            raise self._damaged(f"it has a text of {length} bytes")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise self._damaged("one of its texts isn't UTF-8") from None

    def _numbers(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(form)
        position = self._position
        if position + size > self._end:
            raise self._ended()
        self._position = position + size
        return struct.unpack_from(form, self._data, position)

    def _take(self, length: int) -> bytes:
        stop = self._position + length
        if stop > self._end:
            raise self._ended()
        taken = self._data[self._position : stop]
        self._position = stop
        return taken

    def _ended(self) -> ConfigError:
        if self._end == MAX_HEADER_BYTES:
            return self._damaged(f"its header is longer than {MAX_HEADER_BYTES >> 20} MiB")
        return ConfigError(f"{self.file} ends within its header. Download it again.")

    def _damaged(self, what: str) -> ConfigError:
        return ConfigError(f"{self.file} is damaged: {what}. Download it again.")

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.file} {what}.")
