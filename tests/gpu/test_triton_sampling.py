"""The sampler's kernels on a GPU against the torch backend; without one Triton's interpreter runs
them (tests/unit/sampling/test_triton_sampling.py)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from engine.device.triton_loader import lack_of_triton
from engine.sampling.base import Drawn, SamplingBackend
from engine.sampling.features.draw import DrawPlan
from engine.sampling.sampler import Sampler
from engine.sampling.state import SamplingState
from engine.sampling.torch_backend import TorchSampling
from engine.sampling.triton_backend import TritonSampling
from tests.support.gpu_workers import no_sync
from tests.support.sampler_rows import Row, many_rows

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
if lack := lack_of_triton():
    pytest.skip(lack, allow_module_level=True)

CUDA = torch.device("cuda")
KERNELS = ["find_peaks", "run_races", "settle"]


def rows_of(count: int, vocab: int) -> list[Row]:
    rows = many_rows(count, 2.0, vocab)
    for row in rows[::2]:
        row.logits = row.logits.bfloat16().float()  # ties
    return rows


class Batch:
    """Rows installed in a table, and the arguments of `SamplingBackend.sample`."""

    def __init__(self, rows: list[Row]) -> None:
        self.state = SamplingState(len(rows), len(rows[0].logits), CUDA)
        self.state.install([row.install(slot) for slot, row in enumerate(rows)])
        numbers = np.arange(len(rows))
        self.plan: DrawPlan = self.state.plan(numbers).draw
        self.logits = torch.stack([row.logits for row in rows]).to(CUDA)
        self.rows = torch.from_numpy(numbers).to(CUDA)
        self.positions = torch.tensor([row.seq_len for row in rows], device=CUDA)

    def sample(self, backend: SamplingBackend, logits: Tensor | None = None) -> Drawn:
        logits = self.logits if logits is None else logits
        return backend.sample(logits, self.plan, self.rows, self.positions)


def capture(run: Callable[[], Drawn]) -> tuple[torch.cuda.CUDAGraph, Drawn]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


@pytest.mark.parametrize("vocab", [512, 32000, 128256])
@pytest.mark.parametrize("count", [1, 3, 64, 256])
def test_draws_what_torch_draws(count: int, vocab: int) -> None:
    """Eagerly, and in a graph that was captured over other logits."""
    batch = Batch(rows_of(count, vocab))
    wanted = batch.sample(TorchSampling(batch.state.draw))
    backend = TritonSampling(batch.state.draw)
    logits = batch.logits.clone().normal_()
    graph, captured = capture(lambda: batch.sample(backend, logits))
    logits.copy_(batch.logits)
    torch.cuda.synchronize()
    with no_sync():
        found = batch.sample(backend, logits)
        graph.replay()
    assert torch.equal(captured.token_ids, found.token_ids)
    assert torch.equal(found.max_logit, wanted.max_logit)
    assert torch.equal(logits, batch.logits), "logits are only read"
    # Sums of float32 in another order may move the edge of a nucleus.
    assert int((found.token_ids != wanted.token_ids).sum()) <= 1 + count // 64


@pytest.mark.parametrize("vocab", [512, 128256])
def test_whole_sampler_draws_what_torch_draws(vocab: int) -> None:
    """With penalties, biases and log-probabilities."""
    rows = rows_of(64, vocab)
    wanted, found = (
        Sampler(batch.state, word)(
            batch.logits, batch.rows, np.arange(64, dtype=np.int32), batch.positions
        )
        for word, batch in (("torch", Batch(rows)), ("triton", Batch(rows)))
    )
    assert int((found.next_token_ids != wanted.next_token_ids).sum()) <= 1
    assert torch.equal(found.is_nan, wanted.is_nan)


@pytest.mark.parametrize("programs", [1, 64, 100000])
def test_how_rows_are_split_changes_nothing(programs: int) -> None:
    batch = Batch(rows_of(32, 128256))
    usual, other = TritonSampling(batch.state.draw), TritonSampling(batch.state.draw)
    other._programs = programs
    assert torch.equal(batch.sample(usual).token_ids, batch.sample(other).token_ids)


def test_bfloat16_logits() -> None:
    batch = Batch(rows_of(64, 128256))
    backend = TritonSampling(batch.state.draw)
    half = batch.logits.bfloat16()
    assert torch.equal(
        batch.sample(backend, half).token_ids, batch.sample(backend, half.float()).token_ids
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_logits_concern_their_row_only(bad: float) -> None:
    batch = Batch(rows_of(24, 32000))
    backend = TritonSampling(batch.state.draw)
    good = batch.sample(backend).token_ids.clone()
    batch.logits[::2, 7001] = bad
    batch.logits[::2, 31999] = bad
    found = batch.sample(backend)
    assert found.token_ids[::2].tolist() == [7001] * 12
    assert torch.equal(found.token_ids[1::2], good[1::2])
    assert (found.max_logit - found.max_logit).isnan().tolist() == [True, False] * 12


def test_logits_beyond_32_bits() -> None:
    """As many as 2**31 logits: the last rows have addresses that 32 bits can't hold."""
    vocab, count = 128256, 2**31 // 128256 + 2
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB")
    batch = Batch(rows_of(4, vocab))
    logits = torch.zeros((count, vocab), device=CUDA)
    logits[-4:] = batch.logits
    rows = torch.zeros(count, dtype=torch.int64, device=CUDA)
    positions = torch.ones_like(rows)
    rows[-4:], positions[-4:] = batch.rows, batch.positions
    backend = TritonSampling(batch.state.draw)
    found = backend.sample(logits, batch.plan, rows, positions)
    assert torch.equal(found.token_ids[-4:], batch.sample(backend).token_ids)


def test_a_step_is_three_launches() -> None:
    batch = Batch(rows_of(64, 32000))
    backend = TritonSampling(batch.state.draw)
    batch.sample(backend)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        batch.sample(backend)
        torch.cuda.synchronize()
    on_device = [
        event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    if not on_device:
        pytest.skip("the profiler sees no kernels on this machine")
    assert on_device == KERNELS
