"""Situations that drafts make dangerous for a scheduler or a sampler: no output may change.

tests/mutations takes out what keeps each of them right, and the test has to fail.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.constraints import mask_words, structured
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.step import RowParams, RowSpeculation
from engine.sampling.draft_check import draft_check
from engine.sampling.sampler import Sampler
from engine.sampling.state import SamplingState
from engine.speculative.config import SpeculativeConfig
from engine.speculative.ngram import NgramDrafter
from engine.speculative.step_filler import StepFiller
from tests.support.fake_worker import reference
from tests.support.grammars import VOCAB as GRAMMAR_VOCAB
from tests.support.grammars import start
from tests.support.scheduler_harness import VOCAB, drafting
from tests.support.verify_steps import verify_batch

CHOICES = [[20, 21, 22, 20, 21, 22, 20, 21, 22, 23], [20, 21, 22, 20, 24]]


# The end of a request


def test_a_stop_token_within_an_accepted_run() -> None:
    h = drafting(8, lookahead=2)
    for rid in range(6):
        out = reference([rid, 3], 40, VOCAB)
        h.add(rid, [rid, 3], 40, stop=[out[9 + rid]])
    h.run()
    assert h.scheduler.stats.spec_decode_accepted_tokens_total > 10


def test_outputs_end_at_their_length() -> None:
    h = drafting(8, lookahead=2)
    for rid in range(6):
        h.add(rid, [rid, 3], 11 + rid, ignore_eos=True)
    h.run()
    assert h.scheduler.stats.spec_decode_accepted_tokens_total > 10


# Lengths that only the worker knows


def test_a_slot_that_has_another_request() -> None:
    """The worker learns a step's tokens after the slot was given to the next request."""
    filler = StepFiller(NgramDrafter(SpeculativeConfig(method="ngram")), 3)
    first, second = (_slot_params(1, tokens) for tokens in ([5, 6], [7, 8, 9]))
    filler.install([first])
    batch = verify_batch([], [[6, 7]], [3])
    batch.req_pool_indices = np.array([1], np.int32)
    owners = filler.owners(batch)
    filler.install([second])
    filler.record(batch, owners, [[7, 8]])
    # 7 and 8 after 7, 8, 9 would be a repetition, and 9 a guess.
    assert filler.propose([1], [3]) == [[]], "another request's tokens"


def test_the_scheduler_learns_lengths() -> None:
    h = drafting(4, lookahead=2)
    for rid in range(4):
        h.add(rid, [rid, 3], 60, ignore_eos=True)
    h.run()
    stats = h.scheduler.stats
    assert stats.spec_decode_draft_tokens_total > 220, "hardly any drafts"


# Room


def test_drafts_fall_away_before_a_request_does() -> None:
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


def test_forced_tokens_are_drafts_with_masks_of_their_own() -> None:
    h = drafting(4, lookahead=2)
    for rid in range(6):
        h.add(rid, [rid, 3], 30, choices=CHOICES, ignore_eos=rid % 2 == 0)
        h.add(10 + rid, [rid, 4], 30)
    h.run()
    if not h.scheduler.stats.spec_decode_accepted_tokens_total > 30:
        pytest.fail("nothing was forced")


def test_masks_behind_drafts_change_no_state() -> None:
    grammar = start(structured.regex("always the same words"))
    drafts = grammar.forced(4)
    masks = np.zeros((1 + len(drafts), mask_words(GRAMMAR_VOCAB)), np.uint32)
    grammar.fill_masks(drafts, masks)
    assert grammar.forced(4) == drafts, "the state has changed"
    grammar.fill_masks(drafts, masks)
    assert grammar.accept(drafts[0]), "a token that is allowed"


def test_forced_tokens_say_nothing_of_the_drafter() -> None:
    h = drafting(4, "adaptive", lookahead=2)
    h.add(1, [1, 3], 60, choices=[[20, 21, 22] * 19], ignore_eos=True)
    h.run()
    length = h.scheduler.draft_length
    assert length is not None
    assert length.acceptance == 0.5, "judged by a grammar"


# Sampling


def test_penalties_count_drafts_before_a_token_and_later_only_what_was_kept() -> None:
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    state = SamplingState(2, VOCAB, torch.device("cpu"))
    state.install([RowParams(1, 2, [], params, np.array([0, 1], np.int32))])
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


def _slot_params(slot: int, tokens: list[int]) -> RowParams:
    return RowParams(
        slot,
        len(tokens),
        [],
        SamplingParams(),
        np.array(tokens, np.int32),
        RowSpeculation(90, "c\n"),
    )
