"""Placeholders for tokens that are still in flight, and what may be done with them by mistake.

The pitfalls of design §3 and the first four of roseinfer's six. Every test drives the scheduler or
the worker into one dangerous situation and says what is right. tests/mutations takes out what the
tests rely on, and they have to fail.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.attention.forward_batch import ForwardBatch
from engine.config import EngineConfig
from engine.protocol.step import GenerationBatchResult, ModelWorkerBatch, SampleMasks
from engine.worker.base import LaunchedForward, ModelWorker, PendingResult
from engine.worker.future_map import FutureMap
from engine.worker.step_queue import StepQueue
from tests.support.fake_worker import reference
from tests.support.overlap import Overlap, Reader, tiny_tokenizer, two_running
from tests.support.scheduler_harness import VOCAB, Harness

NONE = np.zeros(0, np.int32)


def test_placeholders_do_not_count_as_output() -> None:
    """Roseinfer's 2nd: tokens in flight would end a request too early."""
    h = Overlap(request_timeout_s=1.0)
    for rid in (1, 2):
        h.add(rid, [rid, 2, 3], 10)
    h.run()
    for rid in (1, 2):
        end = h.finished[("c", rid)]
        assert (end.reason, end.num_output) == ("length", 10)
    h.add(3, [7, 8, 9], 40)
    for _ in range(5):
        h.step()
    h.now += 2.0
    h.launch()
    h.collect()
    end = h.finished[("c", 3)]
    assert end.status == 408 and end.num_output == len(h.tokens[("c", 3)]) == 5
    h.run()


def test_no_step_beyond_the_last_token() -> None:
    """The other half: what is in flight does count where more is launched."""
    for max_tokens in (1, 2, 7):
        h = Overlap()
        h.add(1, [1, 2, 3], max_tokens)
        h.run()
        assert h.scheduler.stats.steps_total == max_tokens, "a step for a token beyond the limit"


def test_placeholders_never_reach_the_detokenizer() -> None:
    """Roseinfer's 3rd."""
    h = Reader([1, 2, 3], 20)
    h.drain()
    assert h.text == tiny_tokenizer().decode(reference([1, 2, 3], 20, VOCAB))
    assert h.end == ("length", None)


def test_tokens_of_a_failed_row_are_no_output() -> None:
    """A row of NaN samples a token that means nothing; the next one is in flight already."""
    h = two_running()
    run = h.worker.run

    def poisoned() -> GenerationBatchResult:
        result = run()
        result.line_errors = {0: "NaN"}
        return result

    h.worker.run = poisoned  # type: ignore[method-assign]
    h.process()
    h.worker.run = run  # type: ignore[method-assign]
    end = h.finished[("c", 1)]
    assert end.status == 500 and end.num_output == len(h.tokens[("c", 1)]) == 1
    h.check_in_flight()
    del h.expected[("c", 1)]
    h.run()
    assert h.released == {1: 1, 2: 1}


def test_input_is_the_token_of_the_step_before() -> None:
    """Roseinfer's 4th, and its 1st: the buffer that a captured graph reads is filled in place."""
    futures = FutureMap(4, torch.device("cpu"))
    futures.store(torch.tensor([1, 2]), torch.tensor([11, 22]))
    mixed = ModelWorkerBatch(
        step=2,
        micro_batch=0,
        req_pool_indices=np.array([3, 2, 1], np.int32),
        query_lens=np.array([2, 1, 1], np.int32),
        num_sampled=np.ones(3, np.int32),
        seq_lens=np.array([2, 5, 9], np.int32),
        input_ids=np.array([5, 6, -1, 40], np.int32),
        out_cache_loc=np.arange(4, dtype=np.int32),
        prefix_rows=NONE,
        prefix_lens=NONE,
        prefix_locs=NONE,
        new_rows=[],
    )
    forward = ForwardBatch.from_worker_batch(mixed, torch.device("cpu"))
    captured = forward.input_ids
    futures.resolve(forward)
    futures.store(forward.req_pool_indices, torch.tensor([33, 23, 12]))
    assert captured.tolist() == [5, 6, 22, 40]
    assert futures.tokens[1:].tolist() == [12, 23, 33]


def test_messages_keep_their_inputs() -> None:
    """Roseinfer's 4th on the scheduler's side: composing step t + 1 changes nothing in step t.

    A worker in the same process may still hold the message itself.
    """
    h = Overlap()
    held: list[tuple[ModelWorkerBatch, ModelWorkerBatch]] = []
    launch = h.worker.launch

    def hold(batch: ModelWorkerBatch) -> None:
        held.append((batch, deepcopy(batch)))
        launch(batch)

    h.worker.launch = hold  # type: ignore[method-assign]
    for rid in (1, 2, 3):
        h.add(rid, [rid, 2, 3], 4 * rid)
    for turn in range(30):
        if turn == 3:
            h.abort(2)
        h.step()
    for batch, before in held:
        for name in batch.__struct_fields__:
            assert np.array_equal(getattr(batch, name), getattr(before, name)), f"{name} changed"
    h.run()


def test_sent_tokens_are_the_last_ones() -> None:
    """Stages before the last one get the token itself: no step of theirs before it is known."""
    assert EngineConfig(pp_size=2).lookahead == 1
    h = Harness(lookahead=1, num_micro_batches=2, pp_size=2, max_micro_batch_size=4)
    h.add(1, [1, 2, 3], 10)
    h.launch()
    h.process()
    h.launch()
    h.launch()
    h.run()


@dataclass
class EchoWorker(ModelWorker):
    """Its next token is the input plus one; the only slot's last token is 10."""

    last: dict[int, int] = field(default_factory=lambda: {1: 10})

    def forward(self, batch: ModelWorkerBatch) -> LaunchedForward:
        return EchoForward(batch, self, self.last[int(batch.req_pool_indices[0])])


@dataclass
class EchoForward(LaunchedForward):
    worker: EchoWorker
    input_id: int

    def sample(self, masks: SampleMasks | None) -> PendingResult:
        self.worker.last[int(self.batch.req_pool_indices[0])] = self.input_id + 1
        return EchoResult(self.batch.step, self.input_id + 1)


@dataclass
class EchoResult(PendingResult):
    step: int
    token: int

    def seconds_left(self) -> float:
        return 0.0

    def collect(self) -> GenerationBatchResult:
        return GenerationBatchResult(self.step, [self.token])


def test_forward_waits_for_the_token_of_a_delayed_sample() -> None:
    """Step t + 1 comes while step t still waits for its mask: its input isn't there yet."""
    queue = StepQueue(EchoWorker())
    one = np.array([1], np.int32)
    for step in (1, 2):
        length = one + step
        decode = ModelWorkerBatch(
            step, 0, one, one, one, length, -one, length, NONE, NONE, NONE, [],
            delayed_sample=step == 1,
        )  # fmt: skip
        queue.launch(decode)
    queue.apply(SampleMasks(1, NONE, np.zeros((0, 2), np.uint32)))
    tokens = [result.next_token_ids[0] for result in queue.take_ready()]
    assert tokens == [11, 12], "a step read a token older than its last"
