"""The FlashInfer attention backend over the fake package, beside the torch backend."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention import flashinfer_backend
from engine.attention.base import AttentionBackend, AttentionInputs, AttentionLayer
from engine.attention.flashinfer_backend import FlashInferAttentionBackend
from engine.attention.forward_batch import ForwardBatch
from engine.attention.kv_pool import MHATokenToKVPool
from engine.attention.plan_ring import PlanRing
from engine.attention.torch_backend import TorchCpuAttentionBackend
from engine.checkpoint.layout import AttentionCall
from engine.errors import ConfigError
from engine.protocol.step import ModelWorkerBatch
from engine.registry import ATTENTION_BACKENDS
from engine.worker.gpu_kernels import auto_kernels
from tests.support.fake_flashinfer import Device, install

CPU = torch.device("cpu")
NUM_SLOTS = 1024
MAX_ROWS = 6
MAX_LEN = 192


@pytest.fixture(autouse=True)
def small_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(flashinfer_backend, "FLOAT_WORKSPACE_BYTES", 1024)
    monkeypatch.setattr(flashinfer_backend, "INT_WORKSPACE_BYTES", 4096)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return install(monkeypatch)


@dataclass
class Sequence:
    """A request's row and its slots so far."""

    row: int
    slots: list[int]


class Pair:
    """Both backends over pools and tables of their own that hold the same."""

    def __init__(
        self,
        *,
        page_size: int = 16,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 8,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.shape = (heads, kv_heads, dim)
        self.dtype = dtype
        self.page_size = page_size
        sizes = heads, kv_heads, dim, dim
        self.layers = (
            AttentionLayer(0, AttentionCall(*sizes, dim**-0.5)),
            AttentionLayer(1, AttentionCall(*sizes, 0.3, window)),
            AttentionLayer(2, AttentionCall(*sizes, dim**-0.5, window)),
        )
        calls = [layer.call for layer in self.layers]
        self.table = torch.zeros(MAX_ROWS + 1, MAX_LEN + page_size, dtype=torch.int32)
        self.inputs = [
            AttentionInputs(
                MHATokenToKVPool(NUM_SLOTS, page_size, calls, kv_dtype or dtype, CPU),
                self.table,
                self.layers,
                dtype,
            )
            for _ in range(2)
        ]
        self.torch: AttentionBackend = TorchCpuAttentionBackend(self.inputs[0])
        self.flashinfer = FlashInferAttentionBackend(self.inputs[1])
        pages = list(range(1, NUM_SLOTS // page_size))
        self.random.shuffle(pages)
        self.free_pages = pages
        self.free_rows = list(range(MAX_ROWS))
        self.tolerance = 2e-5 if dtype == torch.float32 else 2e-2

    def start(self) -> Sequence:
        return Sequence(self.free_rows.pop(0), [])

    def finish(self, sequence: Sequence) -> None:
        self.free_rows.append(sequence.row)
        self.free_pages.extend(slot // self.page_size for slot in sequence.slots[:: self.page_size])

    def batch(self, extends: list[tuple[Sequence, int]], decodes: list[Sequence]) -> ForwardBatch:
        rows = [*extends, *((sequence, 1) for sequence in decodes)]
        locs: list[int] = []
        for sequence, count in rows:
            for _ in range(count):
                if len(sequence.slots) % self.page_size == 0:
                    first = self.free_pages.pop(0) * self.page_size
                else:
                    first = sequence.slots[-1] + 1
                self.table[sequence.row, len(sequence.slots)] = first
                sequence.slots.append(first)
                locs.append(first)
        return _batch(
            [(sequence.row, len(sequence.slots)) for sequence, _ in rows],
            [count for _, count in extends],
            locs,
        )

    def qkv(self, total: int) -> tuple[Tensor, ...]:
        """Views with gaps, as the model makes them."""
        heads, kv_heads, dim = self.shape
        qkv = torch.randn(total, heads + 2 * kv_heads, dim).to(self.dtype)
        return qkv.split([heads, kv_heads, kv_heads], dim=1)

    def step(
        self, extends: list[tuple[Sequence, int]], decodes: list[Sequence], *, graph: bool = False
    ) -> None:
        batch = self.batch(extends, decodes)
        self.torch.init_forward(batch)
        if graph:
            self.flashinfer.plan_graph(batch)
        else:
            self.flashinfer.init_forward(batch)
        for layer in self.layers:
            q, k, v = self.qkv(batch.num_tokens)
            wanted = self.torch.forward(q, k, v, layer, batch)
            found = self.flashinfer.forward(q, k, v, layer, batch)
            assert found.shape == wanted.shape
            torch.testing.assert_close(found, wanted, atol=self.tolerance, rtol=self.tolerance)


def _batch(rows: list[tuple[int, int]], extend_lens: list[int], locs: list[int]) -> ForwardBatch:
    """`rows`: (row, tokens in the cache after the step)."""
    ints = lambda values: np.array(list(values), dtype=np.int32)  # noqa: E731
    return ForwardBatch.from_worker_batch(
        ModelWorkerBatch(
            step=0,
            micro_batch=0,
            req_pool_indices=ints(row for row, _ in rows),
            query_lens=ints(extend_lens + [1] * (len(rows) - len(extend_lens))),
            num_sampled=ints([0] * len(rows)),
            seq_lens=ints(length for _, length in rows),
            input_ids=ints([0] * len(locs)),
            out_cache_loc=ints(locs),
            prefix_rows=ints([]),
            prefix_lens=ints([]),
            prefix_locs=ints([]),
            new_rows=[],
        ),
        CPU,
    )


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**16),
    page_size=st.sampled_from([1, 4, 16]),
    shape=st.sampled_from([(4, 2, 8), (8, 1, 16), (2, 2, 4)]),
    window=st.sampled_from([None, 1, 5, 16, 33]),
    kv_dtype=st.sampled_from([torch.float32, torch.float8_e4m3fn]),
)
def test_random_histories(
    seed: int,
    page_size: int,
    shape: tuple[int, int, int],
    window: int | None,
    kv_dtype: torch.dtype,
) -> None:
    """Prefill, chunks, decode and mixed steps of requests that come and go."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        device = install(monkeypatch)
        heads, kv_heads, dim = shape
        pair = Pair(
            page_size=page_size,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            window=window,
            kv_dtype=kv_dtype,
            seed=seed,
        )
        running: list[Sequence] = []
        for _ in range(10):
            if running and pair.random.random() < 0.2:
                pair.finish(running.pop(pair.random.randrange(len(running))))
            extends = []
            while len(running) + len(extends) < MAX_ROWS and pair.random.random() < 0.4:
                extends.append((pair.start(), pair.random.randint(1, 60)))
            decodes = []
            for sequence in running:
                kind = pair.random.random()
                if len(sequence.slots) > MAX_LEN - 40:
                    continue
                if kind < 0.2:
                    extends.append((sequence, pair.random.randint(1, 30)))
                elif kind < 0.9:
                    decodes.append(sequence)
            if extends or decodes:
                pair.step(extends, decodes)
            running.extend(sequence for sequence, _ in extends if sequence not in running)
        assert device.fast_plans == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(device: Device, dtype: torch.dtype) -> None:
    pair = Pair(dtype=dtype, window=7)
    first, second = pair.start(), pair.start()
    pair.step([(first, 20), (second, 3)], [])
    pair.step([], [first, second])


def test_plans_are_made_once_per_kind_and_variant(device: Device) -> None:
    """Three layers, three variants (window, scale); two of them share a window."""
    pair = Pair(window=5)
    first, second = pair.start(), pair.start()
    pair.step([(first, 9)], [])
    assert device.plans == 3
    pair.step([(second, 9)], [first])
    assert device.plans == 3 + 6


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_captured_decodes(
    device: Device, page_size: int, window: int | None, kv_dtype: torch.dtype
) -> None:
    """Graphs of several sizes and eager steps in turn; replans use the short way."""
    pair = Pair(page_size=page_size, window=window, kv_dtype=kv_dtype)
    variants = len({(layer.call.window, layer.call.scale) for layer in pair.layers})
    pair.flashinfer.init_graphs([1, 2, 4])
    rows = [pair.start() for _ in range(4)]
    pair.step([(row, 5 + 13 * i) for i, row in enumerate(rows)], [])
    before = device.plans
    for size in (4, 2, 1, 2, 4, 4):
        pair.step([], rows[:size], graph=True)
    assert device.plans == before + 3 * variants
    assert device.fast_plans == 3 * variants
    pair.step([(pair.start(), 3)], rows)
    pair.step([], rows[:2], graph=True)
    with pytest.raises(ValueError, match="3 decodes"):
        pair.step([], rows[:3], graph=True)


def test_graphs_keep_their_addresses(device: Device) -> None:
    """What a captured launch took along must be what later plans fill."""
    pair = Pair(window=5)
    pair.flashinfer.init_graphs([2])
    rows = [pair.start(), pair.start()]
    pair.step([(row, 30) for row in rows], [])
    addresses = []
    for _ in range(3):
        pair.step([], rows, graph=True)
        addresses.append(
            [
                buffer.data_ptr()
                for graph in pair.flashinfer.graph_plans.values()
                for buffer in (
                    graph.wrappers[2]._paged_kv_indptr_buf,
                    graph.wrappers[2]._paged_kv_indices_buf,
                    graph.wrappers[2]._paged_kv_last_page_len_buf,
                    graph.wrappers[2]._int_workspace_buffer,
                )
            ]
        )
    assert addresses[0] == addresses[1] == addresses[2]


def test_padding_rows(device: Device) -> None:
    """Rows that fill up a graph: a spare row of the table, one token in the padding page."""
    pair = Pair()
    pair.flashinfer.init_graphs([4])
    row = pair.start()
    pair.step([(row, 40)], [])
    alone = pair.batch([], [row])
    spare = (MAX_ROWS, 1)
    padded = _batch([(row.row, len(row.slots)), spare, spare, spare], [], [row.slots[-1], 0, 0, 0])
    q, k, v = pair.qkv(4)
    pair.torch.init_forward(alone)
    pair.flashinfer.plan_graph(padded)
    for layer in pair.layers:
        wanted = pair.torch.forward(q[:1], k[:1], v[:1], layer, alone)
        found = pair.flashinfer.forward(q, k, v, layer, padded)
        torch.testing.assert_close(found[:1], wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("depth", [None, 1])
def test_plans_of_steps_in_flight(device: Device, depth: int | None) -> None:
    """Steps are planned and launched while the device still has all of them before it.

    With a single pinned buffer (and nothing to wait for) later plans overwrite earlier ones.
    """
    pair = Pair(window=9)
    if depth is not None:
        pair.flashinfer.plan_ring = PlanRing(depth, 4096, CPU)
    rows = [pair.start(), pair.start()]
    pair.step([(rows[0], 20), (rows[1], 7)], [])
    outputs: list[tuple[Tensor, Tensor]] = []

    def steps() -> None:
        with device.deferred():
            for new in (pair.start(), None, None):
                batch = pair.batch([(new, 5)] if new else [], rows)
                pair.torch.init_forward(batch)
                pair.flashinfer.init_forward(batch)
                for layer in pair.layers:
                    q, k, v = pair.qkv(batch.num_tokens)
                    wanted = pair.torch.forward(q, k, v, layer, batch)
                    outputs.append((pair.flashinfer.forward(q, k, v, layer, batch), wanted))

    if depth is not None:
        with pytest.raises(AssertionError, match="isn't this step's"):
            steps()
        return
    steps()
    for found, wanted in outputs:
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)


class FakeEvent:
    """An event whose device work is done when the test says so."""

    def __init__(self) -> None:
        self.done = True
        self.waited = 0

    def record(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waited += 1
        self.done = True


def test_ring_waits_only_for_copies_not_made() -> None:
    events: list[FakeEvent] = []

    def make_event() -> FakeEvent:
        events.append(FakeEvent())
        return events[-1]

    ring = PlanRing(3, 64, CPU, make_event)
    taken = []
    for _ in range(3):
        with ring.take() as buffer:
            taken.append(buffer.data_ptr())
    assert len(set(taken)) == 3
    assert ring.waits == 0
    events[0].done = True
    with ring.take() as buffer:
        assert buffer.data_ptr() == taken[0]
    assert ring.waits == 0
    with ring.take() as buffer:  # the second copy hasn't been made
        assert buffer.data_ptr() == taken[1]
    assert ring.waits == 1
    assert [event.waited for event in events] == [0, 1, 0]


def test_enough_buffers_for_the_steps_in_flight(device: Device) -> None:
    pair = Pair(window=5)
    ring = pair.flashinfer.plan_ring
    # A mixed step of three variants: six plans.
    assert len(ring.buffers) == 6 * flashinfer_backend.STEPS_IN_FLIGHT
    assert len({buffer.data_ptr() for buffer in ring.buffers}) == len(ring.buffers)


def test_tensor_cores_for_wide_groups_and_float8(device: Device) -> None:
    assert not Pair(heads=4, kv_heads=2).flashinfer.use_tensor_cores
    assert Pair(heads=8, kv_heads=2).flashinfer.use_tensor_cores
    assert Pair(heads=2, kv_heads=2, kv_dtype=torch.float8_e4m3fn).flashinfer.use_tensor_cores


def test_windows_leave_pages_out(device: Device) -> None:
    pair = Pair(window=20, page_size=16)
    row = pair.start()
    pair.step([(row, 100)], [])
    pair.step([], [row])
    pages = [len(w._paged_kv_indices_buf) for w in pair.flashinfer.decode_wrappers.values()]
    assert pages == [7, 2, 2]


def test_refusals(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Pair().inputs[1]
    assert isinstance(ATTENTION_BACKENDS["flashinfer"](inputs), FlashInferAttentionBackend)
    fa3 = ATTENTION_BACKENDS["flashinfer-fa3"](inputs)
    assert isinstance(fa3, FlashInferAttentionBackend)
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        ATTENTION_BACKENDS["flashinfer-fa3"](Pair(kv_dtype=torch.float8_e4m3fn).inputs[1])
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"no kernels for dtype float32 with head_dim 8"):
        ATTENTION_BACKENDS["flashinfer"](inputs)


def test_missing_package_gives_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from engine.device import flashinfer_loader

    install(monkeypatch)
    inputs = Pair().inputs[1]
    calls = [AttentionCall(4, 2, 128, 128, 1.0)]
    assert auto_kernels(torch.bfloat16, calls) == "flashinfer"
    assert auto_kernels(torch.bfloat16, [AttentionCall(4, 2, 80, 80, 1.0)]) == "torch"
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"manta-serve\[gpu\].*kernels: torch"):
        ATTENTION_BACKENDS["flashinfer"](inputs)
    monkeypatch.setattr(flashinfer_loader.importlib.util, "find_spec", lambda name: None)
    assert auto_kernels(torch.bfloat16, calls) == "torch"
