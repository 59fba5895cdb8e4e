"""What is recorded does the same again, on the numbers that its memory then holds."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.kernels import same_bits

ROWS, HEADS, DIM, SIZE = 3, 2, 8, 16


class Layer:
    """Two layers that use each binding that can be recorded, on one set of inputs."""

    def __init__(self, kernels: Any) -> None:
        torch.manual_seed(0)
        self.kernels = kernels
        self.norm = torch.randn(SIZE)
        self.qkv = kernels.pack(torch.randn(3 * SIZE, SIZE))
        self.up = kernels.pack(torch.randn(4 * SIZE, SIZE))
        numbers = torch.randint(0, 16, (SIZE, 2 * SIZE), dtype=torch.uint8)
        self.down = kernels.GroupedWeight(numbers, 4, 8, 32, torch.rand(SIZE, 1), None, None, None)
        self.cos_sin = torch.randn(20, DIM)
        self.pools = [torch.randn(40, HEADS, DIM) for _ in range(2)]
        self.table = torch.randperm(40, dtype=torch.int32)[:30].view(ROWS, 10)
        self.hidden = torch.randn(ROWS, SIZE)
        self.positions, self.lengths = torch.empty(2, ROWS, dtype=torch.int64)
        self.slots, self.requests = torch.empty(2, ROWS, dtype=torch.int64)
        self.starts = torch.arange(ROWS + 1)
        self.change(0)

    def change(self, seed: int) -> None:
        """Another step: in place, as the recording's memory is filled."""
        torch.manual_seed(seed)
        self.hidden.normal_()
        self.requests.copy_(torch.randperm(ROWS))
        self.lengths.copy_(torch.randint(1, 11, (ROWS,)))
        self.positions.copy_(self.lengths - 1)
        self.slots.copy_(self.table[self.requests, self.positions])

    def run(self) -> tuple[Tensor, Tensor]:
        k, residual, x = self.kernels, self.hidden, k_norm(self)
        for number in range(2):
            if number:
                k.add_rms_norm_(x, residual, self.norm, 1e-5)
            qkv = k.linear(x, self.qkv, None, 3 * SIZE, False).view(-1, 3 * HEADS, DIM)
            q, key, v = qkv.split(HEADS, 1)
            k.rotate_(self.positions, q, key, self.cos_sin)
            steps = self.table, self.requests, self.starts, self.lengths
            out = k.attention(q, key, v, *self.pools, self.slots, *steps, 0.3, 0, 0, 0.0, None)
            inner = k.silu_and_mul(k.linear(out, self.up, None, 4 * SIZE, False))
            x = k.linear_grouped(inner, [self.down], None, False, False)
        return x, residual


def k_norm(layer: Layer) -> Tensor:
    out: Tensor = layer.kernels.rms_norm(layer.hidden, layer.norm, 1e-5)
    return out


def test_other_inputs(kernels: Any) -> None:
    layer, reference, recording = Layer(kernels), Layer(kernels), kernels.Recording()
    recording.begin()
    x, residual = layer.run()
    recording.end()
    assert recording.num_calls == 2 * 7 + 2 and not recording.others  # q and k are two calls
    for seed in range(20):
        if seed:
            layer.change(seed)
            recording.replay()
        reference.change(seed)
        for ours, theirs in zip((x, residual), reference.run(), strict=True):
            assert same_bits(ours, theirs)
        assert same_bits(layer.pools[0], reference.pools[0])


def test_memory_is_used_again(kernels: Any) -> None:
    recording, x, norm = kernels.Recording(), torch.randn(4, 64), torch.ones(64)
    recording.begin()
    for _ in range(50):
        x = kernels.rms_norm(x, norm, 1e-5)
    recording.end()
    assert recording.num_calls == 50
    assert recording.num_bytes == 2 * x.nbytes


def test_what_it_uses_is_kept(kernels: Any) -> None:
    layer, recording = Layer(kernels), kernels.Recording()
    recording.begin()
    x = k_norm(layer)
    recording.end()
    hidden = layer.hidden.clone()
    expected = x.clone()
    x.zero_()
    norm = layer.norm.data_ptr()
    del layer
    others = [torch.full((SIZE,), 7.0) for _ in range(100)]  # would take the memory of the weight
    assert all(other.data_ptr() != norm for other in others)
    recording.replay()
    assert same_bits(x, expected) and hidden.shape == (ROWS, SIZE)
    del recording
    assert same_bits(x, expected)


def test_a_recording_ends_with_its_last_tensor(kernels: Any) -> None:
    freed: list[int] = []
    numbers = np.ones(8, np.float32)
    weakref.finalize(numbers, freed.append, 1)
    weight = torch.from_numpy(numbers)
    recording = kernels.Recording()
    recording.begin()
    x = kernels.rms_norm(torch.ones(2, 8), weight, 1e-5)
    y = kernels.rms_norm(x[:0], weight, 1e-5)  # has no memory, but its storage is the recording's
    recording.end()
    del numbers, weight, recording, x
    assert not freed and y.shape == (0, 8)
    del y
    assert freed


def test_operators_of_torch_are_named(kernels: Any) -> None:
    x = torch.randn(4, 64)
    recording = kernels.Recording()
    recording.begin()
    y = kernels.rms_norm(x, torch.ones(64), 1e-5)
    recording.end()
    assert "aten::ones" in recording.others
    recording = kernels.Recording()
    recording.begin()
    views = y.view(2, 2, 64)[:, 0].unsqueeze(1).split(1, 0)
    assert not recording.others and len(views) == 2
    views[0].add_(1.0)
    y.t().reshape(-1)
    recording.end()
    assert {"aten::add_", "aten::clone"} <= recording.others  # the rows had to be copied
    y.mul(2.0)  # it watches no longer
    assert "aten::mul" not in recording.others


def test_a_step_that_does_not_fit(kernels: Any) -> None:
    layer, recording = Layer(kernels), kernels.Recording()
    recording.begin()
    x, _ = layer.run()
    recording.end()
    for name, bad in (("slots", 40), ("requests", -1), ("lengths", 11), ("positions", 20)):
        layer.change(1)
        getattr(layer, name)[1] = bad
        with pytest.raises(RuntimeError, match=r"an index is|row 1 has"):
            recording.replay()
    layer.change(2)
    recording.replay()
    reference = Layer(kernels)
    reference.pools = [pool.clone() for pool in layer.pools]
    reference.change(2)
    assert same_bits(x, reference.run()[0])


def test_one_at_a_time(kernels: Any) -> None:
    first, second = kernels.Recording(), kernels.Recording()
    with pytest.raises(RuntimeError, match="doesn't record"):
        first.end()
    first.begin()
    with pytest.raises(RuntimeError, match="has begun"):
        second.begin()
    with pytest.raises(RuntimeError, match="part of another"):
        second.replay()
    thread = threading.Thread(target=lambda: kernels.silu_and_mul(torch.ones(2, 4)))
    thread.start()
    thread.join()
    first.end()
    assert first.num_calls == 0 and not first.others
    second.begin()
    del second  # it ends with what began it
    first.begin()
    first.end()
