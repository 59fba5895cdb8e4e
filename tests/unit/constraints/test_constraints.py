"""Constraints, and the delayed samples that carry their masks."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.constraints import ConstraintSpec, create_constraint, mask_words
from engine.constraints.base import Constraint, allow_tokens
from engine.constraints.token_choice import MAX_CHOICE_TOKENS
from engine.errors import RequestError
from engine.protocol.encoding import decode, encode
from engine.protocol.messages import AbortRequest, AddRequest
from engine.protocol.step import ModelWorkerBatch
from tests.support.fake_worker import allowed_tokens
from tests.support.requests import add_request
from tests.support.scheduler_harness import (
    MODE_IDS,
    MODES,
    VOCAB,
    Harness,
    prompt,
    random_choices,
)

MODEL = str(Path(__file__).resolve().parents[3] / "models" / "manta-small")


def token_choice(*choices: list[int]) -> ConstraintSpec:
    return ConstraintSpec("token_choice", {"choices": list(choices)})


def allowed(constraint: Constraint, vocab: int = VOCAB) -> set[int]:
    mask = np.full(mask_words(vocab), 0xDEADBEEF, np.uint32)  # what it held doesn't matter
    constraint.fill_mask(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


# The trie


@pytest.mark.parametrize("eos", [(), (7,), (7, 49)])
@pytest.mark.parametrize("seed", range(30))
def test_token_choice_allows_what_some_choice_allows(seed: int, eos: tuple[int, ...]) -> None:
    rng = random.Random(seed)
    choices = random_choices(rng)
    constraint = create_constraint(token_choice(*choices), VOCAB, eos)
    out: list[int] = []
    while True:
        may = allowed_tokens(out, choices, eos)
        assert allowed(constraint) == may
        assert constraint.is_terminated == (not may)
        for token in set(range(VOCAB)) - may:
            assert not constraint.accept(token)
        assert allowed(constraint) == may, "a refused token changes nothing"
        if not may:
            assert out in choices
            return
        token = rng.choice(sorted(may))
        assert constraint.accept(token)
        if token in eos:
            assert out in choices
            assert constraint.is_terminated and not allowed(constraint)
            assert not any(constraint.accept(t) for t in range(VOCAB))
            return
        out.append(token)


def test_mask_bits_at_word_borders() -> None:
    assert [mask_words(n) for n in (1, 32, 33, 64, 65)] == [1, 1, 2, 2, 3]
    mask = np.zeros(3, np.uint32)
    allow_tokens(mask, [0, 31, 32, 63, 64])
    assert mask.tolist() == [0x80000001, 0x80000001, 1]
    allow_tokens(mask, [1])
    assert mask.tolist() == [0x80000003, 0x80000001, 1]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (ConstraintSpec("regexp", {}), "kind 'regexp' is unknown; choose one of token_choice"),
        (ConstraintSpec("token_choice", {}), "missing required field `choices`"),
        (ConstraintSpec("token_choice", {"choices": [[1]], "x": 1}), "unknown field `x`"),
        (ConstraintSpec("token_choice", {"choices": [1]}), r"\$.choices\[0\]"),
        (ConstraintSpec("token_choice", {"choices": [["a"]]}), r"\$.choices\[0\]\[0\]"),
        (token_choice(), "at least one sequence"),
        (token_choice([1], []), "at least one token"),
        (token_choice([1, -1]), "token id -1 is outside the vocabulary"),
        (token_choice([1], [2, VOCAB]), f"token id {VOCAB} is outside the vocabulary"),
        (token_choice([2**70]), "constraint"),
        (token_choice([1] * (MAX_CHOICE_TOKENS + 1)), "more than"),
    ],
)
def test_bad_specs_are_refused_by_name(spec: ConstraintSpec, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        SamplingParams(constraint=spec).verify(VOCAB)
    assert (refused.value.param, refused.value.status) == ("constraint", 400)
    with pytest.raises(RequestError, match=words):
        create_constraint(spec, VOCAB, ())


def test_choices_must_not_hold_the_token_that_ends_them() -> None:
    h = Harness(eos_token_ids=(7,))
    params = SamplingParams(seed=0, constraint=token_choice([1, 7, 2]))
    h.scheduler.add(add_request(rid=1, reply_to="c", input_ids=ints([1]), params=params), 0.0)
    h.collect()
    end = h.finished[("c", 1)]
    assert (end.reason, end.status, end.param) == ("error", 400, "constraint")
    h.add(2, [1, 2], choices=[[1, 7, 2]], ignore_eos=True)
    h.run()
    assert h.tokens[("c", 2)] == [1, 7, 2]


def test_specs_travel_to_the_scheduler_and_not_to_workers() -> None:
    spec = token_choice([1, 2], [3])
    sent = add_request(rid=1, input_ids=ints([5]), params=SamplingParams(seed=0, constraint=spec))
    got = decode([bytes(f) for f in encode(sent)], AddRequest)
    assert got.sequence.params.constraint == spec
    h = Harness()
    h.scheduler.add(got, 0.0)
    batch = h.scheduler.next_batch(0.0)
    assert batch is not None and batch.delayed_sample
    assert batch.new_rows[0].params == SamplingParams(seed=0)
    assert got.sequence.params.constraint == spec


# Delayed samples


def ints(values: list[int]) -> np.ndarray:
    return np.asarray(values, np.int32)


def launch(h: Harness) -> ModelWorkerBatch:
    """Launch a step without sending masks."""
    h.now += 0.001
    batch = h.scheduler.next_batch(h.now)
    assert batch is not None
    h.worker.launch(batch)
    return batch


@pytest.fixture(params=MODES, ids=MODE_IDS)
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


def test_overlap_launches_before_the_mask_and_masks_after_the_result() -> None:
    h = Harness(lookahead=2, eos_token_ids=(7,))
    h.add(1, [1, 2, 3], choices=[[20, 21, 22], [20, 22, 21], [21, 20, 20]])
    first = launch(h)
    assert first.delayed_sample
    (masks,) = h.scheduler.take_masks()
    assert (masks.step, masks.lines.tolist()) == (first.step, [0])
    h.worker.sample(masks)
    second = launch(h)
    assert second.delayed_sample
    assert h.scheduler.take_masks() == [], "it depends on the first token"
    h.scheduler.process_result(h.worker.run())
    (masks,) = h.scheduler.take_masks()
    assert masks.step == second.step
    token = h.scheduler.requests.by_key[("c", 1)].output_ids[0]
    expected = np.zeros(mask_words(VOCAB), np.uint32)
    allow_tokens(expected, {20: [21, 22], 21: [20]}[token])
    assert masks.masks.tolist() == [expected.tolist()]
    h.worker.sample(masks)
    assert h.scheduler.take_masks() == []
    h.run()


def test_only_batches_that_sample_a_constrained_row_are_delayed(mode: dict[str, Any]) -> None:
    """Chunks before the last don't sample; others run on before, beside and after it."""
    h = Harness(**mode, chunked_prefill_size=8, max_running_requests=4)
    h.add(1, [1, 2, 3], 30)
    seen: list[bool] = []
    for _ in range(3):
        seen.append(launch(h).delayed_sample)
        assert h.scheduler.take_masks() == []
        h.process()
    h.add(2, prompt(random.Random(1), 24), 20, choices=[[20, 21]])
    while ("c", 2) not in h.finished:
        h.step()
        req = h.scheduler.requests.by_key.get(("c", 2))
        if req is not None and req.kv_len < 24:
            assert all(not b.delayed_sample for b in h.worker.pending)
    h.step()
    while h.scheduler.num_in_flight:
        h.process()
    seen.append(launch(h).delayed_sample)
    assert h.scheduler.take_masks() == []
    assert not any(seen)
    assert h.worker.masks_seen, "the constrained request's own steps were delayed"
    assert sum(m.running.num_constrained for m in h.scheduler.micro_batches) == 0
    h.run()


def test_rows_are_numbered_among_the_sampled() -> None:
    h = Harness(eos_token_ids=(7,))
    h.add(1, [1, 2], 30)
    h.step()
    h.add(2, [3, 4], choices=[[20, 21]])
    h.add(3, prompt(random.Random(1), 30), 5, choices=[[22]])  # a chunk: samples nothing yet
    batch = launch(h)
    (masks,) = h.scheduler.take_masks()
    slots = batch.req_pool_indices[batch.sampled_lines][masks.lines]
    assert slots.tolist() == [h.scheduler.requests.by_key[("c", 2)].req_pool_idx]
    assert len(batch.sampled_lines) == 2 and len(batch.req_pool_indices) == 3
    h.worker.sample(masks)
    h.run()


@pytest.mark.parametrize("how", ["abort", "eos"])
def test_ended_request_leaves_its_row_and_the_step_still_gets_masks(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    h = Harness(lookahead=2, eos_token_ids=(7,))
    h.add(1, [1, 2, 3], choices=[[20]])
    h.add(2, [4, 5, 6], 30)
    h.launch()
    if how == "eos":
        h.launch()
        h.process()  # token 20; the step in flight samples the eos
    last = launch(h)
    assert last.delayed_sample and h.scheduler.take_masks() == []
    if how == "abort":
        h.aborted.add(("c", 1))
        h.scheduler.abort(AbortRequest(rid=1, reply_to="c"))
    h.scheduler.process_result(h.worker.run())
    (masks,) = h.scheduler.take_masks()
    assert masks.step == last.step
    assert masks.lines.tolist() == [] and masks.masks.shape == (0, mask_words(VOCAB))
    h.worker.sample(masks)
    h.run()
    assert not caplog.records, "what an ended request samples is nobody's error"


def test_retracting_request_keeps_its_token_in_flight(mode: dict[str, Any]) -> None:
    h = Harness(**mode, eos_token_ids=(7,))
    h.add(1, [1, 2, 3], 20, choices=[[20, 21, 22] * 4, [21, 20, 22] * 4])
    h.add(2, [4, 5, 6], 30)
    for _ in range(2):
        h.step()
    while h.launch():
        pass
    req = h.scheduler.requests.by_key[("c", 1)]
    before = len(req.output_ids)
    steps = sum(req in s.sampled for m in h.scheduler.micro_batches for s in m.in_flight)
    assert steps
    h.scheduler.requests.retract(req)
    while h.scheduler.num_in_flight:
        h.process()
    assert len(req.output_ids) == before + steps
    h.run()


def test_steps_are_masked_in_launch_order() -> None:
    """Three in flight: a step that could be masked waits for the one before it."""
    h = Harness(lookahead=3, enable_mixed_chunk=False, eos_token_ids=(7,))
    h.add(1, [1, 2, 3], 20, choices=[[20] * 12])
    h.launch()
    second = launch(h)
    h.add(2, [4, 5, 6], 20, choices=[[21] * 12])
    third = launch(h)
    assert second.delayed_sample and third.delayed_sample
    assert len(third.sampled_lines) == 1, "only request 2, which has no token yet"
    assert h.scheduler.take_masks() == []
    h.scheduler.process_result(h.worker.run())
    masks = h.scheduler.take_masks()
    assert [m.step for m in masks] == [second.step, third.step]
    for m in masks:
        h.worker.sample(m)
    h.run()


@pytest.mark.parametrize("lookahead", [1, 2, 3, 4])
def test_many_constrained_and_free_requests(lookahead: int) -> None:
    rng = random.Random(lookahead)
    h = Harness(lookahead=lookahead, num_kv_tokens=400, eos_token_ids=(7,))
    for rid in range(40):
        choices = random_choices(rng) if rng.random() < 0.6 else None
        h.add(rid, prompt(rng, rng.randrange(1, 40)), rng.randrange(1, 20), choices=choices)
    h.run()
    assert h.worker.masks_seen


def test_whole_choice_without_eos_ends_with_stop(mode: dict[str, Any]) -> None:
    h = Harness(**mode)
    h.add(1, [1, 2, 3], 20, choices=[[20, 21, 22], [20, 21]])
    h.add(2, [1, 2, 3], 3, choices=[[20, 21, 22]])  # whole and at its limit at once
    h.add(3, [1, 2, 3], 2, choices=[[20, 21, 22]])
    h.run()
    ends = [h.finished[("c", rid)] for rid in (1, 2, 3)]
    assert [(e.reason, e.matched_token) for e in ends] == [("stop", None)] * 2 + [("length", None)]
    assert h.tokens[("c", 1)] == [20, 21, 22]


def test_forbidden_token_ends_its_request_alone(
    mode: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    h = Harness(**mode, eos_token_ids=(7,))
    h.add(1, [1, 2, 3], 20, choices=[[20, 21, 22, 23]])
    h.add(2, [4, 5, 6], 20)
    h.step()
    while h.launch():
        pass
    req = h.scheduler.requests.by_key[("c", 1)]
    while len(req.output_ids) < 3:
        step = next(
            s
            for m in h.scheduler.micro_batches
            for s in m.in_flight
            if s.step == h.worker.pending[0].step
        )
        result = h.worker.run()
        if len(req.output_ids) == 2 and req in step.sampled:
            result.next_token_ids[list(step.sampled).index(req)] = 40
        with caplog.at_level(logging.ERROR):
            h.scheduler.process_result(result)
        h.send_masks()
        h.collect()
        if req.finished:
            break
        h.launch()
    end = h.finished[("c", 1)]
    assert (end.reason, end.status) == ("error", 500) and "constraint" in end.message
    assert h.tokens[("c", 1)] == [20, 21], "the forbidden token isn't sent"
    (logged,) = caplog.messages
    assert "forbids" in logged and "40" not in logged
    del h.expected[("c", 1)]
    h.run()


def test_resumed_output_advances_the_constraint(mode: dict[str, Any]) -> None:
    h = Harness(**mode, eos_token_ids=(7,))
    h.add(1, [1, 2, 3], 20, choices=[[20, 21, 22, 20], [20, 22, 22]], resume=2)
    h.run()
    assert h.finished[("c", 1)].reason == "stop"


@pytest.mark.parametrize(
    ("eos", "resumed", "expected"),
    [
        ((7,), [20, 7], ("stop", 0, None)),
        ((), [20], ("stop", 0, None)),
        ((7,), [21], ("error", 400, "constraint")),
        ((7,), [20, 7, 7], ("error", 400, "constraint")),
    ],
)
def test_resumed_output_that_is_whole_or_wrong(
    eos: tuple[int, ...], resumed: list[int], expected: tuple[str, int, str | None]
) -> None:
    h = Harness(eos_token_ids=eos)
    request = add_request(
        rid=1,
        reply_to="c",
        input_ids=ints([1, 2]),
        params=SamplingParams(seed=0, constraint=token_choice([20])),
        output_ids=ints(resumed),
    )
    h.scheduler.add(request, 0.0)
    h.collect()
    end = h.finished[("c", 1)]
    assert (end.reason, end.status, end.param) == expected
    assert h.scheduler.is_idle


# With a model


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "normal"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    overlap = bool(request.param)
    with LLM(MODEL, max_total_tokens=2048, cpu_threads=1, enable_overlap=overlap) as made:
        yield made


def test_model_outputs_a_choice_and_others_what_they_do_alone(llm: LLM) -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0)
    (alone,) = llm.generate("def ", greedy, use_tqdm=False)
    choices = [[300, 301, 302, 303], [300, 302], [400, 401], [400]]
    params: list[SamplingParams] = [greedy]
    for seed in range(12):
        ignore_eos = seed % 2 == 1
        params.append(
            SamplingParams(
                max_tokens=20,
                temperature=1.5,
                seed=seed,
                ignore_eos=ignore_eos,
                logprobs=0 if seed % 3 else None,
                constraint=token_choice(*choices),
            )
        )
    outs = llm.generate(["def "] * len(params), params, use_tqdm=False)
    assert outs[0].outputs[0].token_ids == alone.outputs[0].token_ids
    eos = llm.config.resolve().model.eos_token_ids
    for p, out in zip(params[1:], outs[1:], strict=True):
        ids = out.outputs[0].token_ids
        assert out.outputs[0].finish_reason == "stop"
        if not p.ignore_eos:
            assert ids.pop() in eos
        assert ids in choices
    assert len({tuple(o.outputs[0].token_ids) for o in outs[1:]}) > 1


def test_a_complete_output_ends_though_min_tokens_wants_more(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=20, min_tokens=10, temperature=0, constraint=token_choice([300, 301])
    )
    (result,) = llm.generate("def ", params, use_tqdm=False)
    assert result.outputs[0].token_ids == [300, 301]
    assert result.outputs[0].finish_reason == "stop"
    assert llm.core.scheduler.is_idle
