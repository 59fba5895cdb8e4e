"""The torch attention backend against naive attention, over random histories of steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.base import AttentionInputs, AttentionLayer
from engine.attention.forward_batch import ForwardBatch
from engine.attention.kv_pool import MHATokenToKVPool
from engine.attention.torch_backend import (
    QUERY_BLOCK,
    TorchAttentionBackend,
    TorchCpuAttentionBackend,
    make_torch_attention,
)
from engine.checkpoint.layout import AttentionCall, HeadSizes
from engine.protocol.step import ModelWorkerBatch

CPU = torch.device("cpu")
NUM_SLOTS = 2048
MAX_ROWS = 6
MAX_LEN = 700


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
    """q [L, Hq, D] are the last L of the S tokens in k, v [S, Hkv, D] -> [L, Hq * D]."""
    call, group = layer.call, q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,shd->hqs", q.double(), k.double()) * call.scale
    query = torch.arange(k.shape[0] - q.shape[0], k.shape[0]).unsqueeze(1)
    key = torch.arange(k.shape[0])
    hidden = key > query
    if call.window is not None:
        hidden |= key <= query - call.window
    if call.chunk is not None:
        hidden |= key // call.chunk != query // call.chunk
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(hidden, -torch.inf)
    if layer.sinks is not None:
        sinks = layer.sinks.double()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hqs,shd->qhd", weights, v.double()).flatten(1).float()


@dataclass
class Sequence:
    """A request: its row and, per layer, all its keys and values so far."""

    row: int
    slots: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


class Simulation:
    """A backend with two layers (the second may have a window) and the truth beside it.

    `layers`: others, for whose features `make_torch_attention` chooses the backend.
    """

    def __init__(
        self,
        *,
        page_size: int,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 8,
        window: int | None = None,
        seed: int,
        backend: Callable[[AttentionInputs], TorchAttentionBackend] = TorchCpuAttentionBackend,
        layers: tuple[AttentionLayer, ...] | None = None,
    ) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        sizes = heads, kv_heads, dim, dim
        self.layers = layers or (
            AttentionLayer(0, AttentionCall(*sizes, dim**-0.5)),
            AttentionLayer(1, AttentionCall(*sizes, 0.3, window)),
        )
        self.calls = [layer.call for layer in self.layers]
        self.pool = MHATokenToKVPool(NUM_SLOTS, page_size, self.calls, torch.float32, CPU)
        self.table = torch.zeros(MAX_ROWS + 1, MAX_LEN, dtype=torch.int32)
        self.backend = backend(AttentionInputs(self.pool, self.table, self.layers))
        self.page_size = page_size
        pages = list(range(1, NUM_SLOTS // page_size))
        self.random.shuffle(pages)
        self.free_slots = [p * page_size + i for p in pages for i in range(page_size)]
        self.free_rows = list(range(MAX_ROWS))

    def start(self) -> Sequence:
        keys, values = (
            [
                torch.zeros(0, layer.call.num_kv_heads, getattr(layer.call, dim))
                for layer in self.layers
            ]
            for dim in ("k_dim", "v_dim")
        )
        return Sequence(self.free_rows.pop(0), [], keys, values)

    def finish(self, sequence: Sequence) -> None:
        self.free_rows.append(sequence.row)
        self.free_slots.extend(sequence.slots)

    def step(
        self,
        extends: list[tuple[Sequence, int]],
        decodes: list[Sequence],
        *,
        micro_batch: int = 0,
        poison: bool = False,
    ) -> None:
        """Run both layers on random q, k, v and compare every row with the truth."""
        rows = [*extends, *((sequence, 1) for sequence in decodes)]
        locs = []
        for sequence, count in rows:
            for _ in range(count):
                self.table[sequence.row, len(sequence.slots)] = self.free_slots[0]
                sequence.slots.append(self.free_slots.pop(0))
                locs.append(sequence.slots[-1])
        total = len(locs)
        ints = lambda values: np.array(list(values), dtype=np.int32)  # noqa: E731
        batch = ForwardBatch.from_worker_batch(
            ModelWorkerBatch(
                step=0,
                micro_batch=micro_batch,
                req_pool_indices=ints(sequence.row for sequence, _ in rows),
                query_lens=ints(count for _, count in rows),
                num_sampled=ints([0] * len(rows)),
                seq_lens=ints(len(sequence.slots) for sequence, _ in rows),
                input_ids=ints([0] * total),
                out_cache_loc=ints(locs),
                prefix_rows=ints([]),
                prefix_lens=ints([]),
                prefix_locs=ints([]),
                new_rows=[],
            ),
            CPU,
        )
        self.backend.init_forward(batch)
        given: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, layer in enumerate(self.layers):
            call = layer.call
            q = torch.randn(total, call.num_heads, call.k_dim)
            kv = torch.randn(total, call.num_kv_heads, call.k_dim + call.v_dim)
            k, v = kv.split([call.k_dim, call.v_dim], dim=2)
            if call.latent_of is not None:
                v = k[..., : call.v_dim]
            if call.kv_of is not None:
                k, v = given[call.kv_of]
            given.append((k, v))
            if poison:
                k.fill_(torch.nan)
                v.fill_(torch.inf)
            out = self.backend.forward(q, k, v, layer, batch)
            start = 0
            for sequence, count in rows:
                part = slice(start, start + count)
                start += count
                sequence.keys[index] = torch.cat((sequence.keys[index], k[part]))
                sequence.values[index] = torch.cat((sequence.values[index], v[part]))
                wanted = naive(
                    q[part],
                    sequence.keys[index],
                    sequence.values[index],
                    layer,
                )
                if not poison:
                    torch.testing.assert_close(out[part], wanted, atol=2e-5, rtol=1e-4)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**16),
    page_size=st.sampled_from([1, 4, 16]),
    shape=st.sampled_from([(4, 2, 8), (3, 1, 16), (2, 2, 4)]),
    window=st.sampled_from([None, 1, 5, 64]),
    budget=st.sampled_from([None, 0, 40_000]),
    chunk=st.sampled_from([3, 70, 150]),
)
def test_random_histories(
    seed: int,
    page_size: int,
    shape: tuple[int, int, int],
    window: int | None,
    budget: int | None,
    chunk: int,
) -> None:
    """Requests come, extend in chunks, decode, sit out steps, change micro-batches and go."""
    torch.set_num_threads(1)
    heads, kv_heads, dim = shape
    simulation = Simulation(
        page_size=page_size, heads=heads, kv_heads=kv_heads, dim=dim, window=window, seed=seed
    )
    assert isinstance(simulation.backend, TorchCpuAttentionBackend)
    workspace = simulation.backend.workspace
    if budget is not None:
        workspace.budget_bytes = budget
    choose = simulation.random
    running: list[Sequence] = []
    for _ in range(14):
        if running and choose.random() < 0.15:
            simulation.finish(running.pop(choose.randrange(len(running))))
        extends: list[tuple[Sequence, int]] = []
        while len(running) + len(extends) < MAX_ROWS and choose.random() < 0.4:
            extends.append((simulation.start(), choose.randint(1, chunk)))
        decodes = []
        for sequence in choose.sample(running, len(running)):
            kind = choose.random()
            if kind < 0.1:
                extends.append((sequence, choose.randint(1, chunk)))
            elif kind < 0.9:
                decodes.append(sequence)
        long = [s for s, n in extends if len(s.slots) + n >= MAX_LEN - 20]
        extends = [(s, n) for s, n in extends if s not in long]
        if extends or decodes:
            simulation.step(extends, decodes, micro_batch=choose.randint(0, 1))
        running.extend(sequence for sequence, _ in extends if sequence not in running)
        assert workspace.used_bytes <= workspace.budget_bytes
    if budget == 0:
        assert workspace.used_bytes == 0


@pytest.mark.parametrize("window", [None, 100])
def test_chunks_longer_than_a_query_block(window: int | None) -> None:
    simulation = Simulation(page_size=16, heads=4, kv_heads=2, dim=8, window=window, seed=0)
    first, second = simulation.start(), simulation.start()
    simulation.step([(first, QUERY_BLOCK + 44)], [])
    simulation.step([(first, QUERY_BLOCK + 1), (second, 1)], [])
    simulation.step([(second, 2)], [first])
    simulation.step([], [first, second])


@pytest.mark.parametrize("window", [None, 7])
def test_row_by_row(window: int | None) -> None:
    """What a GPU without FlashInfer does."""
    simulation = Simulation(
        page_size=4,
        heads=4,
        kv_heads=2,
        dim=8,
        window=window,
        seed=3,
        backend=TorchAttentionBackend,
    )
    assert isinstance(make_torch_attention(simulation.backend.inputs), TorchCpuAttentionBackend)
    first, second = simulation.start(), simulation.start()
    simulation.step([(first, 30), (second, 3)], [])
    for _ in range(12):
        simulation.step([], [second, first])
    simulation.step([(simulation.start(), 5)], [first, second])


def test_decode_across_bucket_sizes() -> None:
    """A sequence outgrows its bucket several times while another stays."""
    simulation = Simulation(page_size=1, heads=4, kv_heads=2, dim=8, window=7, seed=1)
    long, short = simulation.start(), simulation.start()
    simulation.step([(long, 60), (short, 3)], [])
    for _ in range(40):
        simulation.step([], [long, short])


def test_broken_numbers_of_one_request_stay_with_it() -> None:
    """NaN and inf left in shared memory by a finished request must not reach its successor."""
    simulation = Simulation(page_size=1, heads=2, kv_heads=1, dim=4, window=4, seed=2)
    good, bad = simulation.start(), simulation.start()
    simulation.step([(good, 5)], [])
    simulation.step([(bad, 50)], [], poison=True)
    simulation.step([], [bad], poison=True)
    simulation.finish(bad)
    successor = simulation.start()
    simulation.step([(successor, 2)], [good])
    for _ in range(3):
        simulation.step([], [successor, good])


CALL = AttentionCall(4, 2, 8, 8, 0.3)
LATENT = AttentionCall(4, 1, 12, 8, 0.3, latent_of=HeadSizes(4, 10, 6))
FEATURES = {
    "chunks": (CALL, msgspec.structs.replace(CALL, chunk=13)),
    "cap": (msgspec.structs.replace(CALL, softcap=2.0, window=9), CALL),
    "values of another size": (msgspec.structs.replace(CALL, v_dim=6, window=20), CALL),
    "latents": (LATENT, msgspec.structs.replace(LATENT, window=9)),
    "other heads": (CALL, AttentionCall(6, 3, 16, 4, 0.2)),
    "keys of another layer": (CALL, CALL, msgspec.structs.replace(CALL, kv_of=0, window=7)),
}


@pytest.mark.parametrize("name", [*FEATURES, "sinks", "sinks and a cap"])
def test_features_of_calls(name: str) -> None:
    sinks = torch.tensor([0.5, -3.0, 2.0, 9.0]) if "sinks" in name else None
    cap = 1.5 if name.endswith("cap") else None
    calls = FEATURES.get(name, (CALL, msgspec.structs.replace(CALL, window=7, softcap=cap)))
    if sinks is not None:
        calls = tuple(msgspec.structs.replace(call, has_sinks=True) for call in calls)
    layers = tuple(AttentionLayer(i, call, sinks) for i, call in enumerate(calls))
    simulation = Simulation(page_size=4, seed=5, backend=make_torch_attention, layers=layers)
    assert type(simulation.backend) is TorchAttentionBackend
    first, second = simulation.start(), simulation.start()
    simulation.step([(first, QUERY_BLOCK + 30), (second, 3)], [])
    simulation.step([(second, 20)], [first])
    for _ in range(12):
        simulation.step([], [second, first])
    simulation.step([(first, 1 + QUERY_BLOCK), (simulation.start(), 1)], [second])
