"""What adapters add to a linear: each way to compute it, shares of ranks, and rows of a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from engine.device.adapter_rows import AdapterRows
from engine.errors import ConfigError
from engine.layers import slotted_adapters
from engine.layers.adapted import (
    AdaptedLinears,
    Adapters,
    Factors,
    NativeAdapters,
    Projection,
    StepAdapters,
    TorchAdapters,
)
from engine.layers.linear_kernel import DenseKernel, LinearKernel
from engine.layers.slotted_adapters import SlottedAdapters
from tests.support.kernels import load_kernels

IN, SIZES, SLOTS = 12, (6, 4), 3
CPU = torch.device("cpu")
WAYS: dict[str, Callable[[], Adapters]] = {
    "native": lambda: NativeAdapters(IN, SIZES, SLOTS),
    "torch": lambda: TorchAdapters(IN, SIZES, SLOTS),
    "slots": lambda: SlottedAdapters(IN, SIZES, SLOTS, 8, torch.empty(0), by_triton=False),
}


@pytest.fixture(autouse=True)
def kernels() -> None:
    load_kernels()


def factors(rank: int, size: int, seed: int) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rank, IN), generator=generator), torch.randn(
        (rank, size), generator=generator
    )


@pytest.mark.parametrize("way", [*WAYS, "slots, adapter by adapter"])
def test_each_way_adds_the_same(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "," in way:
        monkeypatch.setattr(slotted_adapters, "MAX_BY_ROW", 0)
    adapters = WAYS[way.partition(",")[0]]()
    own = {
        0: [factors(3, 6, 1), None],
        1: [factors(8, 6, 2), factors(2, 4, 3)],
        2: [None, None],
    }
    adapters.set(1, own[0])  # replaced below
    for slot, parts in own.items():
        adapters.set(slot, parts)
    host = np.array([1, -1, 0, 2, 1, 1, -1], np.int32)
    x = torch.randn(len(host), IN)
    y = torch.randn(len(host), sum(SIZES))
    wanted = y.clone()
    for row, slot in enumerate(host.tolist()):
        start = 0
        for size, part in zip(SIZES, own.get(slot, []), strict=False):
            if part is not None:
                wanted[row, start : start + size] += x[row] @ part[0].t() @ part[1]
            start += size
    adapters.add(y, x, AdapterRows.of(host, CPU))
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)


def test_shares_of_ranks() -> None:
    """Outputs that ranks divide, and inputs: their sum is the whole."""
    a, b = torch.randn(4, 12), torch.randn(10, 4)
    x = torch.randn(3, 12)
    whole = x @ a.t() @ b.t()
    outputs = [(range(0, 3), range(6, 8)), (range(3, 6), range(8, 10))]
    for ranges in outputs:
        part = Projection("p", 10, 12, 0, ranges)
        own_a, own_b = part.own(a, b)
        rows = [row for span in ranges for row in span]
        assert (part.local_out, part.local_in) == (5, 12)
        torch.testing.assert_close(x @ own_a.t() @ own_b.t(), whole[:, rows])
    total = torch.zeros_like(whole)
    for span in (range(0, 5), range(5, 12)):
        part = Projection("p", 10, 12, 1, (span,))
        own_a, own_b = part.own(a, b)
        assert (part.local_out, part.local_in) == (10, len(span))
        total += x[:, span.start : span.stop] @ own_a.t() @ own_b.t()
    torch.testing.assert_close(total, whole)


def test_rows_of_a_step() -> None:
    step = StepAdapters()
    assert not step.is_active
    rows = AdapterRows.of(np.array([0, 0, -1, 2], np.int32), CPU)
    last = rows.take(np.array([1, 3]))
    step.begin(rows, last)
    assert step.is_active
    assert step.of_rows(4) is rows
    assert step.of_rows(2).host.tolist() == [0, 2]
    with pytest.raises(ValueError, match="3 rows"):
        step.of_rows(3)
    assert [(slot, at.tolist()) for slot, at in rows.groups] == [(0, [0, 1]), (2, [3])]
    assert rows.part(slice(2, 4)).slots.tolist() == [-1, 2]
    step.begin(None)
    assert not step.is_active


class Owner:
    def __init__(self) -> None:
        self.kernel: LinearKernel = DenseKernel(torch.ones(2, 3), None)


def test_linears_that_a_step_does_not_call_once_are_given_up() -> None:
    linears = AdaptedLinears(2, TorchAdapters)
    owners = {name: Owner() for name in ("called", "twice", "never", "other_rows")}
    for name, owner in owners.items():
        linears.adapt(owner, [Projection(name, 2, 3, 0, (range(2),))])

    def run() -> None:
        owners["called"].kernel(torch.ones(5, 3))
        owners["other_rows"].kernel(torch.ones(4, 3))
        for _ in range(2):
            owners["twice"].kernel(torch.ones(5, 3))

    linears.keep_those_called(run, 5)
    assert list(linears.projections) == ["called"]
    assert isinstance(owners["twice"].kernel, DenseKernel)
    linears.check("called", 3, 2)
    for name, sizes, says in (("never", (3, 2), "no linear"), ("called", (2, 3), "inputs")):
        with pytest.raises(ConfigError, match=says):
            linears.check(name, *sizes)


def test_an_adapter_that_adds_nothing_is_computed() -> None:
    slotted = partial(SlottedAdapters, max_rank=8, like=torch.empty(0), by_triton=False)
    for make in (slotted, TorchAdapters, NativeAdapters):
        linears, owner = AdaptedLinears(2, make), Owner()
        linears.adapt(owner, [Projection("p", 2, 3, 0, (range(2),))])
        linears.fill(0, 8)
        linears.step.begin(linears.rows(np.zeros(5, np.int32), CPU))
        assert torch.equal(owner.kernel(torch.ones(5, 3)), torch.full((5, 2), 3.0))


def test_decodes_of_as_many_rows_have_the_same_memory() -> None:
    """Recorded calls read it again."""
    linears = AdaptedLinears(2, NativeAdapters)
    make = partial(linears.rows, device=CPU)
    first = make(np.array([0, 1], np.int32))
    second = make(np.array([-1, 0], np.int32))
    assert first.slots.data_ptr() == second.slots.data_ptr()
    assert second.slots.tolist() == [-1, 0]
    large = [make(np.zeros(40, np.int32)) for _ in range(2)]
    assert large[0].slots.data_ptr() != large[1].slots.data_ptr()
