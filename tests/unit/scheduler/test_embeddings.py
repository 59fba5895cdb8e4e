"""Requests for embeddings: they end with their prompt, beside requests that generate."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from engine.protocol.messages import AbortRequest
from engine.protocol.pooling import Pooling
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.step import ForwardMode
from engine.scheduler.victims import ends_in_flight
from tests.support.fake_worker import reference_embedding
from tests.support.requests import add_request
from tests.support.scheduler_harness import MODE_IDS, MODES, Harness, prompt

POOLINGS: tuple[Pooling, ...] = ("last", "mean")


@pytest.fixture(params=MODES, ids=MODE_IDS)
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


@pytest.fixture(params=POOLINGS)
def pooling(request: pytest.FixtureRequest) -> Pooling:
    found: Pooling = request.param
    return found


def test_ends_with_its_prompt(mode: dict[str, Any], pooling: Pooling) -> None:
    """Chunks of 16 tokens, no token sampled, no step behind the last chunk."""
    h = Harness(**mode)
    h.embed(1, prompt(random.Random(0), 90), pooling)
    h.run()
    end = h.finished[("c", 1)]
    assert (end.reason, end.num_prompt, end.num_output) == ("stop", 90, 0)
    assert h.embeddings.keys() == {("c", 1)}
    stats = h.scheduler.snapshot_stats()
    assert (stats.steps_total, stats.prompt_tokens_total) == (6, 90)
    assert stats.generation_tokens_total == 0


def test_a_step_of_embeddings_samples_nothing(pooling: Pooling) -> None:
    h = Harness(chunked_prefill_size=64)
    for rid in range(4):
        h.embed(rid, prompt(random.Random(rid), 10), pooling)
    batch = h.scheduler.next_batch(0.0)
    assert batch is not None and batch.pooled is not None
    assert batch.forward_mode is ForwardMode.EXTEND
    assert len(batch.sampled_lines) == 0
    rows = [batch.pooled.last, batch.pooled.mean, batch.pooled.mean_ends]
    given = list(range(4))
    wanted = [given, [], []] if pooling == "last" else [[], given, given]
    assert [found.tolist() for found in rows] == wanted


def test_generation_alone_has_no_trace_of_it() -> None:
    h = Harness()
    h.add(1, [1, 2, 3], 4)
    batch = h.scheduler.next_batch(0.0)
    assert batch is not None and batch.pooled is None
    h.worker.launch(batch)
    result = h.worker.run()
    assert result.embeddings is None
    h.scheduler.process_result(result)
    ((_, out),) = h.scheduler.take_outputs()
    assert out.embeddings is None


def test_the_last_token_may_come_behind_a_cached_prefix(mode: dict[str, Any]) -> None:
    h = Harness(**mode)
    shared = prompt(random.Random(2), 40)
    h.add(1, shared, 2)
    h.run()
    h.embed(2, [*shared, 3], "last")
    h.run()
    assert h.cached[("c", 2)] == h.finished[("c", 2)].num_cached == 40


def test_a_mean_computes_all_and_is_cached_for_others(mode: dict[str, Any]) -> None:
    h = Harness(**mode)
    shared = prompt(random.Random(2), 40)
    h.add(1, shared, 2)
    h.run()
    before = h.worker.prompt_tokens_run
    h.embed(2, shared, "mean")
    h.run()
    assert h.finished[("c", 2)].num_cached == 0
    assert h.worker.prompt_tokens_run == before + 40
    h.scheduler.flush_cache()
    h.embed(3, shared, "mean")
    h.run()
    h.add(4, [*shared, 5], 2)
    h.run()
    assert h.cached[("c", 4)] == 40


def test_prefix_is_shared_within_a_batch(mode: dict[str, Any]) -> None:
    """Equal prompts: one computes for those that take the last state; each mean computes itself."""
    h = Harness(**mode, num_kv_tokens=1024)
    shared = prompt(random.Random(1), 64)
    for rid in range(4):
        h.embed(rid, [*shared, rid], "last")
    for rid in range(4, 7):
        h.embed(rid, [*shared, rid], "mean")
    h.run()
    assert sorted(h.cached.values()) == [0, 0, 0, 0, 64, 64, 64]


def test_the_whole_context_may_be_prompt(pooling: Pooling) -> None:
    h = Harness(num_kv_tokens=96)
    h.embed(1, prompt(random.Random(5), 96), pooling)
    h.run()
    h.embed(2, prompt(random.Random(6), 97), pooling)
    h.collect()
    end = h.finished[("c", 2)]
    assert (end.reason, end.status, end.param) == ("error", 400, "prompt")
    assert "97 tokens" in end.message and "96" in end.message


def test_parameters_of_sampling_do_not_matter() -> None:
    """Those of a request that wants an embedding may be anything, even without a seed."""
    h = Harness()
    params = SamplingParams(temperature=5.0, max_tokens=0, prompt_logprobs=3, logprobs=99)
    ids = np.arange(20, dtype=np.int32)
    h.scheduler.add(
        add_request(rid=1, reply_to="c", input_ids=ids, params=params, pooling="last"), 0.0
    )
    h.run()
    assert h.embeddings[("c", 1)] == reference_embedding(list(range(20)), "last")


def test_readers_get_their_own(mode: dict[str, Any], pooling: Pooling) -> None:
    h = Harness(**mode)
    rng = random.Random(3)
    for rid in range(6):
        h.embed(rid, prompt(rng, 5 + rid), pooling, reply_to="ab"[rid % 2])
        h.add(10 + rid, prompt(rng, 7), 5, reply_to="ab"[rid % 2])
    h.run()
    assert len(h.embeddings) == 6


def test_abort_after_any_number_of_actions(mode: dict[str, Any], pooling: Pooling) -> None:
    for actions in range(12):
        h = Harness(**mode)
        h.embed(1, prompt(random.Random(4), 70), pooling)
        h.embed(2, prompt(random.Random(5), 20), pooling)
        for action in range(actions):
            if action % 2 == 0:
                h.launch()
            elif h.worker.pending:
                h.process()
        if ("c", 1) not in h.finished:
            h.aborted.add(("c", 1))
        h.scheduler.abort(AbortRequest(rid=1, reply_to="c"))
        h.run()
        assert (("c", 1) in h.embeddings) != (("c", 1) in h.aborted)


def test_retraction_of_a_chunk_begins_anew(mode: dict[str, Any], pooling: Pooling) -> None:
    h = Harness(**mode, enable_prefix_cache=pooling == "mean")
    h.embed(1, prompt(random.Random(4), 70), pooling)
    h.launch()
    chunked = h.scheduler.requests.interactive.chunked
    assert chunked is not None
    h.scheduler.requests.retract(chunked)
    h.embed(2, prompt(random.Random(5), 50), pooling)
    h.run()
    assert len(h.embeddings) == 2


def test_vectors_that_are_not_finite_end_their_request_alone(
    mode: dict[str, Any], pooling: Pooling
) -> None:
    h = Harness(**mode)
    h.worker.is_failing = True
    h.embed(1, [1, 2, 3], pooling)
    while not h.finished:
        h.step()
    end = h.finished[("c", 1)]
    assert (end.reason, end.status) == ("error", 500) and "NaN" in end.message
    assert not h.embeddings and h.scheduler.is_idle
    h.check()


def test_an_embedding_in_flight_is_about_to_free_room(mode: dict[str, Any]) -> None:
    """So decodes that lack room wait for it and nothing is retracted."""
    h = Harness(**mode)
    h.embed(1, [1, 2, 3])
    assert not ends_in_flight(h.scheduler.micro_batches)
    h.launch()
    assert ends_in_flight(h.scheduler.micro_batches)
    h.run()
    assert not ends_in_flight(h.scheduler.micro_batches)
