"""The real FlashInfer on a GPU against the torch backend and the torch layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.base import AttentionInputs, AttentionLayer
from engine.attention.flashinfer_backend import FlashInferAttentionBackend
from engine.attention.forward_batch import ForwardBatch
from engine.attention.kv_pool import MHATokenToKVPool
from engine.attention.torch_backend import TorchAttentionBackend
from engine.checkpoint.layout import AttentionCall
from engine.checkpoint.model_config import RopeConfig
from engine.device.flashinfer_loader import flashinfer_installed, load_flashinfer
from engine.layers.activation import SiluAndMul
from engine.layers.fused_ops import FlashInferOps
from engine.layers.layernorm import RMSNorm
from engine.layers.rotary import RotaryEmbedding
from engine.layers.weights import DummySource
from engine.protocol.step import ModelWorkerBatch
from tests.support import torch_kernels

if not torch.cuda.is_available() or not flashinfer_installed():
    pytest.skip("needs a GPU and flashinfer-python", allow_module_level=True)

CUDA = torch.device("cuda")
NUM_SLOTS = 16384
MAX_LEN = 2048
ROWS = 9
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


class Pair:
    """Two backends over pools that hold the same. Requests are rows 0 to 7; row 8 is padding."""

    def __init__(
        self,
        *,
        page_size: int,
        heads: int = 8,
        kv_heads: int = 2,
        dim: int = 128,
        window: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        prefill_backend: str = "fa2",
    ) -> None:
        torch.manual_seed(0)
        self.shape, self.dtype, self.page_size = (heads, kv_heads, dim), dtype, page_size
        sizes = heads, kv_heads, dim, dim
        self.layers = (
            AttentionLayer(0, AttentionCall(*sizes, dim**-0.5)),
            AttentionLayer(1, AttentionCall(*sizes, dim**-0.5, window)),
        )
        calls = [layer.call for layer in self.layers]
        self.table = torch.zeros(ROWS, MAX_LEN + page_size, dtype=torch.int32, device=CUDA)
        inputs = [
            AttentionInputs(
                MHATokenToKVPool(NUM_SLOTS, page_size, calls, kv_dtype or dtype, CUDA),
                self.table,
                self.layers,
                dtype,
            )
            for _ in range(2)
        ]
        self.torch = TorchAttentionBackend(inputs[0])
        self.flashinfer = FlashInferAttentionBackend(inputs[1], prefill_backend)
        pages = torch.randperm(NUM_SLOTS // page_size).numpy() + 1
        self.pages = list(pages)
        self.slots: list[list[int]] = [[] for _ in range(ROWS)]

    def batch(self, extends: list[tuple[int, int]], decodes: list[int]) -> ForwardBatch:
        """`extends`: (row, tokens)."""
        rows = [*extends, *((row, 1) for row in decodes)]
        locs = []
        for row, count in rows:
            slots = self.slots[row]
            begin = len(slots)
            while len(slots) < begin + count:
                offset = len(slots) % self.page_size
                slots.append(slots[-1] + 1 if offset else int(self.pages.pop()) * self.page_size)
            new = torch.tensor(slots[begin:], dtype=torch.int32, device=CUDA)
            self.table[row, begin : begin + count] = new
            locs += slots[begin:]
        return make_batch(
            [(row, len(self.slots[row])) for row, _ in rows], [n for _, n in extends], locs
        )

    def qkv(self, total: int) -> tuple[Tensor, ...]:
        heads, kv_heads, dim = self.shape
        qkv = torch.randn(total, heads + 2 * kv_heads, dim, device=CUDA).to(self.dtype)
        return qkv.split([heads, kv_heads, kv_heads], dim=1)

    def step(self, extends: list[tuple[int, int]], decodes: list[int]) -> None:
        batch = self.batch(extends, decodes)
        self.torch.init_forward(batch)
        self.flashinfer.init_forward(batch)
        for layer in self.layers:
            q, k, v = self.qkv(batch.num_tokens)
            wanted = self.torch.forward(q, k, v, layer, batch)
            found = self.flashinfer.forward(q, k, v, layer, batch)
            close(found, wanted)


def close(found: Tensor, wanted: Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


def make_batch(
    rows: list[tuple[int, int]], extend_lens: list[int], locs: list[int]
) -> ForwardBatch:
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
        CUDA,
    )


HISTORY: list[tuple[list[tuple[int, int]], list[int]]] = [
    ([(0, 700), (1, 1), (2, 130)], []),
    ([(0, 300), (3, 17)], [1, 2]),
    ([], [0, 1, 2, 3]),
    ([(4, 500)], [0, 1, 2, 3]),
    ([], [4, 2]),
]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("shape", [(8, 2, 128), (8, 8, 128), (4, 2, 64)], ids=str)
def test_eager_steps(page_size: int, window: int | None, shape: tuple[int, int, int]) -> None:
    heads, kv_heads, dim = shape
    pair = Pair(page_size=page_size, heads=heads, kv_heads=kv_heads, dim=dim, window=window)
    for extends, decodes in HISTORY:
        pair.step(extends, decodes)


def test_float16() -> None:
    pair = Pair(page_size=16, dtype=torch.float16)
    for extends, decodes in HISTORY:
        pair.step(extends, decodes)


@pytest.mark.parametrize("page_size", [1, 16])
def test_float8_cache(page_size: int) -> None:
    pair = Pair(page_size=page_size, kv_dtype=torch.float8_e4m3fn)
    for extends, decodes in HISTORY:
        pair.step(extends, decodes)


@pytest.mark.parametrize("page_size", [1, 16])
def test_fa3(page_size: int) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    pair = Pair(page_size=page_size, window=100, prefill_backend="fa3")
    for extends, decodes in HISTORY:
        pair.step(extends, decodes)


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
def test_rotation_by_the_backend(page_size: int, kv_dtype: torch.dtype | None) -> None:
    pair = Pair(page_size=page_size, kv_dtype=kv_dtype)
    rotary = RotaryEmbedding(128, MAX_LEN, RopeConfig(10000.0), CUDA, FlashInferOps())
    for extends, decodes in HISTORY:
        batch = pair.batch(extends, decodes)
        pair.torch.init_forward(batch)
        pair.flashinfer.init_forward(batch)
        angles = rotary.lookup(batch.positions, pair.dtype).angles
        assert angles is not None
        for layer in pair.layers:
            q, k, v = pair.qkv(batch.num_tokens)
            rotated = (torch_kernels.rotated(x, *angles) for x in (q, k))
            wanted = pair.torch.forward(*rotated, v, layer, batch)
            close(pair.flashinfer.forward_rotating(q, k, v, angles, layer, batch), wanted)


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("page_size", [1, 16])
def test_captured_decodes(page_size: int, window: int | None, kv_heads: int) -> None:
    """Captured at short lengths, replayed at long ones, without waiting for the device."""
    pair = Pair(page_size=page_size, window=window, kv_heads=kv_heads)
    backend = pair.flashinfer
    size = 4
    backend.init_graphs([size])
    inputs = [[x.clone() for x in pair.qkv(size)] for _ in pair.layers]
    padding = make_batch([(8, 1)] * size, [], [0] * size)
    outputs: list[Tensor] = []

    def decode() -> None:
        outputs.clear()
        outputs.extend(
            backend.forward(*qkv, layer, padding)
            for qkv, layer in zip(inputs, pair.layers, strict=True)
        )

    backend.plan_graph(padding)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the plan's copies
    with torch.cuda.stream(stream):
        decode()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    pair.step([(0, 900), (1, 40), (2, 3), (3, 1500)], [])
    for _ in range(3):
        batch = pair.batch([], [0, 1, 2, 3])
        padding.out_cache_loc.copy_(batch.out_cache_loc)
        for x in (x for qkv in inputs for x in qkv):
            x.normal_()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            backend.plan_graph(batch)
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        pair.torch.init_forward(batch)
        for qkv, layer, found in zip(inputs, pair.layers, outputs, strict=True):
            close(found, pair.torch.forward(*qkv, layer, batch))


def test_decode_plans_copy_from_pinned_memory() -> None:
    pair = Pair(page_size=1)
    utils = load_flashinfer("flashinfer.utils")
    assert all(utils._get_range_buf(rows + 1, "cpu").is_pinned() for rows in range(1, ROWS + 1))
    pair.step([(0, 3), (1, 3)], [])


@pytest.mark.parametrize("window", [None, 100])
def test_planning_a_graph_takes_three_device_operations(window: int | None) -> None:
    """One upload, the page numbers, and the copy of FlashInfer's plan; for each window, and the
    last for each variant."""
    pair = Pair(page_size=16, window=window, kv_heads=2)
    pair.flashinfer.init_graphs([4])
    pair.step([(row, 50 * (row + 1)) for row in range(4)], [])
    pair.flashinfer.plan_graph(pair.batch([], [0, 1, 2, 3]))
    batch = pair.batch([], [0, 1, 2, 3])
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        pair.flashinfer.plan_graph(batch)
        torch.cuda.synchronize()
    work = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(work) == (3 if window is None else 6), [e.name for e in work]


def test_planning_ahead_of_a_busy_device() -> None:
    """Many steps planned and launched while the device sleeps; none may see another's plan."""
    pair = Pair(page_size=1, window=100)
    pair.step([(row, 50 * (row + 1)) for row in range(8)], [])
    results = []
    batches = []
    for step in range(6):
        batches.append(pair.batch([], list(range(step % 3, 8))))
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for batch in batches:
        tensors = [pair.qkv(batch.num_tokens) for _ in pair.layers]
        pair.flashinfer.init_forward(batch)
        found = [
            pair.flashinfer.forward(*qkv, layer, batch)
            for qkv, layer in zip(tensors, pair.layers, strict=True)
        ]
        results.append((batch, tensors, found))
    torch.cuda.synchronize()
    for batch, tensors, found in results:
        pair.torch.init_forward(batch)
        for qkv, layer, out in zip(tensors, pair.layers, found, strict=True):
            close(out, pair.torch.forward(*qkv, layer, batch))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_layers(dtype: torch.dtype) -> None:
    fused = FlashInferOps()
    source = DummySource(0, dtype, CUDA)
    plain, fast = RMSNorm(4096, 1e-5), RMSNorm(4096, 1e-5, fused)
    plain.load(source, "norm.weight")
    fast.load(source, "norm.weight")
    x, residual = (torch.randn(37, 4096, device=CUDA).to(dtype) for _ in range(2))
    close(fast(x), plain(x))
    assert fast(x[:0]).shape == (0, 4096)
    wanted = plain.add_and_norm(x, residual)
    for a, b in zip(fast.add_and_norm(x.clone(), residual.clone()), wanted, strict=True):
        close(a, b)
    heads, fast_heads = RMSNorm(128, 1e-5), RMSNorm(128, 1e-5, fused)
    heads.load(source, "heads.weight")
    fast_heads.load(source, "heads.weight")
    qkv = torch.randn(37, 12, 128, device=CUDA).to(dtype)
    close(fast_heads(qkv[:, :8]), heads(qkv[:, :8]))
    gate_up = torch.randn(37, 2 * 1408, device=CUDA).to(dtype)
    close(SiluAndMul(fused)(gate_up), SiluAndMul()(gate_up))
    positions = torch.randint(0, 4096, (37,), device=CUDA)
    rope = RopeConfig(500000.0)
    slow = RotaryEmbedding(128, 4096, rope, CUDA).lookup(positions, dtype)
    quick = RotaryEmbedding(128, 4096, rope, CUDA, fused).lookup(positions, dtype)
    wanted = slow.rotate_joint(qkv[:, :10].clone(), 8)
    for a, b in zip(quick.rotate_joint(qkv[:, :10], 8), wanted, strict=True):
        close(a, b)
