"""What a scheduler's process does by message: flushes of its prefix cache, its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine.loop import scheduler_role
from engine.protocol.messages import (
    AbortRequest,
    CacheFlushed,
    ExpertTokens,
    FlushCache,
    StepOutputs,
)
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.transport import Inbox
from tests.support.requests import add_request
from tests.support.scheduler_thread import HOST, SchedulerThread


class Asker:
    """Both the reader of requests and the one who asks for flushes."""

    def __init__(self, scheduler: SchedulerThread) -> None:
        self.scheduler = scheduler
        self.inbox = Inbox(HOST)

    def add(self, rid: int, max_tokens: int, length: int = 12) -> None:
        ids = np.arange(length, dtype=np.int32)
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        reply_to = self.inbox.address
        self.scheduler.send(add_request(rid=rid, input_ids=ids, params=params, reply_to=reply_to))

    def abort(self, rid: int) -> None:
        self.scheduler.send(AbortRequest(rid=rid, reply_to=self.inbox.address))

    def flush(self, call: int) -> None:
        self.scheduler.send(FlushCache(call, self.inbox.address))

    def next(self, kind: type[Any], timeout_s: float = 20.0) -> Any:
        """The next message of this kind; None if there is none in time."""
        while (message := self.inbox.recv(timeout_s)) is not None:
            if isinstance(message, kind):
                return message
        return None

    def end(self) -> None:
        """Wait for the end of a request."""
        while not self.next(StepOutputs).finished:
            pass


@pytest.fixture
def asker() -> Iterator[Asker]:
    scheduler = SchedulerThread()
    made = Asker(scheduler)
    yield made
    scheduler.stop()
    made.inbox.close()


def test_a_flush_empties_the_cache(asker: Asker) -> None:
    kv = asker.scheduler.role.scheduler.kv
    asker.add(1, 4)
    asker.end()
    asker.flush(1)  # at once: a step with overlap may still be in flight
    assert asker.next(CacheFlushed) == CacheFlushed(1, "")
    assert kv.tree.total_size == 0 and kv.rows.available_size() == kv.rows.size
    assert kv.allocator.available_size() == kv.total_size
    kv.tree.check_integrity()
    asker.add(2, 1)
    ((rid, num_cached, _),) = asker.next(StepOutputs).started
    assert (rid, num_cached) == (2, 0), "nothing is cached"


def test_what_stages_report_of_experts_is_in_the_statistics(asker: Asker) -> None:
    """It comes behind the last result, when the scheduler is idle; the newest counts."""
    asker.scheduler.reports = [
        ExpertTokens({0: [1, 2], 1: [3, 0]}),
        ExpertTokens({2: [0, 0]}),
        ExpertTokens({0: [1, 3], 1: [4, 0]}),
    ]
    asker.add(1, 1)
    asker.end()
    deadline = time.monotonic() + 10
    wanted = {0: [1, 3], 1: [4, 0], 2: [0, 0]}
    while asker.scheduler.role.stats.expert_tokens_total != wanted:
        assert time.monotonic() < deadline, asker.scheduler.role.stats
        time.sleep(0.01)
    assert asker.scheduler.role.stats.expert_imbalance == {0: 1.5, 1: 2.0, 2: 1.0}
    asker.add(2, 1)
    asker.end()


def test_a_scheduler_with_requests_refuses(asker: Asker) -> None:
    asker.scheduler.works.clear()
    asker.add(1, 4)
    asker.add(2, 4)
    asker.flush(7)
    assert asker.next(CacheFlushed) == CacheFlushed(7, "2 requests run or wait")
    asker.scheduler.works.set()


def test_a_flush_waits_for_the_step_of_an_aborted_request(asker: Asker) -> None:
    asker.scheduler.works.clear()
    asker.add(1, 40)
    asker.flush(1)
    assert asker.next(CacheFlushed).refusal
    asker.abort(1)
    asker.flush(2)
    asker.flush(3)
    assert asker.next(CacheFlushed, 0.2) is None
    asker.scheduler.works.set()
    assert [asker.next(CacheFlushed) for _ in range(2)] == [CacheFlushed(2), CacheFlushed(3)]
    scheduler = asker.scheduler.role.scheduler
    assert scheduler.is_idle and scheduler.check_invariants() is None


def test_a_waiting_flush_is_refused_if_a_request_comes(asker: Asker) -> None:
    asker.scheduler.works.clear()
    asker.add(1, 40)
    asker.flush(1)
    assert asker.next(CacheFlushed).refusal
    asker.abort(1)
    asker.flush(2)
    asker.add(2, 2)
    assert asker.next(CacheFlushed) == CacheFlushed(2, "1 requests run or wait")
    asker.scheduler.works.set()
    asker.end()


def test_an_idle_scheduler_ends_when_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_role, "IDLE_POLL_S", 3600.0)
    SchedulerThread().stop()
