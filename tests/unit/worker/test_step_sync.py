"""Nothing between a step's message and its result makes the host wait for the device.

Run on a fake CUDA device (`tests/support/fake_cuda`), which raises where CUDA would wait. tests/gpu
does the same on a real one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.torch_backend import TorchAttentionBackend
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.step import ModelWorkerBatch, PooledLines
from engine.sampling.torch_backend import TorchSampling
from engine.worker.future_map import FutureMap
from engine.worker.graphs.backend import GraphBackend
from engine.worker.step_queue import StepQueue
from engine.worker.tp_worker import TpModelWorker
from tests.support.fake_cuda import FakeCuda, SyncError, pinned, use_fake_cuda
from tests.support.fake_graphs import use_capturable_attention
from tests.support.models import make_model
from tests.support.worker_driver import MakeParams, Steps, make_worker, params

NOTICED = (SyncError, RuntimeError)
"""Some reads torch itself refuses: fake tensors have no values, and there is no CUDA to ask."""
TARGETS = [6, 11, 11, 4, 4, 4]
"""All of `params` are there in the second step."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "LlamaForCausalLM", num_hidden_layers=1)


@pytest.fixture(autouse=True)
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_cuda(monkeypatch)


def greedy_or_seeded(number: int) -> SamplingParams:
    return SamplingParams(temperature=float(number % 2), seed=number)


class CallAgain(GraphBackend):
    """A replay calls what was captured once more."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    def free_bytes(self) -> int:
        return 1 << 40


def run_steps(
    worker: TpModelWorker, make_params: MakeParams = params, *, constrain: bool = True
) -> None:
    """Launch steps and collect each after the next one's launch."""
    queue = StepQueue(worker)
    steps = Steps(make_params, seed=1, constrain=constrain)
    launched: list[int] = []
    collected: list[int] = []
    for target in TARGETS:
        with FakeCuda():
            batch, reqs = steps.next(target)
            if batch.new_rows:
                batch.next_prompt_ids = next_ids(batch)
            masks = steps.masks(batch, reqs)
            launched.append(len(reqs))
            queue.launch(batch)
            if masks is not None:
                queue.apply(masks)
        while len(queue._launched) > 1:
            result = queue.take_oldest()
            assert result is not None
            collected.append(len(result.next_token_ids))
    assert collected == launched[:-1]


def next_ids(batch: ModelWorkerBatch) -> np.ndarray:
    """As if every new request wanted prompt log-probabilities that has any."""
    found = np.full(len(batch.query_lens), -2, np.int32)
    for line, item in enumerate(batch.new_rows):
        if item.params.prompt_logprobs is not None:
            found[line] = -1
    return found


def make(folder: Path, max_batch_size: int = 0) -> TpModelWorker:
    with FakeCuda(may_wait=True):
        backend = CallAgain() if max_batch_size else None
        return make_worker(
            folder,
            device="cuda:0",
            load_format="dummy",
            graph_backend=backend,
            max_batch_size=max_batch_size,
        )


def test_eager_steps_never_wait(folder: Path) -> None:
    run_steps(make(folder))


@pytest.mark.parametrize("prompt_logprobs", [None, 2])
def test_steps_with_embeddings_never_wait(folder: Path, prompt_logprobs: int | None) -> None:
    """Rows that are pooled beside rows that sample, and alone."""
    worker = make(folder)
    queue = StepQueue(worker)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=prompt_logprobs)
    steps = Steps(lambda number: sampling, seed=1)
    for number, target in enumerate((6, 11, 15)):
        with FakeCuda():
            batch, _ = steps.next(target)
            fresh = np.arange(len(batch.new_rows), dtype=np.int32)
            batch.pooled = PooledLines(fresh[1::2], fresh[::2], fresh[2::2])
            batch.num_sampled[fresh] = 0
            if prompt_logprobs is not None:
                batch.next_prompt_ids = next_ids(batch)
            queue.launch(batch)
        (result,) = queue.take_ready()
        assert len(result.embeddings or []) == len(fresh) - 1, number


def test_captured_steps_never_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_capturable_attention(monkeypatch)
    monkeypatch.setattr(
        "engine.worker.graphs.decode_graphs.DecodeGraphs._anywhere", lambda self, x: x
    )
    worker = make(folder, max_batch_size=4)
    assert worker.graphs is not None
    sampled: list[int] = []
    sample = worker.graphs.sample
    worker.graphs.sample = lambda *args: sampled.append(1) or sample(*args)  # type: ignore
    run_steps(worker, greedy_or_seeded, constrain=False)
    assert len(sampled) >= 3
    run_steps(worker)


def test_results_are_collected_without_a_device(folder: Path) -> None:
    """Outside of the fake device nothing on it could be read: collecting reads host memory only."""
    worker = make(folder)
    queue = StepQueue(worker)
    with FakeCuda():
        queue.launch(Steps(params, seed=1).next(5)[0])
    [result] = queue.take_ready()
    assert len(result.next_token_ids) == 5
    assert result.device_s == 0.0


def add_to_forward(patch: pytest.MonkeyPatch, extra: Callable[[Any], object]) -> None:
    forward = TorchAttentionBackend.forward

    def changed(self, q, k, v, layer, batch):  # type: ignore[no-untyped-def]
        extra(batch)
        return forward(self, q, k, v, layer, batch)

    patch.setattr(TorchAttentionBackend, "forward", changed)


@pytest.mark.parametrize(
    "extra",
    [
        lambda batch: batch.seq_lens.max().item(),
        lambda batch: int(batch.seq_lens[0]),
        lambda batch: bool((batch.input_ids < 0).any()),
        lambda batch: batch.seq_lens.cpu(),
        lambda batch: batch.seq_lens.to("cpu", non_blocking=True),
        lambda batch: (batch.input_ids > 3).nonzero(),
        lambda batch: batch.input_ids[batch.input_ids > 3],
        lambda batch: torch.from_numpy(np.zeros(3)).to(batch.seq_lens.device),
        lambda batch: torch.from_numpy(np.zeros(3)).to(batch.seq_lens.device, non_blocking=True),
        lambda batch: pinned(torch.zeros(3)).to(batch.seq_lens.device),
    ],
    ids=[
        "item",
        "int",
        "bool",
        "cpu",
        "pageable-target",
        "nonzero",
        "mask",
        "pageable",
        "pageable-non-blocking",
        "pinned-blocking",
    ],
)
def test_waiting_in_the_forward_is_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, extra: Callable[[Any], object]
) -> None:
    add_to_forward(monkeypatch, extra)
    worker = make(folder)
    with pytest.raises(NOTICED):
        run_steps(worker)


@pytest.mark.parametrize("how", ["tolist", "numpy"])
def test_reading_a_tensor_as_a_whole_is_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    add_to_forward(monkeypatch, lambda batch: getattr(batch.seq_lens, how)())
    worker = make(folder)
    with pytest.raises(NOTICED):
        run_steps(worker)


def test_waiting_in_the_sampler_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = TorchSampling.sample

    def changed(self, logits, *more):  # type: ignore[no-untyped-def]
        if logits.isnan().any():
            raise ValueError("NaN")
        return sample(self, logits, *more)

    monkeypatch.setattr(TorchSampling, "sample", changed)
    worker = make(folder)
    with pytest.raises(NOTICED):
        run_steps(worker)


def test_waiting_around_a_graph_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_capturable_attention(monkeypatch)
    monkeypatch.setattr(
        "engine.worker.graphs.decode_graphs.DecodeGraphs._anywhere", lambda self, x: x
    )
    worker = make(folder, max_batch_size=4)
    resolve = FutureMap.resolve

    def changed(self, batch):  # type: ignore[no-untyped-def]
        resolve(self, batch)
        assert int(batch.input_ids.min()) >= 0

    monkeypatch.setattr(FutureMap, "resolve", changed)
    with pytest.raises(NOTICED):
        run_steps(worker)


def test_steps_are_uploaded_at_once(folder: Path) -> None:
    """One transfer brings all arrays of a decode step."""
    worker = make(folder)
    queue = StepQueue(worker)
    steps = Steps(lambda number: SamplingParams(temperature=0.0), seed=1)
    copies: list[int] = []
    copy = worker.queue.staging.copy  # type: ignore[attr-defined]

    def counted(parts: Any, target: torch.Tensor) -> None:
        copies.append(len(parts))
        copy(parts, target)

    worker.queue.staging.copy = counted  # type: ignore[attr-defined]
    for target in (4, 4, 4):
        batch: ModelWorkerBatch
        batch, _ = steps.next(target)
        with FakeCuda():
            queue.launch(batch)
        assert queue.take_oldest() is not None
    assert copies == [10, 10, 10]
