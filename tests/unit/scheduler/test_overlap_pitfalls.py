"""Requests that leave while steps with them are in flight, and room that is about to come free.

The pitfalls of design §3 and the last two of roseinfer's six; those with placeholders are in
test_overlap_placeholders.py, those of sampling in test_overlap_sampling.py. Every test drives the
scheduler into one dangerous situation and says what is right. tests/mutations takes out what the
tests rely on, and they have to fail.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from engine.protocol.messages import AbortRequest
from engine.scheduler.req import ReqStatus
from tests.support.fake_worker import reference
from tests.support.overlap import AnyOrder, Overlap, Reader, tiny_tokenizer, two_running
from tests.support.scheduler_harness import VOCAB

# Leaving while a step is in flight


def test_aborted_request_keeps_its_memory() -> None:
    """Roseinfer's 6th: freed when the last step with it is done, and not before."""
    h = two_running()
    h.abort(1)
    h.check_in_flight()
    h.process()
    h.check_in_flight()
    assert h.steps_with(1) == 1
    h.process()
    assert ("c", 1) not in h.scheduler.requests.by_key
    h.run()
    assert h.released == {1: 1, 2: 1}


def test_aborted_chunk_keeps_its_memory() -> None:
    """The same in the middle of a prompt, with which nothing goes on."""
    h = Overlap()
    h.add(1, list(range(40)), 5)
    h.launch()
    h.launch()
    assert h.steps_with(1) == 2 and h.req(1).needs_prefill
    h.abort(1)
    h.check_in_flight()
    h.add(2, [7, 8, 9], 5)
    h.run()
    assert h.released == {1: 1, 2: 1}
    assert h.worker.prompt_tokens_run == 32 + 3


def test_finished_request_keeps_its_memory() -> None:
    """A stop token is seen one step late: the extra token is dropped, the KV freed once."""
    out = reference([5, 6], 20, VOCAB)
    h = Overlap()
    h.add(1, [5, 6], 20, stop=[out[6]])
    h.add(2, [9, 8, 7], 20)
    while ("c", 1) not in h.finished:
        h.step()
    assert h.scheduler.num_in_flight == 1
    h.check_in_flight()
    assert h.steps_with(1) == 1
    h.process()
    assert ("c", 1) not in h.scheduler.requests.by_key
    h.run()
    assert h.finished[("c", 1)].num_output == len(h.tokens[("c", 1)]) == out.index(out[6]) + 1
    assert h.scheduler.stats.generation_tokens_total == sum(map(len, h.tokens.values()))
    assert h.released == {1: 1, 2: 1}


def test_retracted_request_keeps_its_memory() -> None:
    """Out of room with a step in flight: the victim leaves when that is done."""
    h = Overlap(num_kv_tokens=64, max_model_len=48, schedule_conservativeness=0.01)
    for rid in (1, 2):
        h.add(rid, [rid, *range(7)], 36)
    while h.scheduler.stats.retractions_total == 0:
        if h.scheduler.num_in_flight == 2:
            h.process()
        h.launch()
    assert h.scheduler.num_in_flight > 0
    h.check_in_flight()
    (victim,) = [
        r for r in h.scheduler.requests.by_key.values() if r.status is ReqStatus.RETRACTING
    ]
    assert victim not in h.scheduler.requests.waiting
    h.run()
    assert h.scheduler.stats.retractions_total == 1
    assert sum(h.released.values()) == 3


def test_token_in_flight_outlives_retraction() -> None:
    """The token in flight is output like any other: it isn't computed and sent again."""
    h = two_running()
    h.process()
    h.scheduler.requests.retract(h.req(1))
    h.launch()
    h.run()


def test_retracted_chunk_starts_over() -> None:
    """A request that is retracted in the middle of its prompt."""
    h = Overlap()
    h.add(1, list(range(40)), 5)
    h.launch()
    h.launch()
    h.scheduler.requests.retract(h.req(1))
    h.check_in_flight()
    h.run()
    assert h.released == {1: 2}


def test_preempted_request_keeps_its_memory() -> None:
    """The urgent request takes its victim's row only when no step holds it any more."""
    h = two_running(
        max_running_requests=2, schedule_policy="priority", enable_priority_preemption=True
    )
    h.process()
    for rid in (1, 2):
        h.req(rid).sequence.priority = rid
    h.add(9, [9, 9], 4)
    h.launch()
    h.check_in_flight()
    assert h.req(2).status is ReqStatus.RETRACTING
    h.run()
    assert h.scheduler.stats.preemptions_total == 1


def late_device(leave: Callable[[AnyOrder], None], **request: Any) -> None:
    """Request 1 leaves with a step in flight that the device runs after the next one's prefill.

    What that step writes must not land in another request's memory.
    """
    h = AnyOrder()
    h.add(1, [1, 2, 3, 4, 5], 20, **request)
    h.add(2, list(range(20, 32)), 12)
    h.launch()
    h.launch()
    h.process()
    leave(h)
    assert h.scheduler.num_in_flight == 1
    h.launch()
    h.process_of(1)
    h.run()


def test_late_step_of_an_aborted_request() -> None:
    def leave(h: AnyOrder) -> None:
        h.aborted.add(("c", 1))
        h.scheduler.abort(AbortRequest(rid=1, reply_to="c"))

    late_device(leave)


def test_late_step_of_a_finished_request() -> None:
    def leave(h: AnyOrder) -> None:
        assert h.finished[("c", 1)].reason == "stop"

    late_device(leave, stop=reference([1, 2, 3, 4, 5], 1, VOCAB))


def test_late_step_of_a_retracted_request() -> None:
    late_device(lambda h: h.scheduler.requests.retract(h.scheduler.requests.by_key[("c", 1)]))


def test_rows_do_not_shift() -> None:
    """Roseinfer's 5th: whoever leaves, the tokens in flight still go to their requests."""
    h = Overlap()
    for rid in (1, 2, 3):
        h.add(rid, [rid, 2, 3], 10)
    for _ in range(3):
        h.step()
    h.launch()
    h.abort(2)
    h.run()


def test_stop_string_in_flight() -> None:
    """Found by the detokenizer steps late; what comes meanwhile is neither text nor output."""
    text = tiny_tokenizer().decode(reference([1, 2, 3], 30, VOCAB))
    stop = next(a + b for a, b in pairwise(text[5:]) if text.index(a + b) >= 5)
    h = Reader([1, 2, 3], 30, stop)
    while h.end[0] is None:
        h.step()
    h.step()
    assert h.steps_with(1) == 1
    h.abort(1)
    h.check_in_flight()
    h.drain()
    h.check()
    assert (h.text, h.end) == (text[: text.index(stop)], ("stop", stop))
    assert h.released == {1: 1}
    assert h.scheduler.stats.requests_finished_total == 1


# Freeing twice


def test_abort_of_a_retracting_request_frees_once() -> None:
    h = two_running()
    h.scheduler.requests.retract(h.req(1))
    h.abort(1)
    h.check_in_flight()
    h.run()
    assert h.released == {1: 1, 2: 1}


def test_retracting_request_that_ends_is_freed_once() -> None:
    """The token in flight is a stop token: the request ends instead of going back."""
    stop = reference([1, 2, 3, 4, 5], 3, VOCAB)[2]
    h = Overlap()
    h.add(1, [1, 2, 3, 4, 5], 20, stop=[stop])
    h.add(2, [6, 7, 8], 20)
    while len(h.tokens[("c", 1)]) < 2:
        h.step()
    h.scheduler.requests.retract(h.req(1))
    h.run()
    assert h.finished[("c", 1)].reason == "stop"
    assert h.released == {1: 1, 2: 1}


def test_abort_after_the_end_ends_nothing_twice() -> None:
    out = reference([5, 6], 20, VOCAB)
    h = Overlap()
    h.add(1, [5, 6], 20, stop=[out[6]])
    while ("c", 1) not in h.finished:
        h.step()
    assert h.steps_with(1) == 1
    for _ in range(2):
        h.scheduler.abort(AbortRequest(rid=1, reply_to="c"))
    h.run()
    assert h.scheduler.stats.requests_finished_total == 1, "ended twice"
    assert h.released == {1: 1}


def test_waiting_request_frees_nothing() -> None:
    """It was matched against its neighbour's prefix, whose memory it doesn't own."""
    h = Overlap(max_running_requests=1)
    shared = list(range(12))
    h.add(1, shared, 20)
    h.add(2, [*shared, 1], 5)
    for _ in range(3):
        h.step()
    assert h.req(2).status is ReqStatus.WAITING
    h.scheduler.kv.match(h.req(2))
    assert h.req(2).cached_len > 0
    h.abort(2)
    h.check()
    h.check_in_flight()
    h.run()


# Waiting for what is about to come free


def three_in_18_tokens(longest: int) -> Overlap:
    """Requests 1 to 3 fill the KV cache; the steps of their last two tokens are in flight.

    Request 1 may have `longest` tokens in all, the others five.
    """
    h = Overlap(num_kv_tokens=18, max_model_len=16, page_size=1, schedule_conservativeness=0.01)
    for rid, max_tokens in ((1, longest), (2, 5), (3, 5)):
        h.add(rid, [rid, 2, 3, 4], max_tokens)
    h.launch()
    h.launch()
    h.process()
    h.launch()
    assert h.scheduler.kv.room == 0
    return h


def test_decode_waits_for_a_request_that_ends_in_flight() -> None:
    """The last token of request 1 is in flight: its room comes free with it."""
    h = three_in_18_tokens(longest=3)
    h.process()
    assert not h.launch()
    h.run()
    assert h.scheduler.stats.retractions_total == 0, "retracted for room that was coming"


def test_decode_waits_for_a_leaving_request() -> None:
    h = three_in_18_tokens(longest=9)
    h.abort(1)
    h.process()
    assert not h.launch()
    h.run()
    assert h.scheduler.stats.retractions_total == 0, "retracted for room that was coming"


def test_preemption_waits_for_a_leaving_request() -> None:
    """The aborted request's row comes free with the step in flight; nobody has to go for it."""
    h = two_running(
        max_running_requests=2, schedule_policy="priority", enable_priority_preemption=True
    )
    h.process()
    h.req(2).sequence.priority = 5
    h.abort(1)
    h.add(9, [9, 9], 4)
    h.launch()
    h.run()
    assert h.scheduler.stats.preemptions_total == 0, "preempted for a row that was coming"
