"""Sampling with a step in flight, on a real model: penalties, min_tokens, stop tokens, seeds.

What is expected comes from runs in which nothing is ever in flight: every token is the first of a
request that resumes all tokens before it. tests/mutations takes out what the tests rely on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.protocol.messages import AbortRequest
from tests.support.models import make_model
from tests.support.requests import add_request

PENALTIES = dict(repetition_penalty=1.2, presence_penalty=0.7, frequency_penalty=0.9)
MIN_TOKENS = 9


class Case(NamedTuple):
    """A request, and its output as computed token by token."""

    prompt: list[int]
    params: SamplingParams
    output: list[int]


class Model(NamedTuple):
    """Requests to one tiny model."""

    folder: Path
    penalised: list[Case]
    """Greedy and sampled, all of them 16 tokens."""
    stopping: Case
    """Penalised too; ends at a stop token."""
    held: Case
    """As `stopping`, but with min_tokens beyond where that ended."""


def engine(folder: Path, *, overlap: bool, max_running_requests: int = 8) -> LLM:
    return LLM(
        str(folder),
        max_total_tokens=256,
        max_model_len=128,
        page_size=4,
        max_running_requests=max_running_requests,
        enable_overlap=overlap,
        cpu_threads=1,
    )


def token_by_token(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    core, output = llm.core, list[int]()
    for rid in count():
        resumed = np.asarray(output, np.int32) if output else None
        ids = np.asarray(prompt, np.int32)
        core.scheduler.add(
            add_request(rid=rid, input_ids=ids, params=params, output_ids=resumed), core.clock()
        )
        token, ended = None, False
        while token is None:
            for _, out in core.step():
                token = out.token_ids[0]
                ended = bool(out.finished)
        output.append(token)
        if ended:
            return output
        core.scheduler.abort(AbortRequest(rid=rid))
        while not core.scheduler.is_idle:
            core.step()
    raise AssertionError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = make_model(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")
    llm = engine(folder, overlap=False)

    def case(prompt: list[int], **params: object) -> Case:
        made = SamplingParams(max_tokens=16, ignore_eos=True, **PENALTIES, **params)
        return Case(prompt, made, token_by_token(llm, prompt, made))

    penalised = [
        case([3, 4, 5], temperature=0),
        case([6, 7], temperature=0),
        case([8, 9, 10, 11], temperature=1.0, seed=1),
        case([12, 13, 14], temperature=1.3, top_p=0.9, seed=2),
    ]
    stop = [penalised[0].output[5]]
    stopping = case([3, 4, 5], temperature=0, stop_token_ids=stop)
    held = case([3, 4, 5], temperature=0, stop_token_ids=stop, min_tokens=MIN_TOKENS)
    return Model(folder, penalised, stopping, held)


def run(
    llm: LLM, cases: Sequence[Case], after_step: Callable[[int], None] | None = None
) -> tuple[list[list[int]], int]:
    """Outputs of the cases, run together, and how many steps were in flight between turns.

    `after_step` gets the number of tokens that the first case has.
    """
    core = llm.core
    for rid, case in enumerate(cases):
        ids = np.asarray(case.prompt, np.int32)
        core.scheduler.add(add_request(rid=rid, input_ids=ids, params=case.params), core.clock())
    tokens: dict[int, list[int]] = defaultdict(list)
    in_flight = 0
    while not core.scheduler.is_idle:
        for _, out in core.step():
            for rid, token in zip(out.rids, out.token_ids, strict=True):
                tokens[rid].append(token)
        in_flight = max(in_flight, core.scheduler.num_in_flight)
        if after_step is not None:
            after_step(len(tokens[0]))
    assert core.scheduler.check_invariants() is None
    return [tokens[rid] for rid in range(len(cases))], in_flight


def assert_output(model: Model, cases: Sequence[Case], max_running_requests: int = 8) -> None:
    """With overlap on and off."""
    for overlap in (True, False):
        llm = engine(model.folder, overlap=overlap, max_running_requests=max_running_requests)
        outputs, in_flight = run(llm, cases)
        assert in_flight == int(overlap)
        assert outputs == [case.output for case in cases]


def test_penalties(model: Model) -> None:
    """The token in flight is penalised before the scheduler has seen it."""
    assert_output(model, model.penalised)


def test_min_tokens(model: Model) -> None:
    """The length that counts is that of the step, not of what is committed."""
    assert len(model.stopping.output) <= 6 < MIN_TOKENS <= len(model.held.output)
    assert_output(model, [model.stopping, model.held, *model.penalised])


def test_extra_token_leaves_no_trace(model: Model) -> None:
    """The step behind the stop token counts one more, in the slot that the next request gets."""
    assert_output(model, [model.stopping, model.penalised[1]], max_running_requests=1)


def test_retraction(model: Model) -> None:
    """The token in flight is among those that the penalties start from again."""
    llm = engine(model.folder, overlap=True)
    scheduler = llm.core.scheduler

    left = [5, 12]

    def after_step(done: int) -> None:
        if left and done == left[0]:
            left.pop(0)
            assert scheduler.num_in_flight == 1
            scheduler.requests.retract(scheduler.requests.by_key[("", 0)])

    outputs, _ = run(llm, model.penalised, after_step)
    assert not left
    assert outputs == [case.output for case in model.penalised]
