"""Decodes on CPU run as recordings, and give what the layers give one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.models import recording
from engine.models.recorded_decodes import MAX_ROWS, RecordedDecodes
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.step import GenerationBatchResult, ModelWorkerBatch
from engine.worker.step_queue import StepQueue
from engine.worker.tp_worker import TpModelWorker
from tests.support.kernels import torch_threads
from tests.support.models import THROUGH_TRANSFORMERS, leave_ranks_alone, make_model
from tests.support.worker_driver import (
    LiveReq,
    Steps,
    WindowedSteps,
    drain,
    make_worker,
    params,
    run_step,
)

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "biases": ("Qwen2ForCausalLM", {}),
    "norms": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "window": ("MistralForCausalLM", {"sliding_window": 7}),
    # Through the code of transformers:
    **{name: THROUGH_TRANSFORMERS[name] for name in ("smollm3", "mixtral", "qwen3_moe")},
}
TARGETS = (1, 3, 3, 5, 2, 7, 7, 7, 1, 1, 4, 24, 24, 24, 2, 2)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("engine.checkpoint.model_config.read_layout", recording.record)
    leave_ranks_alone(monkeypatch)
    with torch_threads(1):
        yield


def worker_of(folder: Path, dtype: str = "float32") -> TpModelWorker:
    return make_worker(folder, dtype=dtype, attention_backend="cpu")


def recorded_of(worker: TpModelWorker) -> RecordedDecodes:
    recorded = worker.runner.model.recorded  # type: ignore[attr-defined]
    assert isinstance(recorded, RecordedDecodes)
    return recorded


def results(
    worker: TpModelWorker, seed: int = 0, steps: Steps | None = None
) -> list[GenerationBatchResult]:
    queue, found = StepQueue(worker), []
    steps = steps or Steps(params, seed=seed)
    for target in TARGETS:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found += run_step(queue, steps.next(target)[0], None)
    return found + drain(queue)


def same(ours: list[GenerationBatchResult], theirs: list[GenerationBatchResult]) -> bool:
    return len(ours) == len(theirs) and all(
        (a.step, list(a.next_token_ids), str(a.logprobs))
        == (b.step, list(b.next_token_ids), str(b.logprobs))
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_same(kind: str, dtype: str, tmp_path: Path) -> None:
    arch, changes = KINDS[kind]
    folder = make_model(tmp_path / "model", arch, vocab_size=211, **changes)
    worker, plain = worker_of(folder, dtype), worker_of(folder, dtype)
    recorded_of(plain).lack = "switched off by the test"
    assert same(results(worker), results(plain))
    assert {1, 2, 3, 7, 24} <= set(recorded_of(worker).sizes) and not recorded_of(worker).lack
    assert not recorded_of(plain).sizes


def test_layers_with_windows_have_their_own_places(tmp_path: Path) -> None:
    """Those of a recording are found anew for each step."""
    arch, changes = KINDS["window"]
    folder = make_model(tmp_path / "model", arch, vocab_size=211, **changes)
    workers = [
        make_worker(folder, attention_backend="cpu", swa_full_tokens_ratio=0.5) for _ in range(2)
    ]
    recorded_of(workers[1]).lack = "switched off by the test"
    ours, theirs = (results(worker, steps=WindowedSteps.of(worker, params)) for worker in workers)
    assert same(ours, theirs)
    assert {1, 3, 7, 24} <= set(recorded_of(workers[0]).sizes)


def test_experts_tokens_are_counted(tmp_path: Path) -> None:
    """In recorded steps, too."""
    arch, changes = KINDS["qwen3_moe"]
    folder = make_model(tmp_path / "model", arch, vocab_size=211, **changes)
    worker = make_worker(folder, attention_backend="cpu", enable_expert_metrics=True)
    steps, queue, tokens = Steps(params), StepQueue(worker), 0
    for target in TARGETS:
        batch, _ = steps.next(target)
        tokens += len(batch.input_ids)
        run_step(queue, batch, None)
    drain(queue)
    assert {1, 3, 7} <= set(recorded_of(worker).sizes)
    found = worker.expert_tokens()
    assert found and all(sum(layer) == 2 * tokens for layer in list(found.values())[:-1])


class AdaptedSteps(Steps):
    """Every line has an adapter: that of slot 0 in every other step, else that of slot 1."""

    count = 0

    def next(self, target: int) -> tuple[ModelWorkerBatch, list[LiveReq]]:
        batch, reqs = super().next(target)
        self.count += 1
        batch.adapters = np.full(len(batch.req_pool_indices), self.count % 2, np.int32)
        return batch, reqs


def test_adapters_of_experts_run_as_they_are(tmp_path: Path) -> None:
    """Which experts have rows isn't known before; an adapter of other linears is recorded."""
    arch, changes = KINDS["qwen3_moe"]
    folder = make_model(tmp_path / "model", arch, vocab_size=211, **changes)
    found = []
    for lack in ("", "switched off by the test"):
        worker = make_worker(
            folder, attention_backend="cpu", lora_folder=str(tmp_path), max_loras=2
        )
        recorded_of(worker).lack = lack
        adapted = worker.runner.adapted
        assert adapted is not None
        torch.manual_seed(2)
        factors = {
            name: (torch.randn_like(a), torch.randn_like(b) * 0.3)
            for name, part in adapted.projections.items()
            for a, b in [part.nothing(2)]
        }
        experts = {name for name in factors if ".experts." in name}
        assert experts and experts < factors.keys()
        adapted.set(0, {name: factors[name] for name in factors.keys() - experts})
        adapted.set(1, factors)
        found.append(results(worker, steps=AdaptedSteps(params)))
        assert bool(recorded_of(worker).sizes) != bool(lack)
    assert same(*found)


def test_another_kv_cache(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "LlamaForCausalLM", vocab_size=211)
    worker = worker_of(folder)
    results(worker, seed=1)
    assert recorded_of(worker).sizes
    worker.runner.resize_kv_cache(worker.num_kv_tokens)
    assert same(results(worker), results(worker_of(folder)))


def test_layers_that_use_torch_run_as_they_are(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "LlamaForCausalLM", vocab_size=211)
    worker, plain = worker_of(folder), worker_of(folder)
    for each in (worker, plain):
        mlp = each.runner.model.layers[0].mlp  # type: ignore[attr-defined]
        act = mlp.act
        mlp.act = lambda x, act=act: act(x).sigmoid()
    recorded_of(plain).lack = "switched off by the test"
    assert same(results(worker), results(plain))
    assert recorded_of(worker).lack == "the layers use aten::sigmoid"
    assert not recorded_of(worker).sizes


def test_larger_batches_run_as_they_are(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "LlamaForCausalLM", vocab_size=211)
    rows = MAX_ROWS + 2
    worker = make_worker(folder, attention_backend="cpu", max_running_requests=rows)
    greedy = Steps(lambda _: SamplingParams(temperature=0.0), max_requests=rows)
    queue = StepQueue(worker)
    for _ in range(12):
        run_step(queue, greedy.next(rows)[0], None)
    drain(queue)
    assert not set(recorded_of(worker).sizes) & {rows, rows - 1}
