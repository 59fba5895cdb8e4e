"""`LazyWeights`: a checkpoint's tensors under the names of a model of transformers, some at a time.

transformers' rules (renamings, experts merged into one tensor, packed projections) are matched with
the checkpoint's names alone; a tensor is then read and converted with the others of its group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from engine.errors import ConfigError
from engine.layers.float8_groups import Quantized
from engine.layers.weight_format import MatrixSlice
from engine.layers.weights import CheckpointSource, DummySource

Group = Any
"""A rule of transformers with what it is to be applied to."""


class LazyWeights:
    """The weights of `model`, which is built on `meta`; each is read when it is asked for."""

    def __init__(
        self, model: Any, source: CheckpointSource | DummySource, dtype: torch.dtype
    ) -> None:
        """`dtype`: what the model's weights are kept in, unless it wants some in float32."""
        self._model, self._source = model, source
        self._wanted: dict[str, Tensor] = model.state_dict()
        plan = model._get_dtype_plan(dtype)
        self._float32 = [re.compile(name.replace("*", ".*")) for name in plan]
        self._ignored = [re.compile(p) for p in model._keys_to_ignore_on_load_missing or ()]
        self._tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", {}))
        self._groups: dict[str, Group] = {}
        self._origins: dict[str, list[str]] = {}
        """The checkpoint's tensors that are what the model has, but for their names."""
        self._stacks: dict[str, dict[str, list[str]]] = {}
        """The checkpoint's tensors that rules merge to what the model has, by pattern."""
        self._done: dict[str, Tensor] = {}
        """Tensors whose group was read because of another one."""
        if isinstance(source, CheckpointSource):
            self._match(source.names())

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of these names, in the device and types of the model; those that it makes by
        itself are left out.

        Raises `ConfigError` if the checkpoint lacks one or has it in another shape.
        """
        waiting = []
        for name in names:
            if name in self._groups or self._is_dummy:
                yield name, self._take(name)
            else:
                waiting.append(name)
        for name in waiting:
            if name in self._done:
                yield name, self._take(name)
            elif not any(pattern.search(name) for pattern in self._ignored):
                raise ConfigError(
                    f"the checkpoint in {self._place} lacks the weight '{name}'; is config.json "
                    "the one that belongs to it?"
                )

    def quantized(self, name: str, dim: int, part: range) -> Quantized | None:
        """`part` along `dim` of the matrix `name` ("X.weight"), as the checkpoint has it quantized;
        then it counts as read. None: it is to be `read`."""
        origins = self._origins.get(name, ())
        if name not in self._groups or len(origins) != 1 or isinstance(self._source, DummySource):
            return None
        out_size, in_size = self._wanted[name].shape
        matrix = origins[0].removesuffix(".weight")
        piece = MatrixSlice(matrix, out_size, in_size, dim, part.start, len(part))
        found = self._source.format.part(self._source, piece)
        if found is not None:
            del self._groups[name]
        return found

    def quantized_expert(
        self, name: str, number: int, rows: Sequence[range], columns: range, *, is_transposed: bool
    ) -> list[Quantized] | None:
        """`rows` and `columns` of an expert's matrix [out, in], from top to bottom, as they are
        quantized in the checkpoint. The model has all experts' matrices as `name`, [experts, out,
        in], or [experts, in, out] if `is_transposed`. None: they are to be `read`."""
        source = self._source
        if name not in self._groups or isinstance(source, DummySource):
            return None
        _, *sizes = self._wanted[name].shape
        out_size, in_size = sizes[::-1] if is_transposed else sizes
        is_whole = columns == range(in_size)
        if not is_whole and list(rows) != [range(out_size)]:
            return None
        origins = self._origins.get(name, ())
        beside = list(origins[:1]) if len(origins) == 1 else self._merged(name, number)
        if not beside or out_size % len(beside) or (is_transposed and not origins):
            return None
        height = out_size // len(beside)
        found: list[Quantized] = []
        for part in rows:
            for place, origin in enumerate(beside):
                start = max(part.start - place * height, 0)
                stop = min(part.stop - place * height, height)
                if start >= stop:
                    continue
                along = (0, start, stop - start) if is_whole else (1, columns.start, len(columns))
                matrix = MatrixSlice(origin.removesuffix(".weight"), height, in_size, *along)
                groups: Quantized | None
                if origins:
                    groups = source.quantized_of(matrix, number, is_transposed=is_transposed)
                    if groups is None or not source.format.can_keep(groups):
                        return None
                else:
                    groups = source.format.part(source, matrix)
                    if groups is None:
                        return None
                found.append(groups)
        return found

    def drop(self, name: str) -> None:
        """Count `name` as read."""
        del self._groups[name]

    def tied_to(self, name: str) -> str | None:
        """The weight that `name` is read as, because the checkpoint lacks it and the two are one;
        None: `name` is read itself."""
        if name in self._groups or name in self._done:
            return None
        for target, origin in self._tied.items():
            other = origin if target == name else target if origin == name else None
            is_there = other in self._groups or other in self._done
            if other is not None and (is_there or (self._is_dummy and name == target)):
                return other
        return None

    @property
    def _place(self) -> str:
        return str(self._source.folder) if isinstance(self._source, CheckpointSource) else ""

    @property
    def _is_dummy(self) -> bool:
        return isinstance(self._source, DummySource)

    def _merged(self, name: str, number: int) -> list[str]:
        """The checkpoint's matrices that lie one below the other in an expert's part of `name`; []
        if it isn't made so."""
        rule, stacks = self._groups[name], self._stacks.get(name, {})
        if not isinstance(rule, WeightConverter) or list(rule.target_patterns)[1:]:
            return []
        lists = [stacks.get(pattern, []) for pattern in rule.source_patterns]
        merge, *rest = rule.operations
        is_merged = type(merge) is MergeModulelist and merge.dim == 0
        if len(lists) > 1:
            is_merged &= len(rest) == 1 and type(rest[0]) is Concatenate and rest[0].dim == 1
        else:
            is_merged &= not rest
        count = len(self._wanted[name])
        if not is_merged or any(len(names) != count for names in lists):
            return []
        found = [names[number] for names in lists]
        return found if all(origin.endswith(".weight") for origin in found) else []

    def _match(self, names: Iterable[str]) -> None:
        """Put the checkpoint's tensors into groups, as transformers' own loading does."""
        rules = get_model_conversion_mapping(self._model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        prefix, wanted = self._model.base_model_prefix, self._wanted
        for name in sorted(names, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
            if target not in wanted and name in wanted:
                target, pattern = rename_source_key(name, [], [], prefix, wanted)
            if target not in wanted:
                continue
            rule = WeightRenaming(name, target) if pattern is None else by_pattern[pattern]
            if pattern is None:
                self._origins.setdefault(target, []).append(name)
            else:
                self._stacks.setdefault(target, {}).setdefault(pattern, []).append(name)
            group = self._groups.setdefault(target, deepcopy(rule))
            group.add_tensor(target, name, pattern or name, partial(self._read, name, target))

    def _read(self, name: str, target: str) -> Tensor:
        assert isinstance(self._source, CheckpointSource)
        return self._source.read(name).to(self._dtype(target))

    def _dtype(self, target: str) -> torch.dtype:
        if any(pattern.search(target) for pattern in self._float32):
            return torch.float32
        return self._wanted[target].dtype

    def _take(self, name: str) -> Tensor:
        """The tensor; its group is read if it wasn't yet."""
        wanted = tuple(self._wanted[name].shape)
        if isinstance(self._source, DummySource):
            made = self._source.get(name, wanted or (1,)).view(wanted)
            return made.to(self._dtype(name))
        group = self._groups.pop(name, None)
        if group is not None:
            try:
                made = group.convert(name, model=self._model, config=self._model.config)
            except (RuntimeError, ValueError, LookupError) as error:
                raise ConfigError(
                    f"'{name}' can't be made of the weights in {self._place}: {error}"
                ) from error
            for target, value in made.items():
                self._done[target] = value[0] if isinstance(value, list) else value
        if name not in self._done:
            raise ConfigError(
                f"transformers' rules make no weight '{name}' of the checkpoint in {self._place}."
            )
        found = self._done.pop(name)
        if tuple(found.shape) != wanted:
            raise ConfigError(
                f"the weight '{name}' in {self._place} has shape {list(found.shape)}, but "
                f"config.json asks for {list(wanted)}."
            )
        return found
