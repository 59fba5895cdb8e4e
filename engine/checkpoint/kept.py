"""What a checkpoint has quantized, and what of it our CPU kernels keep as it is. Loads no torch.

It says in sizes what `engine.layers.quantized`, `engine.layers.gguf_source` and
`engine.models.share` do with the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine.checkpoint.files import find_weight_files
from engine.checkpoint.gguf.folder import is_gguf_folder, open_checkpoint, source_files
from engine.checkpoint.gguf.weights import StoredWeight, stored_weights
from engine.checkpoint.layout import ModelLayout
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.quantization import format_of, stored_matrices
from engine.checkpoint.quantized.headers import TensorHeaders
from engine.checkpoint.quantized.matrices import (
    Float4Matrix,
    PackedMatrix,
    ScaledMatrix,
    StoredMatrix,
)
from engine.checkpoint.tensor_headers import open_headers
from engine.checkpoint.weight_formats import PLAIN, WeightForm

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Matrices of one input are one product: all are kept, or none."""
_MIN_BITS = 4
"""Numbers of fewer bits take so many."""
_SMALL_GROUP, _GROUP = 16, 32
"""Inputs of a group that kernels have: so many, or a multiple of the second."""
_TYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_LAYER = re.compile(r"(?:^|\.)(\w+)\.(\d+)\.")
_EXPERT = re.compile(r".*\.experts\.(?:\d+\.(\w+)\.weight|(\w+_proj))")
"""A matrix of a mixture: of one expert, or those of all, stacked."""
_DOWN = ("down_proj", "w2", "fc2")
"""Those behind the gate."""


class KeptMatrix(NamedTuple):
    """A matrix that can stay as the checkpoint has it, or a stack of them."""

    outputs: int
    inputs: int
    number_bytes: float
    """Of each number in our kernels, with its part of scales and minima."""
    unit: int
    """A rank's inputs must be a multiple of it."""
    stacked: int = 1
    """Matrices in the stack."""


class FileStamp(NamedTuple):
    """A file as it is now."""

    path: Path
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class QuantizedFiles:
    """A checkpoint with quantized matrices."""

    title: str
    """Format and types, for a person."""
    notes: tuple[str, ...]
    """See `CheckpointFormat.notes`."""
    num_bytes: int
    """Of its files."""
    num_matrices: int
    """That are quantized."""
    names: frozenset[str]
    """All weights, as transformers names them."""
    kept: Mapping[str, KeptMatrix]
    """By name, those that can stay as they are."""

    @classmethod
    def of(cls, model: ModelConfig) -> QuantizedFiles | None:
        """None: all are plain. Raises `ConfigError` if files are missing or damaged."""
        folder = model.path
        if is_gguf_folder(folder):
            files = source_files(folder)
        elif model.quantized is None:
            return None
        else:
            files = tuple(folder / name for name in find_weight_files(folder).names)
        return _read(folder, tuple(map(_stamp, files)))


def _stamp(file: Path) -> FileStamp:
    stat = file.stat()
    return FileStamp(file, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=8)
def _read(folder: Path, files: tuple[FileStamp, ...]) -> QuantizedFiles | None:
    num_bytes = sum(file.size for file in files)
    return _of_gguf(folder, num_bytes) if is_gguf_folder(folder) else _of_tensors(folder, num_bytes)


def _of_gguf(folder: Path, num_bytes: int) -> QuantizedFiles | None:
    weights = stored_weights(open_checkpoint(folder))
    quantized = {name: w for name, w in weights.items() if not w.tensor.kind.is_plain}
    kinds = {w.tensor.kind.name for w in weights.values() if len(w.shape) > 1}
    if not quantized:
        return None
    return QuantizedFiles(
        title=f"GGUF ({', '.join(sorted(kinds))})",
        notes=(),
        num_bytes=num_bytes,
        num_matrices=len(quantized),
        names=frozenset(weights),
        kept={name: _kept_blocks(w) for name, w in quantized.items() if len(w.shape) == 2},
    )


def _kept_blocks(weight: StoredWeight) -> KeptMatrix:
    """Blocks take as much in our kernels as in the file, but for some bits of K-quants' scales."""
    kind = weight.tensor.kind
    outputs, inputs = weight.shape
    return KeptMatrix(outputs, inputs, kind.block_bytes / kind.block_numbers, kind.block_numbers)


def _of_tensors(folder: Path, num_bytes: int) -> QuantizedFiles | None:
    form = format_of(folder)
    if form is None:
        return None
    with open_headers(folder) as headers:
        matrices = stored_matrices(form, headers)
        sizes = _Sizes(headers)
        found = {name: sizes.kept(matrix) for name, matrix in matrices.items()}
        taken = {tensor for matrix in matrices.values() for tensor in matrix.tensors}
        return QuantizedFiles(
            title=form.title,
            notes=form.notes,
            num_bytes=num_bytes,
            num_matrices=len(matrices),
            names=frozenset(headers.keys() - taken | matrices.keys()),
            kept={name: one for name, one in found.items() if one is not None},
        )


class _Sizes:
    """What matrices of safetensors take in our kernels."""

    def __init__(self, headers: TensorHeaders) -> None:
        self._headers = headers
        self._has_mins: bool | None = None
        """Whether zeros are others than the middle of the numbers. The first matrix stands for
        all."""

    def kept(self, matrix: StoredMatrix) -> KeptMatrix | None:
        """None: it is dequantized."""
        if isinstance(matrix, Float4Matrix) and len(matrix.shape) == 3:
            count, outputs, inputs = matrix.shape
            if matrix.is_transposed:
                outputs, inputs = inputs, outputs
            return KeptMatrix(outputs, inputs, 5 / 8 + 4 / matrix.block, matrix.block, count)
        if len(matrix.shape) != 2:
            return None
        outputs, inputs = matrix.shape
        if isinstance(matrix, PackedMatrix):
            if matrix.order is not None and not self._is_in_order(matrix):
                return None
            scale = _TYPE_BYTES[self._headers[matrix.scales].type]
            if self._subtracts(matrix):
                scale = 8  # and a minimum, both in float32
            group, unit = matrix.group, min(matrix.group, _GROUP)
            bits = max(matrix.bits, _MIN_BITS)
        elif isinstance(matrix, Float4Matrix) and not matrix.is_transposed:
            group = unit = matrix.block
            bits, scale = 5, 4
        elif isinstance(matrix, ScaledMatrix):
            is_int8 = self._headers[matrix.numbers].type == "I8"
            if not is_int8 or matrix.zeros or matrix.block[1] < inputs:
                return None
            group, unit, bits, scale = inputs, _GROUP, 8, 4
        else:
            return None
        if group != _SMALL_GROUP and group % _GROUP:
            return None
        return KeptMatrix(outputs, inputs, bits / 8 + scale / group, unit)

    def _is_in_order(self, matrix: PackedMatrix) -> bool:
        """Whether its groups are neighbouring inputs."""
        assert matrix.order is not None
        order = np.asarray(self._headers.content(matrix.order))
        inputs = np.arange(len(order))
        return bool((order == -1).all() or (order == inputs // matrix.group).all())

    def _subtracts(self, matrix: PackedMatrix) -> bool:
        if matrix.zeros is None:
            return False
        if self._has_mins is None:
            packed = np.asarray(self._headers.content(matrix.zeros)).astype("<i4").view(np.uint8)
            mask, middle = (1 << matrix.bits) - 1, 1 << (matrix.bits - 1)
            zeros = [packed >> shift & mask for shift in range(0, 8, matrix.bits)]
            self._has_mins = any(
                bool(((part + matrix.zero_shift & mask) != middle).any()) for part in zeros
            )
        return self._has_mins


class _Sized(NamedTuple):
    """Bytes of a matrix on a rank."""

    kept: int
    """As it is."""
    plain: int
    """As it would become."""


@dataclass(frozen=True)
class KeptShare:
    """What the ranks of an engine on CPU, with our kernels, keep of `files` as they are. Plain
    numbers have `item` bytes, and `form` may make something else of them."""

    model: ModelConfig
    files: QuantizedFiles
    item: int
    form: WeightForm = PLAIN
    ep_size: int | None = None
    """As in the configuration."""

    def num_bytes(self, tp_size: int, pp_size: int, pp_rank: int) -> int:
        """Of what a rank of stage `pp_rank` keeps."""
        return sum(size.kept for size in self._of_stage(tp_size, pp_size, pp_rank).values())

    def saved(self, tp_size: int, pp_size: int, pp_rank: int) -> int:
        """By how many bytes that is less than what it would become."""
        sizes = self._of_stage(tp_size, pp_size, pp_rank).values()
        return sum(size.plain - size.kept for size in sizes)

    def keeps_all(self, tp_size: int, pp_size: int) -> bool:
        """Whether nothing that is quantized becomes plain on any rank."""
        names: set[str] = set()
        for pp_rank in range(pp_size):
            names |= self._of_stage(tp_size, pp_size, pp_rank).keys()
        return len(names) == self.files.num_matrices

    def _of_stage(self, tp_size: int, pp_size: int, pp_rank: int) -> dict[str, _Sized]:
        """Of each matrix that is kept, by name."""
        found: dict[str, _Sized] = {}
        layers = self.model.stage_layers(pp_size)[pp_rank]
        for name, kept in self.files.kept.items():
            match = _LAYER.search(name)
            if match is None or int(match[2]) not in layers:
                continue
            rest = name[match.end() :]
            share = self._share(match[1], int(match[2]), rest, kept, tp_size)
            if share is not None:
                found[name] = self._sized(kept, *share)
        self._drop_experts(found)
        for names in _TOGETHER:
            self._drop_alone(found, names)
        if self.model.layout is None:
            found |= self._outside(tp_size, pp_rank == 0, pp_rank == pp_size - 1)
        return found

    def _sized(self, kept: KeptMatrix, outputs: int, inputs: int) -> _Sized:
        plain = self.form if self.model.layout is None else PLAIN
        return _Sized(
            int(outputs * inputs * kept.number_bytes),
            plain.matrix_bytes(outputs, inputs, self.item),
        )

    def _share(
        self, parent: str, layer: int, rest: str, kept: KeptMatrix, tp_size: int
    ) -> tuple[int, int] | None:
        """Outputs and inputs that a rank has of the matrix `rest` of a layer; None: it becomes
        plain."""
        layout = self.model.layout
        if layout is None:
            return self._own_share(rest, kept, tp_size)
        if parent != layout.layers.rpartition(".")[2]:
            return None
        if _EXPERT.fullmatch(f".{rest}"):
            return self._expert_share(layout, layer, rest, kept, tp_size)
        if kept.stacked > 1:
            return None
        name = f"{layout.layers}.{layer}.{rest}"
        if name.removesuffix(".weight") in layout.read or any(
            call.latent_of is not None for call in layout.calls
        ):
            return None
        cut = next((cut for cut in layout.cuts if cut.name == name), None)
        if cut is None or tp_size == 1:
            return kept.outputs, kept.inputs
        if len(cut.parts) != 1:
            return None
        size = len(cut.ranges(tp_size, 0)[0])
        if cut.dim == 0:
            return size, kept.inputs
        return None if size % kept.unit else (kept.outputs, size)

    def _expert_share(
        self, layout: ModelLayout, layer: int, rest: str, kept: KeptMatrix, tp_size: int
    ) -> tuple[int, int] | None:
        """The same of experts. A rank has some of them: what it has of all is said as the outputs
        that it has of each in the mean."""
        name = f"{layout.layers}.{layer}."
        mixture = next((one for one in layout.mixtures if one.name.startswith(name)), None)
        match = _EXPERT.fullmatch(f".{rest}")
        if mixture is None or match is None:
            return None
        groups = layout.expert_groups(tp_size, self.ep_size)
        ranks = tp_size // groups
        if (match[1] or match[2]) not in _DOWN:
            return kept.stacked * kept.outputs // tp_size, kept.inputs
        inputs = kept.inputs // ranks
        return None if inputs % kept.unit else (kept.stacked * kept.outputs // groups, inputs)

    def _own_share(self, rest: str, kept: KeptMatrix, tp_size: int) -> tuple[int, int] | None:
        """The same of our own models."""
        matrix = rest.split(".")[-2]
        if matrix in ("o_proj", "down_proj"):
            inputs = kept.inputs // tp_size
            return None if inputs % kept.unit else (kept.outputs, inputs)
        if matrix in ("k_proj", "v_proj"):
            heads = self.model.num_kv_heads
            return kept.outputs * self.model.local_kv_heads(tp_size) // heads, kept.inputs
        return kept.outputs // tp_size, kept.inputs

    def _drop_experts(self, found: dict[str, _Sized]) -> None:
        """Of the experts of a layer all are kept, or none: take out those of which others aren't,
        before the gate or behind it."""
        sides: dict[tuple[str, bool], list[str]] = {}
        for name in self.files.names:
            if match := _EXPERT.fullmatch(name):
                owner = name.rpartition(".experts.")[0]
                is_down = (match[1] or match[2]) in _DOWN
                sides.setdefault((owner, is_down), []).append(name)
        for names in sides.values():
            if not all(name in self.files.kept for name in names):
                for name in names:
                    found.pop(name, None)

    def _drop_alone(self, found: dict[str, _Sized], names: tuple[str, ...]) -> None:
        """Of the matrices `names` of a module, which form one product, take out those whose
        neighbours aren't kept."""
        for name in [name for name in found if name.split(".")[-2] in names]:
            owner = name.rsplit(".", 2)[0]
            beside = [f"{owner}.{other}.weight" for other in names]
            if all(other in self.files.names for other in beside) and not all(
                other in self.files.kept for other in beside
            ):
                del found[name]

    def _outside(self, tp_size: int, is_first: bool, is_last: bool) -> dict[str, _Sized]:
        """Embedding and head of our own models."""
        embedding, head, tied = EMBEDDING, HEAD, self.model.tie_word_embeddings
        if tied and not self._stored(HEAD):
            head = EMBEDDING
        elif tied and not self._stored(EMBEDDING):
            embedding = HEAD
        is_one = tied and is_first and is_last
        found: dict[str, _Sized] = {}
        if is_one and head != embedding:
            return found
        for name, form, is_here in (
            (embedding, PLAIN, is_first),
            (head, self.form, is_last and not is_one),
        ):
            stored = self._stored(name)
            kept = self.files.kept.get(stored)
            if kept is None or not is_here:
                continue
            rows = -(-kept.outputs // tp_size)
            plain = form.matrix_bytes(rows, kept.inputs, self.item)
            if is_one and self.form.has_own_head:
                plain += self.form.matrix_bytes(rows, kept.inputs, self.item)
            found[stored] = _Sized(int(rows * kept.inputs * kept.number_bytes), plain)
        return found

    def _stored(self, name: str) -> str:
        """The name that the files have for a weight outside the layers; "" if they lack it."""
        names = (name, name.removeprefix("model."))
        return next((found for found in names if found in self.files.names), "")
