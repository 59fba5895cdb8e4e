"""Captured decodes against eager ones, on CPU: graphs are recorded operators (`fake_graphs`)."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.layers.grouped_experts import GroupedExperts
from engine.layers.slotted_adapters import SlottedAdapters
from engine.models import transformers_model
from engine.models.transformers_model import TransformersModel
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.step import GenerationBatchResult, ModelWorkerBatch, PooledLines, RowParams
from engine.worker import model_runner
from engine.worker.auto_config import graph_max_batch_size
from engine.worker.graphs.decode_graphs import CaptureLimits, DecodeGraphs, Variant
from engine.worker.graphs.sizes import (
    MAX_CHUNK_READS,
    capture_order,
    graph_sizes,
    pad_decodes,
    runs_as_decodes,
    smallest_fitting,
)
from engine.worker.step_queue import StepQueue
from engine.worker.tp_worker import TpModelWorker
from tests.support.fake_graphs import (
    CapturableAttention,
    RecordedGraphs,
    use_capturable_attention,
    use_fixed_sampling,
)
from tests.support.models import THROUGH_TRANSFORMERS, make_model
from tests.support.other_architectures import made_when_asked, with_layers
from tests.support.verify_steps import ints, verify_batch
from tests.support.worker_driver import (
    MakeParams,
    Steps,
    WindowedSteps,
    drain,
    make_worker,
    run_step,
)

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")


@pytest.fixture(autouse=True)
def capturable(monkeypatch: pytest.MonkeyPatch) -> None:
    use_capturable_attention(monkeypatch)


def greedy(number: int) -> SamplingParams:
    return SamplingParams(temperature=0.0)


def top_1(number: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, top_k=1, seed=number)


def seeded(number: int) -> SamplingParams:
    return SamplingParams(temperature=0.5 + 0.1 * (number % 8), seed=number)


def greedy_or_seeded(number: int) -> SamplingParams:
    return (greedy, seeded, top_1)[number % 3](number)


def anything(number: int) -> SamplingParams:
    kinds = (
        dict(temperature=0.0),
        dict(seed=number),
        dict(seed=number, top_k=9),
        dict(seed=number, top_p=0.8),
        dict(seed=number, min_p=0.05),
        dict(temperature=0.0, repetition_penalty=1.3),
        dict(seed=number, logit_bias={7: 3.0}),
        dict(temperature=0.0, logprobs=3),
        dict(temperature=0.0, min_tokens=4, stop_token_ids=[9]),
    )
    return SamplingParams(**kinds[number % 40 if number % 40 < len(kinds) else 1])


class Pair(NamedTuple):
    graphs: TpModelWorker
    eager: TpModelWorker
    backend: RecordedGraphs


def make_pair(folder: Path, max_batch_size: int = 20, **keys: Any) -> Pair:
    backend = RecordedGraphs()
    graphs = make_worker(folder, graph_backend=backend, max_batch_size=max_batch_size, **keys)
    eager = make_worker(folder, **keys)
    assert graphs.graphs is not None and eager.graphs is None
    return Pair(graphs, eager, backend)


def same_results(ours: GenerationBatchResult, wanted: GenerationBatchResult) -> None:
    assert ours.step == wanted.step
    assert ours.line_errors == wanted.line_errors
    bad = set(wanted.line_errors or ())
    pairs = zip(ours.next_token_ids, wanted.next_token_ids, strict=True)
    assert all(a == b for i, (a, b) in enumerate(pairs) if i not in bad)
    assert (ours.logprobs is None) == (wanted.logprobs is None)
    for left, right in zip(ours.logprobs or (), wanted.logprobs or (), strict=True):
        assert (left is None) == (right is None)
        if left is not None and right is not None:
            assert left.top_ids == right.top_ids
            assert left.logprob == pytest.approx(right.logprob, abs=1e-4)


def compare(
    pair: Pair, steps: Steps, targets: list[int], nan_at: frozenset[int] = frozenset()
) -> None:
    """Run both workers through the same steps; the one with graphs keeps a step in flight."""
    queues = StepQueue(pair.graphs), StepQueue(pair.eager)
    ours: list[GenerationBatchResult] = []
    wanted: list[GenerationBatchResult] = []
    for number, target in enumerate(targets):
        if number in nan_at:
            # A request whose prompt holds it has NaN keys and values from then on.
            victim = steps.random.randrange(len(steps.live))
            poison(pair, steps.live[victim].pages[0] * steps.page_size)
        batch, reqs = steps.next(target)
        masks = steps.masks(batch, reqs)
        ours += run_step(queues[0], batch, masks)
        queues[1].launch(batch)
        if masks is not None:
            queues[1].apply(masks)
        result = queues[1].take_oldest()
        assert result is not None
        wanted.append(result)
        for row in result.line_errors or {}:
            steps.drop(reqs[row])
            heal(pair, reqs[row].pages[0] * steps.page_size)
    ours += drain(queues[0])
    assert len(ours) == len(wanted) == len(targets)
    for left, right in zip(ours, wanted, strict=True):
        same_results(left, right)


def poison(pair: Pair, slot: int, value: float = float("nan")) -> None:
    for worker in (pair.graphs, pair.eager):
        worker.runner.kv_pool.get(0).v[slot] = value


def heal(pair: Pair, slot: int) -> None:
    poison(pair, slot, 0.0)


TARGETS = [1, 1, 1, 3, 3, 5, 5, 9, 9, 15, 15, 15, 20, 20, 20, 23, 23, 17, 17, 8, 8, 4, 2, 2, 1, 1]


@pytest.mark.parametrize("make_params", [greedy, seeded, greedy_or_seeded, anything])
def test_tokens_are_those_of_an_eager_worker(folder: Path, make_params: MakeParams) -> None:
    pair = make_pair(folder)
    replays = pair.backend.replayed
    compare(pair, Steps(make_params, seed=3), TARGETS)
    # Forward and sampling each: decode steps did run as graphs.
    assert pair.backend.replayed - replays >= 12


def test_every_variant_is_used_and_others_are_sampled_eagerly(folder: Path) -> None:
    used: list[Variant | None] = []
    pair = make_pair(folder)
    assert pair.graphs.graphs is not None
    choose = pair.graphs.graphs.variant
    pair.graphs.graphs.variant = lambda plan: used.append(choose(plan)) or used[-1]  # type: ignore
    for make_params, wanted in (
        (greedy, {Variant.GREEDY}),
        (top_1, {Variant.GREEDY}),
        (seeded, {Variant.DRAW}),
        (lambda n: SamplingParams(seed=n, top_k=5), {None}),
        (lambda n: SamplingParams(seed=n, min_p=0.1), {None}),
        (lambda n: SamplingParams(temperature=0.0, presence_penalty=0.5), {None}),
        (lambda n: SamplingParams(temperature=0.0, logprobs=0), {None}),
    ):
        used.clear()
        compare(pair, Steps(make_params, seed=1), [4, 4, 4, 4])
        assert set(used) == wanted


def test_a_backend_that_ignores_plans_draws_everything_in_one_graph(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fixed_sampling(monkeypatch)
    backend = RecordedGraphs()
    graphs = make_worker(
        folder, graph_backend=backend, max_batch_size=20, sampling_backend="triton"
    )
    pair = Pair(graphs, make_worker(folder), backend)
    assert graphs.graphs is not None
    assert backend.captured == 2 * len(graphs.graphs.sizes)
    choose = graphs.graphs.variant
    used: list[Variant | None] = []
    graphs.graphs.variant = lambda plan: used.append(choose(plan)) or used[-1]  # type: ignore
    compare(pair, Steps(drawn_in_any_way, seed=3), TARGETS)
    assert used and None not in used
    used.clear()
    compare(pair, Steps(anything, seed=5), TARGETS)
    assert None in used, "some lines ask for more than a draw"


def drawn_in_any_way(number: int) -> SamplingParams:
    filters = ({}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 30, "top_p": 0.6})
    params = SamplingParams(seed=number, temperature=1.3, **filters[number % 5])
    return greedy(number) if number % 7 == 0 else params


def test_slots_of_adapters_are_inputs_of_graphs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of any adapters replay what was captured once; those without have graphs of theirs."""
    slotted = partial(SlottedAdapters, max_rank=4, like=torch.empty(0), by_triton=False)
    monkeypatch.setattr(model_runner, "TorchAdapters", slotted)
    pair = make_pair(folder, lora_load_folders=[str(folder)], max_loras=3)
    random, generator = np.random.default_rng(1), torch.Generator().manual_seed(2)
    for worker in (pair.graphs, pair.eager):
        linears = worker.runner.adapted
        assert linears is not None
        generator.manual_seed(2)
        for slot in range(3):
            linears.set(
                slot,
                {
                    name: (
                        torch.randn((2 + slot, part.local_in), generator=generator),
                        torch.randn((2 + slot, part.local_out), generator=generator),
                    )
                    for name, part in linears.projections.items()
                },
            )
    of_requests: dict[int, int] = {}

    class Adapted(Steps):
        def next(self, target: int) -> Any:
            batch, reqs = super().next(target)
            slots = [of_requests.setdefault(id(req), int(random.integers(-1, 3))) for req in reqs]
            if max(slots) >= 0:
                batch.adapters = np.array(slots, np.int32)
            return batch, reqs

    steps = Adapted(greedy, seed=4)
    replays = pair.backend.replayed
    compare(pair, steps, TARGETS)
    assert pair.backend.replayed - replays >= 12
    assert len(set(of_requests.values())) == 4


def test_rows_with_nan_end_alone(folder: Path) -> None:
    for make_params in (greedy, greedy_or_seeded):
        pair = make_pair(folder)
        compare(pair, Steps(make_params, seed=8), [9] * 14, frozenset({4, 8, 11}))


def test_delayed_samples_keep_their_logits(folder: Path) -> None:
    """Their step is sampled when other forwards may have used the same buffers."""
    pair = make_pair(folder)
    compare(pair, Steps(greedy_or_seeded, seed=5, constrain=True), TARGETS)


def test_a_delayed_sample_survives_another_forward(folder: Path) -> None:
    pair = make_pair(folder)
    steps = Steps(seeded, seed=2)
    queues = StepQueue(pair.graphs), StepQueue(pair.eager)
    for queue_steps in range(2):
        batch, _ = steps.next(8)
        for queue in queues:
            queue.launch(batch)
            assert queue.take_oldest() is not None, queue_steps
    whole, reqs = steps.next(8)
    halves = [part(whole, range(4), step=1000), part(whole, range(4, 8), step=1001)]
    halves[0].delayed_sample = True
    steps.constrain = True
    reqs[0].constrained = True
    masks = steps.masks(halves[0], reqs[:4])
    assert masks is not None
    results = []
    for queue in queues:
        queue.launch(halves[0])
        queue.launch(halves[1])  # none of its rows waits for the first half
        queue.apply(masks)
        results.append(drain(queue))
    for left, right in zip(*results, strict=True):
        same_results(left, right)


def part(batch: ModelWorkerBatch, rows: range, step: int) -> ModelWorkerBatch:
    """Some rows of a decode step as a step of their own."""
    index = np.array(rows)
    fields = {name: getattr(batch, name) for name in batch.__struct_fields__}
    names = ("req_pool_indices", "query_lens", "num_sampled", "seq_lens", "input_ids")
    for name in (*names, "out_cache_loc"):
        fields[name] = fields[name][index]
    return ModelWorkerBatch(**fields | {"step": step})


def test_only_own_memory_changes(folder: Path) -> None:
    """Of the KV cache, the row mirror and the last tokens, a step changes its rows and padding."""
    worker = make_worker(folder, graph_backend=RecordedGraphs(), max_batch_size=20)
    steps = Steps(greedy_or_seeded, seed=4)
    queue = StepQueue(worker)
    runner = worker.runner
    width = runner.req_to_token.shape[1]
    padded = 0
    for target in (3, 3, 3, 9, 9, 9, 17, 17, 17, 18, 18):
        batch, _ = steps.next(target)
        # Otherwise padding could write what it wrote before.
        worker.future_map.tokens[steps.free_slots] = -9
        tokens = worker.future_map.tokens.clone()
        table = runner.req_to_token.clone()
        layers = [runner.kv_pool.get(i) for i in range(len(runner.model.attention_layers))]
        caches = [cache.clone() for layer in layers for cache in layer]
        queue.launch(batch)
        assert queue.take_oldest() is not None
        rows = set(batch.req_pool_indices.tolist())
        assert changed(tokens, worker.future_map.tokens) <= rows | {0}
        locs = set(batch.out_cache_loc.tolist())
        for before, after in zip(caches, [c for layer in layers for c in layer], strict=True):
            assert changed(before, after) <= locs | {0}
        cells = changed(table.view(-1), runner.req_to_token.view(-1))
        assert {cell // width for cell in cells} <= rows | {0}
        padded += batch.num_long == 0 and target not in (1, 2, 4, 8, 16, 20)
    assert padded >= 5


def changed(before: torch.Tensor, after: torch.Tensor) -> set[int]:
    """Indices along the first dimension where the two differ."""
    differs = (before != after).view(before.shape[0], -1).any(1)
    return set(differs.nonzero().squeeze(1).tolist())


def test_buffers_stay_where_they_are(folder: Path) -> None:
    worker = make_worker(folder, graph_backend=RecordedGraphs(), max_batch_size=20)
    graphs = worker.graphs
    assert graphs is not None
    seen: dict[int, set[tuple[int, ...]]] = {}
    logits: set[int] = set()
    prepare, forward = graphs.prepare, graphs.forward

    def note_inputs(batch: ModelWorkerBatch, size: int):  # type: ignore[no-untyped-def]
        made = prepare(batch, size)
        tensors = (made.input_ids, made.positions, made.out_cache_loc, made.seq_lens)
        tensors += (made.req_pool_indices, made.sample_rows, made.sample_lens, made.logits_rows)
        seen.setdefault(size, set()).add(tuple(t.data_ptr() for t in tensors))
        return made

    def note_logits(prepared, num_rows: int):  # type: ignore[no-untyped-def]
        out = forward(prepared, num_rows)
        logits.add(out.data_ptr())
        return out

    graphs.prepare, graphs.forward = note_inputs, note_logits  # type: ignore[method-assign]
    queue = StepQueue(worker)
    steps = Steps(greedy_or_seeded, seed=6)
    for target in TARGETS:
        batch, _ = steps.next(target)
        queue.launch(batch)
        assert queue.take_oldest() is not None
    assert len(seen) >= 5
    # One set of addresses, the same for all sizes: each uses the front of the largest's memory.
    assert len(set().union(*seen.values())) == 1
    assert len(logits) == 1


def test_results_survive_the_next_step(folder: Path) -> None:
    """A result is collected after the next step has been launched into the same buffers."""
    pair = make_pair(folder)
    queue = StepQueue(pair.graphs)
    steps = Steps(greedy, seed=9)
    for _ in range(3):
        batch, _ = steps.next(8)
        queue.launch(batch)
    late = drain(queue)[-1].next_token_ids
    batch, _ = steps.next(8)
    queue.launch(batch)
    assert pair.graphs.graphs is not None
    buffer = pair.graphs.graphs._buffers.outputs(8).token_ids
    assert buffer is not None
    pending = queue._launched[batch.step][1]
    assert pending is not None
    right = buffer.tolist()
    buffer.fill_(0)
    assert pending.collect().next_token_ids == right
    assert len(late) == 8


def test_what_runs_eagerly(folder: Path) -> None:
    worker = make_worker(folder, graph_backend=RecordedGraphs(), max_batch_size=8)
    graphs = worker.graphs
    assert graphs is not None and graphs.sizes == [1, 2, 4, 8]
    steps = Steps(greedy, seed=1)
    sizes = [graphs.size_for(steps.next(target)[0]) for target in (3, 3, 5, 5, 8, 8, 9, 9, 2, 1)]
    assert sizes == [None, 4, None, 8, None, 8, None, None, 2, 1]
    batch, _ = steps.next(1)
    assert graphs.size_for(batch) == 1
    pooled = PooledLines(ints([0]), ints([]), ints([]))
    for change in ({"next_prompt_ids": ints([-1])}, {"pooled": pooled}):
        assert graphs.size_for(msgspec.structs.replace(batch, **change)) is None


def test_chunks_run_as_decodes_while_they_read_few_keys() -> None:
    def chunk(length: int, end: int, num_sampled: int = 1) -> ModelWorkerBatch:
        batch = verify_batch([length], [[9]], [1 << 20])
        counts = {"seq_lens": ints([end, 1 << 20]), "num_sampled": ints([num_sampled, 1])}
        return msgspec.structs.replace(batch, **counts)

    assert runs_as_decodes(chunk(256, 256)) and runs_as_decodes(chunk(256, 256, 0))
    reads = MAX_CHUNK_READS // 16
    # Sixteen tokens of which the last reads `end` keys: 16 * end - 120 in all.
    assert runs_as_decodes(chunk(16, reads + 7)) and not runs_as_decodes(chunk(16, reads + 8))


def chunks_of(
    number: int, rows: list[tuple[int, list[int], list[int], int]], **changes: Any
) -> ModelWorkerBatch:
    """`rows` have a slot, tokens in the cache, inputs, and how many of these sample. Slot s has the
    KV slots from 48 * s on."""
    batch = verify_batch([], [tokens for _, _, tokens, _ in rows], [0] * len(rows))
    locs = [48 * slot + i for slot, cached, tokens, _ in rows for i in _span(cached, tokens)]
    return msgspec.structs.replace(
        batch,
        step=number,
        req_pool_indices=ints([slot for slot, *_ in rows]),
        num_sampled=ints([count for *_, count in rows]),
        seq_lens=ints([len(cached) + len(tokens) for _, cached, tokens, _ in rows]),
        out_cache_loc=ints(locs),
        **changes,
    )


def test_short_chunks_behind_cached_prefixes(folder: Path) -> None:
    """A prompt in two chunks, then one that begins with its first tokens, beside a decode."""
    pair = make_pair(folder)
    rng = random.Random(5)
    prompt = [rng.randrange(3, 211) for _ in range(12)]
    shared = [48 + i for i in range(8)]
    fresh = [RowParams(1, 12, [2], greedy(1), ints(prompt))]
    other = [*prompt[:8], 5, 6, 7]
    second_row = [RowParams(2, 11, [2], seeded(2), ints(other))]
    behind = {"prefix_rows": ints([2]), "prefix_lens": ints([8]), "prefix_locs": ints(shared)}
    first = chunks_of(1, [(1, [], prompt[:7], 0)], new_rows=fresh)
    second = chunks_of(2, [(1, prompt[:7], prompt[7:], 1)])
    third = chunks_of(
        3, [(2, prompt[:8], other[8:], 1), (1, prompt, [-1], 1)], new_rows=second_row, **behind
    )
    fourth = chunks_of(4, [(2, other, [-1], 1), (1, [*prompt, 0], [-1], 1)])
    graphs = pair.graphs.graphs
    assert graphs is not None
    queues = StepQueue(pair.graphs), StepQueue(pair.eager)
    for batch, size in ((first, 8), (second, 8), (third, 4), (fourth, 2)):
        assert graphs.size_for(batch) == size
        results = []
        for queue in queues:
            queue.launch(batch)
            result = queue.take_oldest()
            assert result is not None
            results.append(result)
        same_results(*results)
        assert len(results[0].next_token_ids) == len(batch.sampled_lines)


def test_nothing_else_holds_graphs(folder: Path) -> None:
    worker = make_worker(folder, graph_backend=RecordedGraphs(), max_batch_size=8)
    queue, steps = StepQueue(worker), Steps(greedy, seed=1)
    for _ in range(3):
        queue.launch(steps.next(3)[0])
    drain(queue)
    assert worker.graphs is not None
    graphs = [weakref.ref(worker.graphs), *map(weakref.ref, worker.graphs._graphs.values())]
    gc.disable()
    try:
        worker.drop_graphs()
        assert [graph() for graph in graphs] == [None] * len(graphs)
    finally:
        gc.enable()


def test_attention_is_planned_for_the_padded_size(folder: Path) -> None:
    worker = make_worker(folder, graph_backend=RecordedGraphs(), max_batch_size=8)
    attention = worker.runner.attention
    assert isinstance(attention, CapturableAttention)
    assert attention.planned == [8, 4, 2, 1]
    attention.planned.clear()
    queue, steps = StepQueue(worker), Steps(greedy, seed=1)
    for target in (3, 3, 7, 7, 7):
        batch, _ = steps.next(target)
        queue.launch(batch)
    assert attention.planned == [4, 8, 8]


def test_no_graphs_without_a_backend_that_allows_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CapturableAttention, "supports_graphs", False)
    with caplog.at_level(logging.WARNING):
        worker = make_worker(folder, graph_backend=RecordedGraphs(), max_batch_size=8)
    assert worker.graphs is None
    assert "run eagerly" in caplog.text


@pytest.mark.parametrize("name", ["granite", "glm4", "cohere2", "gemma3", "qwen3_moe"])
def test_code_of_transformers_is_captured(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Mixtures as they run on a GPU: the others look at which experts have tokens."""
    grouped = lambda module, form, share: GroupedExperts(module, share)  # noqa: E731
    monkeypatch.setattr(transformers_model, "Experts", grouped)
    with made_when_asked(tmp_path_factory, with_layers(THROUGH_TRANSFORMERS)) as folders:
        pair = make_pair(folders[name])
        compare(pair, Steps(greedy, seed=2), [1, 1, 3, 3, 5, 5, 5, 8, 8, 2, 1])
    assert pair.backend.replayed > 20


@pytest.mark.parametrize("name", ["cohere2", "gemma3"])
def test_layers_with_windows_have_their_own_places(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    with made_when_asked(tmp_path_factory, with_layers(THROUGH_TRANSFORMERS)) as folders:
        backend = RecordedGraphs()
        keys = {"swa_full_tokens_ratio": 0.5}
        graphs = make_worker(folders[name], graph_backend=backend, max_batch_size=8, **keys)
        pair = Pair(graphs, make_worker(folders[name]), backend)
        steps = WindowedSteps.of(graphs, greedy, seed=2)
        compare(pair, steps, [1, 1, 3, 3, 5, 5, 5, 8, 8, 2, 1, *[4] * 20])
    assert backend.replayed > 20


def test_experts_tokens_are_counted_without_padding(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what was captured, and tried for the capture. (The last layer runs all tokens.)"""
    grouped = lambda module, form, share: GroupedExperts(module, share)  # noqa: E731
    monkeypatch.setattr(transformers_model, "Experts", grouped)
    with made_when_asked(tmp_path_factory, with_layers(THROUGH_TRANSFORMERS)) as folders:
        backend = RecordedGraphs()
        worker = make_worker(
            folders["qwen3_moe"],
            graph_backend=backend,
            max_batch_size=8,
            enable_expert_metrics=True,
        )
        queue, steps, tokens = StepQueue(worker), Steps(greedy, seed=2), 0
        for target in (1, 3, 3, 5, 5, 7, 2):
            batch, _ = steps.next(target)
            queue.launch(batch)
            assert queue.take_oldest() is not None
            tokens += len(batch.input_ids)
            found = worker.expert_tokens()
            assert found.keys() == {0, 1, 2, 3}
            assert all(sum(layer) == 2 * tokens for layer in found.values())
    assert backend.replayed > 4


class Remembering(torch.nn.Module):
    """An activation that counts its calls on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.relu(x + self.calls)


class Reading(torch.nn.Module):
    """An activation that looks at its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) if bool(torch.equal(x, x)) else x


@pytest.mark.parametrize(
    ("activation", "reason"),
    [(Remembering, "other logits"), (Reading, "reads the device")],
)
def test_code_that_needs_the_host_runs_eagerly(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path_factory: pytest.TempPathFactory,
    activation: type[torch.nn.Module],
    reason: str,
) -> None:
    load = TransformersModel.load

    def changed(self, *args):  # type: ignore[no-untyped-def]
        load(self, *args)
        self._model.model.layers[0].mlp.act_fn = activation()

    monkeypatch.setattr(TransformersModel, "load", changed)
    with (
        made_when_asked(tmp_path_factory, with_layers(THROUGH_TRANSFORMERS)) as folders,
        caplog.at_level(logging.WARNING),
    ):
        worker = make_worker(folders["olmo2"], graph_backend=RecordedGraphs(), max_batch_size=4)
    assert worker.graphs is None
    assert "run eagerly" in caplog.text and reason in caplog.text


def decode(steps: Steps, rows: int) -> ModelWorkerBatch:
    """The next step that has only decode rows, and `rows` of them."""
    while True:
        batch, _ = steps.next(rows)
        if batch.num_long == 0 and not batch.new_rows and len(batch.query_lens) == rows:
            return batch


def capture(worker: TpModelWorker, backend: RecordedGraphs, limits: CaptureLimits) -> DecodeGraphs:
    return DecodeGraphs(worker.runner, worker.sampler.state, worker.future_map, backend, 20, limits)


@pytest.mark.parametrize(
    ("free", "limits"),
    [
        ([1000, 990, 980, 890], CaptureLimits(100, 1e9, 0)),
        ([1000, 990, 980, 40], CaptureLimits(10**9, 1e9, 50)),
    ],
    ids=["taken", "left"],
)
def test_capture_stops_at_the_memory_limit(
    folder: Path, free: list[int], limits: CaptureLimits, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make_worker(folder)
    with caplog.at_level(logging.WARNING):
        graphs = capture(worker, RecordedGraphs(free), limits)
    assert "stopped after 3 of 6" in caplog.text
    # The largest, then powers of two.
    assert graphs.sizes == [8, 16, 20]
    steps = Steps(greedy, seed=1)
    assert [graphs.size_for(decode(steps, n)) for n in (3, 5, 10, 17)] == [8, 8, 16, 20]


def test_capture_stops_at_the_time_limit(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker = make_worker(folder)
    with caplog.at_level(logging.WARNING):
        graphs = capture(worker, RecordedGraphs(), CaptureLimits(seconds=0.0))
    assert "stopped after 1 of 6" in caplog.text
    assert graphs.sizes == [20]
    steps = Steps(greedy, seed=1)
    # Padding a batch to more than twice its size costs more than it saves.
    assert [graphs.size_for(decode(steps, n)) for n in (6, 9, 10, 19)] == [None, None, 20, 20]


def test_out_of_memory_gives_advice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, run: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(RecordedGraphs, "capture", fail)
    with pytest.raises(ConfigError, match="cuda_graph_max_batch_size"):
        make_worker(folder, graph_backend=RecordedGraphs(), max_batch_size=8)


def test_reading_a_value_while_capturing_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = CapturableAttention.forward

    def reads(self, q, k, v, layer, batch):  # type: ignore[no-untyped-def]
        batch.seq_lens.max().item()
        return forward(self, q, k, v, layer, batch)

    monkeypatch.setattr(CapturableAttention, "forward", reads)
    with pytest.raises(RuntimeError, match="reads the device"):
        make_worker(folder, graph_backend=RecordedGraphs(), max_batch_size=2)


def test_sizes() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(3) == [1, 2, 3]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    whole = graph_sizes(1000)
    assert whole[-1] == 1000 and len(whole) == len(set(whole)) and whole == sorted(whole)
    assert {8, 248, 256, 272, 496, 512, 544, 992} <= set(whole)
    assert not {264, 520, 528} & set(whole)
    for rows in range(1, 1001):
        size = smallest_fitting(whole, rows)
        assert size is not None and rows <= size < rows + 32
    assert smallest_fitting(whole, 1001) is None


def test_capture_order() -> None:
    assert capture_order([1, 2, 4, 8, 16, 24]) == [24, 16, 8, 4, 2, 1]
    assert capture_order([1, 2, 4, 8, 16, 24, 32]) == [32, 16, 8, 4, 2, 1, 24]


def test_padding_rows_are_padding() -> None:
    steps = Steps(greedy, seed=0)
    steps.next(3)
    batch, _ = steps.next(3)
    padded = pad_decodes(batch, 8)
    assert padded.req_pool_indices.tolist() == [*batch.req_pool_indices.tolist(), 0, 0, 0, 0, 0]
    assert padded.seq_lens.tolist() == [*batch.seq_lens.tolist(), 1, 1, 1, 1, 1]
    assert padded.out_cache_loc.tolist() == [*batch.out_cache_loc.tolist(), 0, 0, 0, 0, 0]
    assert padded.input_ids.tolist() == [-1, -1, -1, 0, 0, 0, 0, 0]
    assert padded.sampled_lines.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, 256),
        ({"max_running_requests": 40}, 40),
        ({"max_running_requests": 1000}, 256),
        ({"max_running_requests": 1000, "cuda_graph_max_batch_size": 500}, 500),
        ({"max_running_requests": 100, "cuda_graph_max_batch_size": 500}, 100),
        ({"pp_size": 2, "pp_max_micro_batch_size": 12}, 12),
        ({"pp_size": 3, "max_running_requests": 100}, 34),
        ({"enable_cuda_graphs": False}, 0),
        ({"max_running_requests": 8, "speculative_config": NGRAM}, 40),
        ({"max_running_requests": 100, "speculative_config": NGRAM}, 256),
    ],
)
def test_largest_size_by_config(options: dict[str, Any], wanted: int) -> None:
    assert graph_max_batch_size(EngineConfig(**options)) == wanted


def step_of(
    number: int, rows: list[tuple[int, list[int], list[int]]], new: list[RowParams] | None = None
) -> ModelWorkerBatch:
    """`rows` have a slot, tokens in the cache and inputs: prompts if there are `new` slots, else a
    last token and drafts. Slot s has the KV slots from 48 * s on."""
    inputs = [tokens for _, _, tokens in rows]
    ends = [len(cached) + len(tokens) for _, cached, tokens in rows]
    batch = verify_batch(ends, [], []) if new else verify_batch([], inputs, ends)
    locs = [48 * slot + i for slot, cached, tokens in rows for i in _span(cached, tokens)]
    return msgspec.structs.replace(
        batch,
        step=number,
        req_pool_indices=ints([slot for slot, _, _ in rows]),
        input_ids=ints([token for tokens in inputs for token in tokens]),
        out_cache_loc=ints(locs),
        new_rows=new or [],
    )


@pytest.mark.parametrize("make_params", [greedy, seeded, anything])
def test_rows_with_drafts_run_in_the_graphs_of_decodes(
    folder: Path, make_params: MakeParams
) -> None:
    """Eight requests, with right and wrong drafts: the tokens are those of an eager worker."""
    pair = make_pair(folder, max_batch_size=40)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 211) for _ in range(rng.randint(1, 9))] for _ in range(8)]
    new = [RowParams(i, len(p), [2], make_params(i), ints(p)) for i, p in enumerate(prompts, 1)]
    known = _alone(pair.eager, prompts, new)
    texts = [list(prompt) for prompt in prompts]
    rows = [(i, [], prompt) for i, prompt in enumerate(prompts, 1)]
    batch = step_of(1, rows, new)
    accepted = number = 0
    while True:
        results = []
        for worker in (pair.graphs, pair.eager):
            queue = StepQueue(worker)
            queue.launch(batch)
            result = queue.take_oldest()
            assert result is not None
            results.append(result)
        same_results(*results)
        assert results[0].num_tokens == results[1].num_tokens
        assert results[0].num_drafts == results[1].num_drafts
        counts = [1] * 8
        if results[0].num_tokens is not None:
            counts = results[0].num_tokens
            accepted += sum(counts) - len(counts)
        end = 0
        for text, count in zip(texts, counts, strict=True):
            text += results[0].next_token_ids[end : end + count]
            end += count
        if max(len(text) for text in texts) > 38:
            break
        number += 1
        rows = []
        for slot, (text, whole) in enumerate(zip(texts, known, strict=True), 1):
            assert text == whole[: len(text)]
            right = whole[len(text) : len(text) + rng.randint(0, 4)]
            drafts = [token if rng.random() < 0.8 else token ^ 1 for token in right]
            rows.append((slot, text[:-1], [text[-1], *drafts]))
        batch = step_of(1 + number, rows)
        assert pair.graphs.graphs is not None
        assert pair.graphs.graphs.size_for(batch) is not None
    assert accepted > 30 and pair.backend.replayed >= number


def _alone(
    worker: TpModelWorker, prompts: list[list[int]], new: list[RowParams]
) -> list[list[int]]:
    """Prompts with what follows them, token by token."""
    texts = [list(prompt) for prompt in prompts]
    batch = step_of(1, [(i, [], p) for i, p in enumerate(prompts, 1)], new)
    for number in range(2, 42):
        queue = StepQueue(worker)
        queue.launch(batch)
        result = queue.take_oldest()
        assert result is not None
        for text, token in zip(texts, result.next_token_ids, strict=True):
            text.append(token)
        rows = [(i, text[:-1], text[-1:]) for i, text in enumerate(texts, 1)]
        batch = step_of(number, rows)
    return texts


def _span(cached: list[int], inputs: list[int]) -> range:
    return range(len(cached), len(cached) + len(inputs))


class Pipe:
    """A pipeline's stage in this process: hidden states lie in a list until the next stage runs."""

    def __init__(self, pp_rank: int, pp_size: int, on_the_way: list[torch.Tensor]) -> None:
        self.tp_rank, self.tp_size, self.ep_size = 0, 1, None
        self.pp_rank, self.pp_size = pp_rank, pp_size
        self.rank = pp_rank
        self.is_first_stage = pp_rank == 0
        self.is_last_stage = pp_rank == pp_size - 1
        self.on_the_way = on_the_way

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def send_hidden(self, hidden: torch.Tensor) -> None:
        self.on_the_way.append(hidden)  # not copied: it mustn't change on the way

    def recv_hidden(self, num_tokens: int, *_: object) -> torch.Tensor:
        hidden = self.on_the_way.pop(0)
        assert hidden.shape[0] == num_tokens, "padding was sent"
        return hidden


def test_pipeline_stages_capture_too(folder: Path) -> None:
    """Two micro-batches follow each other through two stages; -1 isn't used in pipelines."""
    on_the_way: list[torch.Tensor] = []
    backends = [RecordedGraphs(), RecordedGraphs()]
    stages = [
        make_worker(
            folder,
            graph_backend=backend,
            max_batch_size=8,
            parallel=Pipe(rank, 2, on_the_way),  # type: ignore[arg-type]
        )
        for rank, backend in enumerate(backends)
    ]
    # Forwards on both stages, sampling on the last: sizes 1, 2, 4, 8.
    assert [backend.captured for backend in backends] == [4, 12]
    eager = make_worker(folder)
    steps = Steps(greedy_or_seeded, seed=7)
    last: dict[int, int] = {}
    for target in (3, 5, 5, 6, 6, 6, 4, 4):
        whole, _ = steps.next(target)
        decode_lines = slice(len(whole.new_rows), None)
        tokens = [last.get(slot, -1) for slot in whole.req_pool_indices.tolist()]
        starts = int(whole.query_lens[: len(whole.new_rows)].sum())
        whole.input_ids[starts:] = np.array(tokens, np.int32)[decode_lines]
        micro = [whole]
        if not whole.new_rows:
            half = target // 2
            micro = [part(whole, range(half), whole.step), part(whole, range(half, target), 10**6)]
        for batch in micro:
            assert stages[0].forward(batch) is None
        for batch in micro:
            launched = stages[1].forward(batch)
            wanted = eager.forward(batch)
            assert launched is not None and wanted is not None
            ours, theirs = launched.sample(None).collect(), wanted.sample(None).collect()
            same_results(ours, theirs)
            slots = batch.req_pool_indices.tolist()
            last.update(zip(slots, ours.next_token_ids, strict=True))
    assert not on_the_way
    assert all(backend.replayed >= 8 for backend in backends)
