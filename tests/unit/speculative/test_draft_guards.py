"""What keeps drafts from changing an output, taken out one by one.

Every `check_*` drives a scheduler or a sampler into a situation that drafts make dangerous. It is
run as it is, and without each of its guards, where it has to fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine.constraints import mask_words, structured
from engine.constraints.grammar import Grammar
from engine.protocol.messages import SlotParams
from engine.protocol.step_parts import SlotSpeculation
from engine.sampling.draft_check import DraftCheck, draft_check
from engine.sampling.penalties import PenaltyPool
from engine.sampling.sampler import Sampler
from engine.sampling.state import SamplingState
from engine.sampling_params import SamplingParams
from engine.scheduler.committer import Committer
from engine.scheduler.delayed_sample import DelayedSamples
from engine.scheduler.draft_length import DraftLength
from engine.scheduler.draft_rows import DraftRows
from engine.scheduler.running_batch import RunningBatch
from engine.scheduler.scheduler import Scheduler
from engine.speculative.config import SpeculativeConfig
from engine.speculative.ngram import NgramDrafter
from engine.speculative.step_filler import StepFiller
from tests.support.fake_worker import reference
from tests.support.grammars import VOCAB as GRAMMAR_VOCAB
from tests.support.grammars import start
from tests.support.guards import (
    Guard,
    TakeOut,
    checks_of,
    guarded_by,
    guards_of,
    replaced,
    without,
)
from tests.support.scheduler_harness import VOCAB, drafting
from tests.support.verify_steps import verify_batch

CHOICES = [[20, 21, 22, 20, 21, 22, 20, 21, 22, 23], [20, 21, 22, 20, 24]]
ADD_TOKENS = PenaltyPool.add_tokens
FAILED: Any = pytest.fail.Exception


def both(first: TakeOut, second: TakeOut) -> TakeOut:
    """Two guards, either of which is enough."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        first(patch)
        second(patch)

    return apply


# The end of a request


@guarded_by(
    without(Committer, "_commit_runs", ("if req.status is not finished:", "if True:")),
    AssertionError,
    "token after the end|token after abort",
)
@guarded_by(
    without(Committer, "_commit_runs", ("and req.stop_ids.isdisjoint(run)", "and True")),
    AssertionError,
    r"\('c', \d\)",
)
@guarded_by(
    without(Committer, "_take", ("        if end is not None:\n            break\n", "")),
    AssertionError,
    r"\('c', \d\)",
)
def check_a_stop_token_within_an_accepted_run() -> None:
    h = drafting(8, lookahead=2)
    for rid in range(6):
        out = reference([rid, 3], 40, VOCAB)
        h.add(rid, [rid, 3], 40, stop=[out[9 + rid]])
    h.run()
    assert h.scheduler.stats.spec_decode_accepted_tokens_total > 10


@guarded_by(
    without(Committer, "_commit_runs", ("len(output) + count < req.max_new_tokens", "True")),
    FAILED,
    "no end in sight",
)
@guarded_by(
    both(
        without(StepFiller, "propose", ("min(count, limits[slot] - lens[slot] - 2)", "count")),
        without(DraftRows, "plan", ("self.limits - self.most - 2", "self.limits - self.most + 9")),
    ),
    ValueError,
    "too few KV slots",
)
def check_outputs_end_at_their_length() -> None:
    h = drafting(8, lookahead=2)
    for rid in range(6):
        h.add(rid, [rid, 3], 11 + rid, ignore_eos=True)
    h.run()
    assert h.scheduler.stats.spec_decode_accepted_tokens_total > 10


# Lengths that only the worker knows


@guarded_by(
    without(StepFiller, "record", (" or current[slot] != owner", "")),
    AssertionError,
    "another request's tokens",
)
def check_a_slot_that_has_another_request() -> None:
    """The worker learns a step's tokens after the slot was given to the next request."""
    filler = StepFiller(NgramDrafter(SpeculativeConfig(method="ngram")), 3)
    first, second = (_slot_params(1, tokens) for tokens in ([5, 6], [7, 8, 9]))
    filler.install([first])
    batch = verify_batch([], [[6, 7]], [3])
    batch.req_pool_indices = np.array([1], np.int32)
    owners = filler.owners(batch)
    filler.install([second])
    filler.record(batch, owners, [[7, 8]])
    assert filler._last[1] == 0 and filler._lens[1] == 0, "another request's tokens"


@guarded_by(
    without(RunningBatch, "learn", ("self.drafts.most = self.drafts.most - missed", "pass")),
    AssertionError,
    "hardly any drafts",
)
def check_the_scheduler_learns_lengths() -> None:
    h = drafting(4, lookahead=2)
    for rid in range(4):
        h.add(rid, [rid, 3], 60, ignore_eos=True)
    h.run()
    stats = h.scheduler.stats
    assert stats.spec_decode_draft_tokens_total > 220, "hardly any drafts"


# Room


@guarded_by(
    without(Scheduler, "_plan_drafts", ("running.drafts.plan(0)", "pass")),
    AssertionError,
    "retracted for drafts",
)
def check_drafts_fall_away_before_a_request_does() -> None:
    h = drafting(
        8,
        lookahead=2,
        num_kv_tokens=76,
        page_size=1,
        max_model_len=58,
        enable_prefix_cache=False,
        schedule_conservativeness=0.01,
    )
    for rid in range(3):
        h.add(rid, [rid, 3], 56, stop=[reference([rid, 3], 40, VOCAB)[19]])
    h.run()
    assert h.scheduler.stats.retractions_total == 0, "retracted for drafts"


# Constraints


@guarded_by(
    without(DelayedSamples, "launch", ("req.num_delayed += 1", "pass")),
    AssertionError,
    "other masks than drafts",
)
@guarded_by(
    without(DelayedSamples, "accept", ("if req.constraint.is_terminated:", "if False:")),
    AssertionError,
    "the constraint doesn.t allow",
)
def check_forced_tokens_are_drafts_with_masks_of_their_own() -> None:
    h = drafting(4, lookahead=2)
    for rid in range(6):
        h.add(rid, [rid, 3], 30, choices=CHOICES, ignore_eos=rid % 2 == 0)
        h.add(10 + rid, [rid, 4], 30)
    h.run()
    if not h.scheduler.stats.spec_decode_accepted_tokens_total > 30:
        pytest.fail("nothing was forced")


@guarded_by(
    without(Grammar, "fill_masks", ("self._matcher.rollback(consumed)", "True")),
    AssertionError,
    "the state has changed",
)
@guarded_by(
    without(Grammar, "fill_masks", ("self._mask = first", "pass")),
    AssertionError,
    "a token that is allowed",
)
def check_masks_behind_drafts_change_no_state() -> None:
    grammar = start(structured.regex("always the same words"))
    drafts = grammar.forced(4)
    masks = np.zeros((1 + len(drafts), mask_words(GRAMMAR_VOCAB)), np.uint32)
    grammar.fill_masks(drafts, masks)
    assert grammar.forced(4) == drafts, "the state has changed"
    grammar.fill_masks(drafts, masks)
    assert grammar.accept(drafts[0]), "a token that is allowed"


@guarded_by(
    without(
        DraftLength,
        "observe",
        ("if step.forced:", "if False:"),
    ),
    AssertionError,
    "judged by a grammar",
)
def check_forced_tokens_say_nothing_of_the_drafter() -> None:
    h = drafting(4, "adaptive", lookahead=2)
    h.add(1, [1, 3], 60, choices=[[20, 21, 22] * 19], ignore_eos=True)
    h.run()
    length = h.scheduler.draft_length
    assert length is not None
    assert (length._accepted, length._tried) == (1.0, 2.0), "judged by a grammar"


# Sampling


@guarded_by(
    replaced(
        PenaltyPool, "add_tokens", lambda self, group, ids, kept: ADD_TOKENS(self, group, ids)
    ),
    AssertionError,
    "counts what was not kept",
)
@guarded_by(
    without(Sampler, "_adjust", ("None if check is None else check.earlier", "None")),
    AssertionError,
    "doesn't see the drafts",
)
@guarded_by(
    without(DraftCheck, "is_kept", ("num_kept[self.rows]", "num_kept[self.rows] + 9")),
    AssertionError,
    "counts what was not kept",
)
def check_penalties_count_drafts_before_a_token_and_later_only_what_was_kept() -> None:
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    state = SamplingState(2, VOCAB, torch.device("cpu"))
    state.install([SlotParams(1, 2, [], params, np.array([0, 1], np.int32))])
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6], logits[0, 7] = 3.0, 2.5, 2.0
    sampler = Sampler(state)

    def sample(inputs: list[int], end: int) -> list[int]:
        check = draft_check(verify_batch([], [inputs], [end]), torch.device("cpu"))
        slots = np.ones(len(inputs), np.int64)
        places = torch.arange(end - len(inputs) + 1, end + 1)
        rows = logits.repeat(len(inputs), 1)
        sampled = sampler(rows, torch.from_numpy(slots), slots, places, None, check)
        assert sampled.num_kept is not None
        return sampled.next_token_ids.tolist()[: int(sampled.num_kept)]

    # 5 is right; then 5 would be wrong, since its penalty counts the draft before.
    assert sample([1, 5, 5, 6], 5) == [5, 6], "a token doesn't see the drafts before it"
    assert sample([6], 4) == [7], "a penalty counts what was not kept, or not what was"


def _slot_params(slot: int, tokens: list[int]) -> SlotParams:
    return SlotParams(
        slot,
        len(tokens),
        [],
        SamplingParams(),
        np.array(tokens, np.int32),
        SlotSpeculation(90, "c\n"),
    )


@pytest.mark.parametrize("check", checks_of(globals()))
def test_right(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(("check", "guard"), guards_of(globals()))
def test_fails_without_its_guard(
    check: Callable[[], None], guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard.assert_needed(check, monkeypatch)
