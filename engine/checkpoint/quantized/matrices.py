"""`StoredMatrix`: a quantized matrix by the tensors that it lies in, one class for each way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True)
class StoredMatrix:
    """What all have."""

    name: str
    """As transformers names it, such as "model.layers.0.mlp.up_proj.weight"."""
    shape: tuple[int, ...]
    tensors: tuple[str, ...]
    """All that belong to it, also those that aren't read."""

    reader: ClassVar[str]
    """A word of `engine.registry.MATRIX_READERS`."""


@dataclass(frozen=True)
class ScaledMatrix(StoredMatrix):
    """float8 or int8 numbers, with a scale for each block of them: `number * scale * factor`."""

    reader = "scaled"

    numbers: str
    scales: str
    scales_shape: tuple[int, ...]
    """Of as many dimensions as the matrix: blocks along each."""
    block: tuple[int, ...]
    """Numbers of a block along each dimension."""
    zeros: str | None = None
    """int8 of the shape of `scales`, taken off the numbers."""
    factor: float = 1.0


@dataclass(frozen=True)
class PackedMatrix(StoredMatrix):
    """Whole numbers of a few bits, several in an int32, with a scale and perhaps a zero for each
    group of inputs: `(number - zero) * scale`."""

    reader = "packed"

    layout: Literal["rows", "gptq", "awq"]
    """Where they lie: along the inputs of an output (compressed-tensors); along the inputs of a
    transposed matrix; along its outputs, in AWQ's order."""
    numbers: str
    scales: str
    zeros: str | None
    """None: the middle of the numbers."""
    order: str | None
    """The group of each input; None: groups are neighbouring inputs."""
    bits: int
    group: int
    """Inputs of a group."""
    zero_shift: int = 0
    """Added to a stored zero."""

    @property
    def num_groups(self) -> int:
        return -(-self.shape[1] // self.group)


@dataclass(frozen=True)
class Float4Matrix(StoredMatrix):
    """float4 (e2m1), two in a byte, with a scale for each `block` of inputs."""

    reader = "float4"

    numbers: str
    """uint8 [..., out, in / 2], or [..., out, in / 32, 16]."""
    scales: str
    """float8 (e4m3), or the exponents of powers of two; [..., out, in / block]."""
    block: int
    has_exponents: bool
    over: str | None = None
    """One scale above those of the blocks."""
    divides: bool = False
    """Whether `over` divides, instead of multiplying."""
    is_transposed: bool = False
    """Whether the matrix is [..., in, out]."""
    is_blocked: bool = False
    """Whether blocks are a dimension of `numbers`."""


@dataclass(frozen=True)
class CodebookMatrix(StoredMatrix):
    """Numbers of 4 bits that stand for entries of a table, with a scale for each `block` of them
    (bitsandbytes). Blocks go through the matrix row by row."""

    reader = "codebook"

    numbers: str
    """uint8, two numbers in a byte, the first in its high half."""
    codes: str
    """float32 [16]"""
    scales: str
    """float32 [blocks], or uint8 if they are quantized themselves."""
    block: int
    nested_codes: str | None = None
    """float32 [256]: what quantized scales stand for."""
    nested_scales: str | None = None
    """float32, one for each `nested_block` of scales."""
    nested_block: int = 1
    nested_offset: float = 0.0
    """Added to each scale."""
