"""Linears with adapters (LoRA, Hu et al. 2021): each row of a step may have another one.

    y = x W^T + x A^T B    with the A [rank, in] and B [rank, out] of the row's adapter

A step's rows are in one product with W; what adapters add is computed for the rows of each (Punica,
Chen et al. 2023). Steps without adapters don't notice that there are any.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.device.adapter_rows import AdapterRows
from engine.errors import ConfigError
from engine.layers.linear_kernel import LinearKernel
from engine.native.library import require_kernels
from engine.protocol.step import IntArray


@dataclass(frozen=True)
class Projection:
    """A matrix of the model as an adapter names it, and what this rank has of it."""

    name: str
    out_size: int
    in_size: int
    dim: int
    """What is divided among ranks: 0 outputs, 1 inputs."""
    ranges: tuple[range, ...]
    """What of that this rank has."""

    @property
    def local_out(self) -> int:
        """Outputs that this rank computes."""
        return sum(map(len, self.ranges)) if self.dim == 0 else self.out_size

    @property
    def local_in(self) -> int:
        """Inputs that this rank has."""
        return sum(map(len, self.ranges)) if self.dim == 1 else self.in_size

    def own(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Of A [..., rank, in] and B [..., out, rank] what this rank multiplies by: [..., rank,
        local_in] and [..., local_out, rank]."""
        if self.dim == 1:
            return torch.cat([a[..., part.start : part.stop] for part in self.ranges], -1), b
        return a, torch.cat([b[..., part.start : part.stop, :] for part in self.ranges], -2)

    def nothing(self, rank: int) -> Factors:
        """Matrices of this rank that add nothing."""
        return torch.zeros(rank, self.local_in), torch.zeros(rank, self.local_out)


MAX_RECORDED = 32
"""Lines of a decode that may be recorded, at most."""
Factors = tuple[Tensor, Tensor]
"""A [rank, local_in] and scaled, transposed B [rank, local_out] of a projection."""


class StepAdapters:
    """Which rows of the step that runs have which adapter: slots, -1 for none."""

    def __init__(self) -> None:
        self._rows: dict[int, AdapterRows] = {}

    @property
    def is_active(self) -> bool:
        """Whether a row of the step has an adapter."""
        return bool(self._rows)

    def begin(self, rows: AdapterRows | None, sampled: AdapterRows | None = None) -> None:
        """A step comes with its T tokens' adapters; None: no token has one. `sampled`: those of the
        N tokens that a last layer may compute alone, if these are fewer than T."""
        self._rows = {} if rows is None else {len(rows): rows}
        if rows is not None and sampled is not None:
            self._rows[len(sampled)] = sampled

    def of_rows(self, count: int) -> AdapterRows:
        """The adapters of what a linear is given."""
        found = self._rows.get(count)
        if found is None:
            raise ValueError(f"a linear was given {count} rows, and the step has {[*self._rows]}")
        return found


class Adapters(ABC):
    """The matrices of one linear's adapters, by slot."""

    @abstractmethod
    def set(self, slot: int, parts: Sequence[Factors | None]) -> None:
        """Put an adapter into a slot: what it has of each projection."""

    @abstractmethod
    def add(self, y: Tensor, x: Tensor, rows: AdapterRows) -> None:
        """Add to y [N, out], in place, what the adapters of the rows make of x [N, in]."""


class NativeAdapters(Adapters):
    """By our kernels on CPU (`engine/csrc/adapters.h`). A row's result is the same in any batch."""

    def __init__(self, in_size: int, sizes: Sequence[int], num_slots: int) -> None:
        self._kernels: Any = require_kernels()
        self._weights = self._kernels.AdapterWeights(in_size, list(sizes), num_slots)

    def set(self, slot: int, parts: Sequence[Factors | None]) -> None:
        first, second = ([None if part is None else part[i] for part in parts] for i in (0, 1))
        self._weights.set(slot, first, second)

    def add(self, y: Tensor, x: Tensor, rows: AdapterRows) -> None:
        self._kernels.adapt_(y, x, rows.slots, self._weights)


class TorchAdapters(Adapters):
    """By torch's operators, one adapter after the other; on any device."""

    def __init__(self, in_size: int, sizes: Sequence[int], num_slots: int) -> None:
        self._sizes = tuple(sizes)
        self._parts: list[Sequence[Factors | None]] = [()] * num_slots

    def set(self, slot: int, parts: Sequence[Factors | None]) -> None:
        self._parts[slot] = tuple(parts)

    def add(self, y: Tensor, x: Tensor, rows: AdapterRows) -> None:
        for slot, mine in rows.groups:
            parts, start = self._parts[slot], 0
            if not any(part is not None for part in parts):
                continue
            given = x.index_select(0, mine)
            for size, part in zip(self._sizes, parts, strict=True):
                if part is not None:
                    a, b = part
                    more = (given @ a.t()) @ b
                    y.narrow(1, start, size).index_add_(0, mine, more.to(y.dtype))
                start += size


class HasKernel(Protocol):
    """A linear of the model."""

    kernel: LinearKernel


class Adapted(Protocol):
    """What of a model may have adapters."""

    projections: Sequence[Projection]
    rows_seen: list[int] | None
    """Rows of each call, while somebody watches."""

    def set(self, slot: int, factors: Mapping[str, Factors]) -> None:
        """Put into a slot what an adapter has, by name, of the projections."""

    def remove(self) -> None:
        """Let the model be as it was."""


class AdaptedKernel(LinearKernel):
    """A linear's kernel, and what the adapters of a step's rows add to it."""

    def __init__(
        self,
        linear: HasKernel,
        projections: Sequence[Projection],
        step: StepAdapters,
        adapters: Adapters,
    ) -> None:
        """It becomes the kernel of `linear`."""
        self._linear, self.kernel = linear, linear.kernel
        linear.kernel = self
        self.projections: Sequence[Projection] = tuple(projections)
        self._step, self._adapters = step, adapters
        self.rows_seen: list[int] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        y = self.kernel(x)
        if self.rows_seen is not None:
            self.rows_seen.append(len(x))
        if self._step.is_active and len(x):
            self._adapters.add(y, x, self._step.of_rows(len(x)))
        return y

    def set(self, slot: int, factors: Mapping[str, Factors]) -> None:
        self._adapters.set(slot, [factors.get(part.name) for part in self.projections])

    def remove(self) -> None:
        self._linear.kernel = self.kernel


MakeAdapters = Callable[[int, Sequence[int], int], Adapters]


@dataclass(frozen=True)
class ExpertProjection(Projection):
    """A parameter of a mixture, which has a matrix of each expert."""

    mixture: str
    """The module's name."""
    num_experts: int
    experts: tuple[int, ...]
    """Those that this rank has."""
    gate: tuple[slice, slice] | None = None
    """Which outputs are the gate's, and which are what it is multiplied with; None: no gate's."""

    def own(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        mine = torch.tensor(self.experts)
        return super().own(a[mine], b[mine])

    def nothing(self, rank: int) -> Factors:
        a, b = super().nothing(rank)
        return a.expand(len(self.experts), -1, -1), b.expand(len(self.experts), -1, -1)


class HasAdapters(Protocol):
    """The experts of a mixture."""

    adapters: ExpertAdapters | None


class ExpertAdapters:
    """The adapters of a mixture's experts. To its matrices each expert of each slot is a slot."""

    def __init__(
        self,
        owner: HasAdapters,
        up: ExpertProjection,
        down: ExpertProjection,
        step: StepAdapters,
        make: MakeAdapters,
        num_slots: int,
    ) -> None:
        """They become the adapters of `owner`."""
        self._owner, self.step = owner, step
        owner.adapters = self
        self.projections: Sequence[Projection] = (up, down)
        self._count = len(up.experts)
        self.up, self.down = (
            make(part.local_in, [part.local_out], num_slots * self._count) for part in (up, down)
        )
        self._filled: set[int] = set()
        self.rows_seen: list[int] | None = None

    def set(self, slot: int, factors: Mapping[str, Factors]) -> None:
        """Each is A [experts, rank, in] and B [experts, rank, out] of those of this rank."""
        given = [factors.get(part.name) for part in self.projections]
        is_changed = any(part is not None for part in given)
        if not is_changed and slot not in self._filled:
            return
        for matrices, part in zip((self.up, self.down), given, strict=True):
            for number in range(self._count):
                own = None if part is None else (part[0][number], part[1][number])
                matrices.set(slot * self._count + number, [own])
        (self._filled.add if is_changed else self._filled.discard)(slot)

    def remove(self) -> None:
        self._owner.adapters = None

    def rows_of(self, num_rows: int) -> AdapterRows | None:
        """The adapters of the rows that the mixture is called with; None: the step has none. Every
        call asks once."""
        if self.rows_seen is not None:
            self.rows_seen.append(num_rows)
        return self.step.of_rows(num_rows) if self.step.is_active else None

    def changed_rows(self, num_rows: int) -> Tensor | None:
        """bool [num_rows]: which rows' adapters change this mixture; None: none does. On CPU."""
        rows = self.rows_of(num_rows)
        if rows is None or not rows.changes_experts:
            return None
        found = torch.from_numpy(np.isin(rows.host, [*self._filled]))
        return found if bool(found.any()) else None

    def of_experts(self, slots: Tensor, experts: Tensor) -> AdapterRows:
        """Rows of experts [n], numbered among those of this rank, for tokens with `slots` int32
        [n]. A number that is none of the rank's has no adapter."""
        is_none = (slots < 0) | (experts < 0) | (experts >= self._count)
        found = (slots * self._count + experts).masked_fill(is_none, -1).int()
        if found.device.type == "cpu":
            return AdapterRows(found.numpy(), found)
        # The host doesn't know them.
        return AdapterRows(np.zeros(0, np.int32), found, is_captured=True)


class AdaptedLinears:
    """The linears of a model's stage that may have adapters, and its mixtures' experts."""

    def __init__(
        self,
        num_slots: int,
        make: MakeAdapters,
        *,
        max_rank: int | None = None,
        takes_experts: bool = True,
    ) -> None:
        """`make` is given a linear's input size, the sizes of its outputs, and a number of slots.
        `max_rank`: what a slot has room for; None: any. `takes_experts`: whether mixtures may have
        adapters."""
        self.num_slots, self.max_rank = num_slots, max_rank
        self.takes_experts = takes_experts
        self.step = StepAdapters()
        self._make = make
        self._adapted: list[Adapted] = []
        self._rows: dict[int, Tensor] = {}
        self._with_experts: set[int] = set()
        """Slots whose adapter changes experts."""
        self.projections: dict[str, Projection] = {}
        """By the name of the linear, or of a mixture's parameter."""

    def adapt(self, linear: HasKernel, projections: Sequence[Projection]) -> None:
        """Let `linear`, which computes `projections` side by side, have adapters."""
        sizes = [part.local_out for part in projections]
        adapters = self._make(projections[0].local_in, sizes, self.num_slots)
        self.add(AdaptedKernel(linear, projections, self.step, adapters))

    def adapt_experts(
        self, owner: HasAdapters, up: ExpertProjection, down: ExpertProjection
    ) -> None:
        """Let the experts of `owner`, which this rank has, have adapters."""
        self.add(ExpertAdapters(owner, up, down, self.step, self._make, self.num_slots))

    def add(self, adapted: Adapted) -> None:
        """Let `adapted` have adapters."""
        self._adapted.append(adapted)
        self.projections |= {part.name: part for part in adapted.projections}

    def keep_those_called(self, run: Callable[[], object], num_rows: int) -> None:
        """Give those linears up that `run`, a step of `num_rows` tokens, doesn't call once with all
        of them."""
        for one in self._adapted:
            one.rows_seen = []
        run()
        kept = []
        for one in self._adapted:
            if one.rows_seen == [num_rows]:
                kept.append(one)
                one.rows_seen = None
                continue
            one.remove()
            for part in one.projections:
                del self.projections[part.name]
        self._adapted = kept

    def set(self, slot: int, factors: Mapping[str, Factors]) -> None:
        """Put an adapter into a slot of all linears."""
        for one in self._adapted:
            one.set(slot, factors)
        self._with_experts.discard(slot)
        if any(isinstance(self.projections[name], ExpertProjection) for name in factors):
            self._with_experts.add(slot)

    def fill(self, slot: int, rank: int) -> None:
        """Put an adapter into a slot that changes all linears and adds nothing."""
        self.set(slot, {name: part.nothing(rank) for name, part in self.projections.items()})

    def rows(self, slots: IntArray, device: torch.device) -> AdapterRows:
        """Of slots int32 [T]. On CPU all steps of as many tokens have the same memory, as recorded
        decodes need."""
        if device.type != "cpu" or len(slots) > MAX_RECORDED:
            found = AdapterRows.of(slots, device)
        else:
            own = self._rows.setdefault(len(slots), torch.empty(len(slots), dtype=torch.int32))
            found = AdapterRows(slots, own.copy_(torch.from_numpy(slots)))
        if self._with_experts:
            found.changes_experts = not self._with_experts.isdisjoint(slots.tolist())
        return found

    def check(self, name: str, in_size: int, out_size: int) -> None:
        """Raise `ConfigError` if an adapter can't have matrices of these sizes for `name`."""
        part = self.projections.get(name)
        if part is None:
            raise ConfigError(f"the model has no linear '{name}' that adapters may change.")
        check_sizes(name, (part.in_size, part.out_size), (in_size, out_size))


def check_sizes(name: str, wanted: tuple[int, int], given: tuple[int, int]) -> None:
    """Raise `ConfigError` if matrices for `given` inputs and outputs are no addition to those of
    `name`, which has the `wanted` ones."""
    if wanted != given:
        raise ConfigError(
            f"'{name}' has {wanted[0]} inputs and {wanted[1]} outputs, and the matrices of the "
            f"adapter have {given[0]} and {given[1]}."
        )
