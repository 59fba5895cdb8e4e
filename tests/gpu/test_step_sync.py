"""On a GPU nothing between a step's message and its result makes the host wait for the device.

torch raises at every operation of its own that synchronises while the mode is "error";
tests/unit/worker/test_step_sync does the same on a fake device.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.protocol.sampling_params import SamplingParams
from engine.worker.future_map import FutureMap
from engine.worker.step_queue import StepQueue
from engine.worker.tp_worker import TpModelWorker
from tests.support.gpu_workers import graph_attention, no_sync
from tests.support.models import make_model
from tests.support.worker_driver import MakeParams, Steps, make_worker, params

TARGETS = [3, 3, 3, 7, 7, 9, 9, 9, 4, 4, 12, 12]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("model"), "LlamaForCausalLM", hidden_size=256, head_dim=64
    )


def make(folder: Path, patch: pytest.MonkeyPatch, max_batch_size: int) -> TpModelWorker:
    backend = graph_attention(patch)
    return make_worker(
        folder,
        device="cuda",
        dtype="float32" if backend == "torch" else "bfloat16",
        attention_backend=backend,
        max_batch_size=max_batch_size,
    )


def run_steps(worker: TpModelWorker, make_params: MakeParams, *, constrain: bool) -> None:
    queue = StepQueue(worker)
    steps = Steps(make_params, seed=1, constrain=constrain)
    for target in TARGETS:
        batch, reqs = steps.next(target)
        masks = steps.masks(batch, reqs)
        with no_sync():
            queue.launch(batch)
            if masks is not None:
                queue.apply(masks)
        while len(queue._launched) > 1:
            assert queue.take_oldest() is not None


def seeded(number: int) -> SamplingParams:
    return SamplingParams(temperature=float(number % 2), seed=number)


@pytest.mark.parametrize("max_batch_size", [0, 12], ids=["eager", "graphs"])
def test_steps_never_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch, max_batch_size: int
) -> None:
    worker = make(folder, monkeypatch, max_batch_size)
    run_steps(worker, params, constrain=True)
    run_steps(worker, seeded, constrain=False)


def test_collecting_a_finished_step_never_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make(folder, monkeypatch, 12)
    queue, steps = StepQueue(worker), Steps(seeded, seed=1)
    for _ in range(4):
        batch, _ = steps.next(5)
        queue.launch(batch)
        torch.cuda.synchronize()
        with no_sync():
            [result] = queue.take_ready()
        assert len(result.next_token_ids) == len(batch.sampled_lines)


def test_waiting_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make(folder, monkeypatch, 0)
    resolve = FutureMap.resolve

    def changed(self, batch):  # type: ignore[no-untyped-def]
        resolve(self, batch)
        assert int(batch.input_ids.min()) >= 0

    monkeypatch.setattr(FutureMap, "resolve", changed)
    with pytest.raises(RuntimeError, match="synchroniz"):
        run_steps(worker, seeded, constrain=False)
