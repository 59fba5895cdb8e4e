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
        """Of A [rank, in] and B [out, rank] what this rank multiplies by: [rank, local_in] and
        [local_out, rank]."""
        if self.dim == 1:
            return torch.cat([a[:, part.start : part.stop] for part in self.ranges], 1), b
        return a, torch.cat([b[part.start : part.stop] for part in self.ranges])


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


class AdaptedKernel(LinearKernel):
    """A linear's kernel, and what the adapters of a step's rows add to it."""

    def __init__(
        self,
        kernel: LinearKernel,
        projections: Sequence[Projection],
        step: StepAdapters,
        adapters: Adapters,
    ) -> None:
        self.kernel, self.projections = kernel, tuple(projections)
        self._step, self._adapters = step, adapters
        self.rows_seen: list[int] | None = None
        """Rows of each call, while somebody watches."""

    def __call__(self, x: Tensor) -> Tensor:
        y = self.kernel(x)
        if self.rows_seen is not None:
            self.rows_seen.append(len(x))
        if self._step.is_active and len(x):
            self._adapters.add(y, x, self._step.of_rows(len(x)))
        return y

    def set(self, slot: int, factors: Mapping[str, Factors]) -> None:
        """Put into a slot what an adapter has, by name, of the linear's projections."""
        self._adapters.set(slot, [factors.get(part.name) for part in self.projections])


MakeAdapters = Callable[[int, Sequence[int], int], Adapters]


class AdaptedLinears:
    """The linears of a model's stage that may have adapters."""

    def __init__(self, num_slots: int, make: MakeAdapters) -> None:
        """`make` is given a linear's input size, the sizes of its outputs, and `num_slots`."""
        self.num_slots = num_slots
        self.step = StepAdapters()
        self._make = make
        self._kernels: list[tuple[HasKernel, AdaptedKernel]] = []
        self._rows: dict[int, Tensor] = {}
        self.projections: dict[str, Projection] = {}
        """By the name of the linear."""

    def adapt(self, linear: HasKernel, projections: Sequence[Projection]) -> None:
        """Let `linear`, which computes `projections` side by side, have adapters."""
        sizes = [part.local_out for part in projections]
        adapters = self._make(projections[0].local_in, sizes, self.num_slots)
        linear.kernel = AdaptedKernel(linear.kernel, projections, self.step, adapters)
        self._kernels.append((linear, linear.kernel))
        self.projections |= {part.name: part for part in projections}

    def keep_those_called(self, run: Callable[[], object], num_rows: int) -> None:
        """Give those linears up that `run`, a step of `num_rows` tokens, doesn't call once with all
        of them."""
        for _, kernel in self._kernels:
            kernel.rows_seen = []
        run()
        kept = []
        for linear, kernel in self._kernels:
            if kernel.rows_seen == [num_rows]:
                kept.append((linear, kernel))
                kernel.rows_seen = None
                continue
            linear.kernel = kernel.kernel
            for part in kernel.projections:
                del self.projections[part.name]
        self._kernels = kept

    def set(self, slot: int, factors: Mapping[str, Factors]) -> None:
        """Put an adapter into a slot of all linears."""
        for _, kernel in self._kernels:
            kernel.set(slot, factors)

    def fill(self, slot: int, rank: int) -> None:
        """Put an adapter into a slot that changes all linears and adds nothing."""
        parts = self.projections.items()
        self.set(
            slot,
            {n: (torch.zeros(rank, p.local_in), torch.zeros(rank, p.local_out)) for n, p in parts},
        )

    def rows(self, slots: IntArray, device: torch.device) -> AdapterRows:
        """Of slots int32 [T]. On CPU all steps of as many tokens have the same memory, as recorded
        decodes need."""
        if device.type != "cpu" or len(slots) > MAX_RECORDED:
            return AdapterRows.of(slots, device)
        own = self._rows.setdefault(len(slots), torch.empty(len(slots), dtype=torch.int32))
        return AdapterRows(slots, own.copy_(torch.from_numpy(slots)))

    def check(self, name: str, in_size: int, out_size: int) -> None:
        """Raise `ConfigError` if an adapter can't have matrices of these sizes for `name`."""
        part = self.projections.get(name)
        if part is None:
            raise ConfigError(f"the model has no linear '{name}' that adapters may change.")
        if (part.in_size, part.out_size) != (in_size, out_size):
            raise ConfigError(
                f"'{name}' has {part.in_size} inputs and {part.out_size} outputs, and the matrices "
                f"of the adapter have {in_size} and {out_size}."
            )
