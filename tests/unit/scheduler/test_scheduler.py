"""The scheduler against a worker that models KV memory: tokens right, nothing leaks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from engine.constraints import ConstraintSpec
from engine.protocol.messages import AbortRequest
from engine.protocol.sampling_params import SamplingParams
from tests.support.fake_worker import reference
from tests.support.requests import add_request
from tests.support.scheduler_harness import MODE_IDS, MODES, VOCAB, Harness, prompt, random_choices


@pytest.fixture(params=MODES, ids=MODE_IDS)
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


def test_single_request(mode: dict[str, Any]) -> None:
    h = Harness(**mode)
    h.add(1, [1, 2, 3], 10)
    h.run()
    assert h.finished[("c", 1)].reason == "length"


def test_stop_token_ends_and_is_reported(mode: dict[str, Any]) -> None:
    h = Harness(**mode)
    out = reference([5, 6], 20, VOCAB)
    h.add(1, [5, 6], 20, stop=[out[6]])
    h.run()
    end = h.finished[("c", 1)]
    assert (end.reason, end.matched_token) == ("stop", out[6])
    assert h.tokens[("c", 1)] == out[: out.index(out[6]) + 1]


def test_prefix_is_computed_once(mode: dict[str, Any]) -> None:
    h = Harness(**mode, num_kv_tokens=1024)
    rng = random.Random(1)
    shared = prompt(rng, 64)
    for i in range(6):
        h.add(i, shared + prompt(rng, 5), 4)
    h.run()
    assert h.worker.prompt_tokens_run == 64 + 6 * 5
    assert sorted(h.cached.values()) == [0, 64, 64, 64, 64, 64]


def test_namespaces_never_share(mode: dict[str, Any]) -> None:
    h = Harness(**mode)
    shared = prompt(random.Random(2), 40)
    h.add(1, shared, 2, salt="a")
    h.run()
    h.add(2, shared, 2, salt="b")
    h.run()
    assert h.cached[("c", 2)] == 0


def test_prefix_cache_off() -> None:
    h = Harness(enable_prefix_cache=False)
    shared = prompt(random.Random(2), 40)
    h.add(1, shared, 2)
    h.run()
    h.add(2, shared, 2)
    h.run()
    assert h.cached[("c", 2)] == 0
    assert h.scheduler.kv.allocator.available_size() == 256


def test_retraction_loses_nothing(mode: dict[str, Any]) -> None:
    """Long outputs first; short requests then fill the room that they were going to need."""
    h = Harness(**mode, num_kv_tokens=112, schedule_conservativeness=0.01)
    rng = random.Random(3)
    for i in range(2):
        h.add(i, prompt(rng, 10), 48)
    for _ in range(12):
        h.step()
    for i in range(2, 12):
        h.add(i, prompt(rng, 8), 16)
    h.run()
    assert h.scheduler.stats.retractions_total > 0
    assert all(len(v) == (48 if k[1] < 2 else 16) for k, v in h.tokens.items())


def test_priority_order_and_preemption(mode: dict[str, Any]) -> None:
    h = Harness(
        **mode,
        max_running_requests=max(2, mode.get("num_micro_batches", 1)),
        schedule_policy="priority",
        enable_priority_preemption=True,
    )
    rng = random.Random(4)
    for i in range(6):
        h.add(i, prompt(rng, 10), 40, priority=5)
    for _ in range(6):
        h.step()
    h.add(99, prompt(rng, 10), 5, priority=0)
    while ("c", 99) not in h.finished:
        h.step()
        h.check()
    assert h.scheduler.stats.preemptions_total > 0
    assert sum(k != ("c", 99) for k in h.finished) == 0, "the urgent request ends first"
    h.run()


def test_resume_continues_and_counts_as_output(mode: dict[str, Any]) -> None:
    h = Harness(**mode)
    h.add(1, [1, 2, 3, 4, 5], 20, resume=7)
    h.run()
    assert len(h.tokens[("c", 1)]) == 13
    assert h.finished[("c", 1)].num_output == 20


def test_resume_of_a_complete_request_just_ends() -> None:
    h = Harness()
    out = reference([1, 2], 5, VOCAB)
    h.scheduler.add(
        add_request(
            rid=1,
            reply_to="c",
            input_ids=np.asarray([1, 2], np.int32),
            params=SamplingParams(max_tokens=5, seed=0),
            output_ids=np.asarray(out, np.int32),
        ),
        0.0,
    )
    h.collect()
    assert h.finished[("c", 1)].reason == "length"


def test_context_limit_cuts_output(mode: dict[str, Any]) -> None:
    h = Harness(**mode)
    h.add(1, prompt(random.Random(5), 90), 1000)
    h.run()
    assert len(h.tokens[("c", 1)]) == 6
    assert h.finished[("c", 1)].reason == "length"


@pytest.mark.parametrize(
    ("ids", "params", "param"),
    [
        ([], {}, "prompt"),
        ([1] * 96, {}, "prompt"),
        ([1, VOCAB], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ([1], {"seed": None}, "seed"),
        ([1], {"constraint": ConstraintSpec("token_choice", {"choices": []})}, "constraint"),
    ],
)
def test_bad_requests_are_refused_by_name(
    ids: list[int], params: dict[str, Any], param: str
) -> None:
    h = Harness()
    h.scheduler.add(
        add_request(
            rid=1,
            reply_to="c",
            input_ids=np.asarray(ids, np.int32),
            params=SamplingParams(**{"seed": 0, **params}),
        ),
        0.0,
    )
    h.collect()
    end = h.finished[("c", 1)]
    assert (end.reason, end.status, end.param) == ("error", 400, param)
    assert h.scheduler.is_idle


def test_queue_limit_answers_429() -> None:
    h = Harness(max_queued_requests=2)
    for i in range(3):
        h.add(i, [1, 2, 3], 4)
    h.collect()
    assert h.finished[("c", 2)].status == 429
    del h.expected[("c", 2)]
    h.run()


def test_timeouts() -> None:
    h = Harness(max_running_requests=1, queue_timeout_s=1.0, request_timeout_s=5.0)
    h.add(1, [1, 2, 3], 80)
    h.add(2, [4, 5, 6], 80)
    h.step()
    h.now += 2.0
    h.step()
    assert h.finished[("c", 2)].status == 503
    h.now += 5.0
    for _ in range(3):
        h.step()
    assert h.finished[("c", 1)].status == 408
    h.run()


def test_outputs_are_grouped_by_reader(mode: dict[str, Any]) -> None:
    h = Harness(**mode)
    for i in range(6):
        h.add(i // 2, [i, i + 1, i + 2], 6, reply_to=f"c{i % 2}")
    h.run()
    assert len(h.finished) == 6


def test_abort_in_every_state(mode: dict[str, Any]) -> None:
    """Waiting, mid-chunk, prefill in flight, decoding, retracting: abort at every step."""
    for when in range(14):
        h = Harness(**mode, num_kv_tokens=128, schedule_conservativeness=0.01)
        rng = random.Random(when)
        for i in range(6):
            h.add(i, prompt(rng, 30 if i == 0 else 10), 40)
        for _ in range(when):
            h.launch()
            if h.worker.pending and rng.random() < 0.7:
                h.process()
        for rid in (0, 3):
            h.aborted.add(("c", rid))
            h.scheduler.abort(AbortRequest(rid=rid, reply_to="c"))
            h.check()
        h.run()


def test_abort_reader_drops_all_of_it(mode: dict[str, Any]) -> None:
    h = Harness(**mode)
    for i in range(5):
        h.add(i, [i, 1, 2], 30, reply_to="gone")
    h.add(1, [9, 9], 10)
    for _ in range(4):
        h.step()
    h.aborted.update(("gone", i) for i in range(5))
    h.scheduler.abort_reader("gone")
    h.run()


def test_flush_only_when_idle() -> None:
    h = Harness()
    h.add(1, prompt(random.Random(1), 20), 4)
    h.step()
    assert not h.scheduler.flush_cache()
    h.run()
    assert h.scheduler.kv.tree.total_size > 0
    assert h.scheduler.flush_cache()
    assert h.scheduler.kv.tree.total_size == 0
    h.check()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("policy", ["lpm", "fcfs", "priority"])
@pytest.mark.parametrize("seed", [0, 1])
def test_random_storm(mode: dict[str, Any], page_size: int, policy: str, seed: int) -> None:
    """20,000 and more random actions over all parameters together, invariant after each."""
    rng = random.Random(f"{page_size}{policy}{seed}{mode}")
    h = Harness(
        **mode,
        page_size=page_size,
        num_kv_tokens=rng.choice([112, 160, 400]),
        schedule_policy=policy,
        enable_priority_preemption=policy == "priority" and rng.random() < 0.7,
        enable_mixed_chunk=rng.random() < 0.5,
        chunked_prefill_size=rng.choice([-1, 16, 32]),
        max_prefill_tokens=rng.choice([96, 200]),
        schedule_conservativeness=rng.choice([0.01, 0.3, 1.0]),
        enable_prefix_cache=rng.random() < 0.8,
        eviction_policy=rng.choice(["lru", "lfu", "fifo", "priority"]),
        eos_token_ids=rng.choice([(), (7,), (7, 49)]),
    )
    stems = [prompt(rng, 50) for _ in range(3)]
    next_rid = 0
    live: list[tuple[str, int]] = []
    for _ in range(400):
        action = rng.random()
        if action < 0.15 and len(h.scheduler.requests.by_key) < 30:
            stem = rng.choice(stems)[: rng.randrange(1, 50)]
            ids = stem + prompt(rng, rng.randrange(0, 20))
            reply_to = rng.choice(["a", "b"])
            stop = [rng.choice([rng.randrange(VOCAB), 21])] if rng.random() < 0.5 else None
            h.add(
                next_rid,
                ids,
                rng.randrange(1, 40),
                reply_to=reply_to,
                stop=stop,
                priority=rng.randrange(3),
                salt=rng.choice(["", "", "x"]),
                resume=rng.randrange(5) if rng.random() < 0.2 else 0,
                choices=random_choices(rng) if rng.random() < 0.4 else None,
                ignore_eos=rng.random() < 0.3,
            )
            live.append((reply_to, next_rid))
            next_rid += 1
        elif action < 0.19 and live:
            key = live.pop(rng.randrange(len(live)))
            if key not in h.finished:
                h.aborted.add(key)
                h.scheduler.abort(AbortRequest(rid=key[1], reply_to=key[0]))
        elif action < 0.20:
            running = [r for m in h.scheduler.micro_batches for r in m.running.reqs]
            if running:
                h.scheduler.requests.retract(rng.choice(running))
        elif action < 0.21:
            h.scheduler.kv.tree.evict(rng.randrange(1, 40))
        elif action < 0.60:
            h.launch()
        elif h.worker.pending:
            h.process()
        h.check()
        h.scheduler.flush_cache()
    h.run()
