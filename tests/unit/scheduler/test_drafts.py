"""Drafts at the edges of what a request and the engine may have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.protocol.sampling_params import SamplingParams
from tests.support.fake_worker import reference
from tests.support.requests import add_request
from tests.support.scheduler_harness import MODES, VOCAB, drafting


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("longest", [96, 95, 81])
def test_the_last_page_of_the_longest_request(mode: dict[str, Any], longest: int) -> None:
    """It may reach beyond max_model_len."""
    h = drafting(**mode, page_size=16, max_model_len=longest, num_kv_tokens=320)
    for rid in range(3):
        h.add(rid, [rid, 2, 3] * 20, 1000)
    h.run()
    assert h.scheduler.stats.spec_decode_accepted_tokens_total > 20


def test_a_prediction_outside_the_vocabulary_is_refused() -> None:
    h = drafting()
    ids = np.array([3, VOCAB], np.int32)
    params = SamplingParams(max_tokens=4, seed=0)
    h.scheduler.add(
        add_request(
            rid=1,
            reply_to="c",
            input_ids=np.array([1, 2], np.int32),
            params=params,
            prediction_ids=ids,
        ),
        0.0,
    )
    h.collect()
    end = h.finished[("c", 1)]
    assert (end.reason, end.status, end.param) == ("error", 400, "prediction")
    h.add(2, [1, 2], 8)
    h.run()


def test_drafts_leave_room_for_prompts() -> None:
    """A long prompt beside many rows is not computed page by page."""
    h = drafting(
        8, max_running_requests=8, chunked_prefill_size=16, num_kv_tokens=1024, page_size=1
    )
    for rid in range(4):
        h.add(rid, [rid, 1], 60)
    for _ in range(4):
        h.step()
    h.add(9, list(range(48)) * 1, 4)
    steps = 0
    while ("c", 9) not in h.cached:
        h.step()
        steps += 1
        assert steps < 12
    h.run()


def test_a_refused_token_beside_drafts_is_no_output() -> None:
    """The constraint says no after the fact; another row of the step has drafts."""
    h = drafting(lookahead=1)
    h.add(1, [1, 2], 30)
    h.add(2, [3, 4], 10, choices=[[20, 21, 22, 20, 21]])
    while ("c", 2) not in h.tokens:
        h.step()
    req = h.scheduler.requests.by_key[("c", 2)]
    assert req.constraint is not None
    before = len(h.tokens[("c", 2)])
    req.constraint.accept = lambda token: False  # type: ignore[method-assign]
    while ("c", 2) not in h.finished:
        h.step()
    assert h.finished[("c", 2)].reason == "error"
    assert len(h.tokens[("c", 2)]) == before
    while ("c", 1) not in h.finished:
        h.step()
    assert h.tokens[("c", 1)] == reference([1, 2], 30, VOCAB)
