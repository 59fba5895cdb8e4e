"""`StepQueue`: order of forwards, delayed samples, order of results; `SimulatedWorker`."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from engine.config import EngineConfig, SimulatedDevice
from engine.device.distributed import ParallelState
from engine.protocol.step import GenerationBatchResult, ModelWorkerBatch, PooledLines, SampleMasks
from engine.trace import StageSpan, TraceRing
from engine.worker.auto_config import make_worker_config
from engine.worker.base import LaunchedForward, ModelWorker, PendingResult
from engine.worker.simulated import SimulatedWorker
from engine.worker.step_queue import StepQueue
from engine.worker.tp_worker import allowed_tokens
from tests.support.steps import NONE, decode_step, no_masks


class RecordingWorker(ModelWorker):
    """Notes what was launched; results are ready when the test says so."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.busy: set[int] = set()

    def forward(self, batch: ModelWorkerBatch) -> LaunchedForward:
        self.log.append(f"forward {batch.step}")
        return RecordingForward(batch, self)


@dataclass
class RecordingForward(LaunchedForward):
    worker: RecordingWorker

    def sample(self, masks: SampleMasks | None) -> PendingResult:
        assert (masks is not None) == self.batch.delayed_sample
        self.worker.log.append(f"sample {self.batch.step}")
        return RecordingResult(self.batch.step, self.worker)


@dataclass
class RecordingResult(PendingResult):
    step: int
    worker: RecordingWorker

    def seconds_left(self) -> float:
        return 1.0 if self.step in self.worker.busy else 0.0

    def collect(self) -> GenerationBatchResult:
        return GenerationBatchResult(self.step, NONE)


def ready(queue: StepQueue) -> list[int]:
    return [result.step for result in queue.take_ready()]


def test_forward_of_a_delayed_step_starts_at_once() -> None:
    worker = RecordingWorker()
    queue = StepQueue(worker)
    queue.launch(decode_step(1, [1, 2], delayed=True))
    assert worker.log == ["forward 1"]
    assert ready(queue) == [] and queue.seconds_left() is None
    queue.apply(no_masks(1))
    assert worker.log == ["forward 1", "sample 1"]
    assert ready(queue) == [1]


def test_step_without_constraint_never_waits() -> None:
    worker = RecordingWorker()
    queue = StepQueue(worker)
    queue.launch(decode_step(1, [1], delayed=True))
    queue.launch(decode_step(2, [2], micro_batch=1))
    assert worker.log == ["forward 1", "forward 2", "sample 2"]
    assert ready(queue) == [2]
    queue.apply(no_masks(1))
    assert ready(queue) == [1]


def test_results_of_a_micro_batch_keep_their_order() -> None:
    worker = RecordingWorker()
    queue = StepQueue(worker)
    queue.launch(decode_step(1, [1], delayed=True))
    queue.launch(decode_step(2, [2]))  # other requests: it runs, but its result stands behind
    assert worker.log[-1] == "sample 2"
    assert ready(queue) == [] and queue.take_oldest() is None
    queue.apply(no_masks(1))
    assert ready(queue) == [1, 2]


def test_step_that_needs_a_delayed_token_waits_for_it() -> None:
    worker = RecordingWorker()
    queue = StepQueue(worker)
    queue.launch(decode_step(1, [1, 2], delayed=True))
    queue.launch(decode_step(2, [2, 3], delayed=True))
    queue.launch(decode_step(3, [4]))  # behind a deferred one: KV must be written in order
    assert worker.log == ["forward 1"]
    queue.apply(no_masks(2))  # masks of a deferred step are kept
    queue.apply(no_masks(1))
    assert worker.log == [
        "forward 1",
        "sample 1",
        "forward 2",
        "sample 2",
        "forward 3",
        "sample 3",
    ]
    assert ready(queue) == [1, 2, 3]


def test_busy_device_holds_back_results_of_its_micro_batch_only() -> None:
    worker = RecordingWorker()
    queue = StepQueue(worker)
    worker.busy = {1}
    queue.launch(decode_step(1, [1]))
    queue.launch(decode_step(2, [2]))
    queue.launch(decode_step(3, [3], micro_batch=1))
    assert ready(queue) == [3] and queue.seconds_left() == 0.0
    worker.busy = set()
    assert ready(queue) == [1, 2] and queue.seconds_left() is None


def test_allowed_tokens_unpacks_named_lines_only() -> None:
    masks = np.zeros((3, 3), np.uint32)
    masks[0, 0], masks[0, 2] = 1 << 31 | 1 << 3, 1 << 5
    masks[1, 1], masks[2, 0] = 1, 2
    cpu = torch.device("cpu")

    def unpacked(lines: list[int], run_lens: list[int]) -> torch.Tensor:
        sent = SampleMasks(1, np.asarray(lines, np.int32), masks[: len(lines)])
        return allowed_tokens(sent, np.asarray(run_lens), 70, cpu)

    allowed = unpacked([1], [1, 1, 1])
    assert allowed.shape == (3, 70)
    assert allowed[0].all() and allowed[2].all()
    assert allowed[1].nonzero().flatten().tolist() == [3, 31, 69]
    # A line with a draft has a mask for each of its tokens.
    allowed = unpacked([0, 2, 2], [1, 3, 2])
    assert [row.nonzero().flatten().tolist() for row in allowed[[0, 4, 5]]] == [
        [3, 31, 69],
        [32],
        [1],
    ]
    assert allowed[1:4].all()
    with pytest.raises(ValueError, match="other drafts"):
        unpacked([0, 2, 2], [1, 2, 1])


# The simulated device


def simulated(
    step_ms: float, parallel: ParallelState | None = None
) -> tuple[SimulatedWorker, TraceRing[StageSpan]]:
    device = SimulatedDevice(step_ms=step_ms)
    config = EngineConfig(device="simulated", simulated=device, max_running_requests=8)
    trace: TraceRing[StageSpan] = TraceRing()
    worker = make_worker_config(config.resolve())
    return SimulatedWorker(worker, parallel or ParallelState.single(), trace), trace


def test_cost_model() -> None:
    device = SimulatedDevice(step_ms=2.0, token_us=10.0, context_ns=5.0)
    assert device.seconds(100, 1000) == pytest.approx(2e-3 + 1e-3 + 5e-6)


def test_steps_follow_each_other_on_the_timeline() -> None:
    worker, trace = simulated(30.0)
    queue = StepQueue(worker)
    queue.launch(decode_step(1, [1]))
    queue.launch(decode_step(2, [1], length=6))
    first, second = trace.snapshot()
    assert second.started_at == first.ended_at  # no gap: the second was here in time
    assert ready(queue) == []
    left = queue.seconds_left()
    assert left is not None and 0.0 < left <= 0.03
    time.sleep(first.ended_at - time.monotonic())
    assert ready(queue) == [1]
    oldest = queue.take_oldest()
    assert oldest is not None and oldest.step == 2 and oldest.device_s == pytest.approx(0.03)
    assert time.monotonic() >= second.ended_at


def test_simulated_tokens_depend_on_the_sequence_alone() -> None:
    """Alone or in a batch, and from the FutureMap or from the message."""

    def run(rows: list[int], steps: int) -> dict[int, list[int]]:
        worker, _ = simulated(0.0)
        queue = StepQueue(worker)
        tokens: dict[int, list[int]] = {row: [] for row in rows}
        for step in range(1, steps + 1):
            batch = decode_step(step, rows, length=10 + step)
            if step == 1:
                batch.input_ids = np.asarray([100 + row for row in rows], np.int32)
            queue.launch(batch)
            result = queue.take_oldest()
            assert result is not None
            for row, token in zip(rows, result.next_token_ids, strict=True):
                tokens[row].append(token)
        return tokens

    together = run([1, 2, 3], 20)
    assert together[2] == run([2], 20)[2]
    assert together[1] != together[2]


def test_simulated_embeddings_depend_on_the_prompt_alone() -> None:
    def run(lens: list[int], pooled: PooledLines) -> list[bytes]:
        worker, _ = simulated(0.0)
        queue = StepQueue(worker)
        batch = decode_step(1, list(range(1, len(lens) + 1)))
        batch.query_lens = np.asarray(lens, np.int32)
        batch.input_ids = np.concatenate([np.arange(10, 10 + n, dtype=np.int32) for n in lens])
        batch.seq_lens = batch.query_lens + 4
        batch.num_sampled = np.zeros(len(lens), np.int32)
        batch.pooled = pooled
        queue.launch(batch)
        result = queue.take_oldest()
        assert result is not None and result.next_token_ids == []
        return result.embeddings or []

    one, two = np.asarray([0], np.int32), np.asarray([1], np.int32)
    together = run([5, 7], PooledLines(two, one, one))
    assert together == [
        *run([7], PooledLines(one, NONE, NONE)),
        *run([5], PooledLines(NONE, one, one)),
    ]
    vectors = [np.frombuffer(data, np.float32) for data in together]
    assert len(vectors[0]) == 256 and not np.array_equal(*vectors)
    assert run([5], PooledLines(NONE, one, NONE)) == []


def test_simulated_worker_honours_masks() -> None:
    worker, _ = simulated(0.0)
    queue = StepQueue(worker)
    masks = np.zeros((1, -(-worker_vocab() // 32)), np.uint32)
    masks[0, 1] = 1 << 7
    queue.launch(decode_step(1, [1, 2], delayed=True))
    queue.apply(SampleMasks(1, np.asarray([1], np.int32), masks))
    result = queue.take_oldest()
    assert result is not None and result.next_token_ids[1] == 39 and result.line_errors is None
    queue.launch(decode_step(2, [1, 2], delayed=True))
    queue.apply(SampleMasks(2, np.asarray([0], np.int32), np.zeros_like(masks)))
    result = queue.take_oldest()
    assert result is not None and list(result.line_errors or {}) == [0]


def worker_vocab() -> int:
    return EngineConfig().resolve().model.vocab_size
