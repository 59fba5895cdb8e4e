"""Tokens per minute: over time, over ingresses, and what a client is told."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.http.access import quotas as quotas_module
from deploy.http.access.api_key import ApiKey
from deploy.http.access.quotas import FORGET_AFTER_S, Quotas
from deploy.http.engine_client import SpendingReport
from deploy.http.metrics import RequestTracker, ServerMetrics
from engine.errors import RequestError
from engine.protocol.tokenizer_messages import TextDelta
from tests.support.fake_client import FakeEngineClient

LIMIT = 600
METRICS = ServerMetrics()


def key(limit: int | None = LIMIT, name: str = "a") -> ApiKey:
    return ApiKey(name=name, sha256="0" * 64, tokens_per_minute=limit)


def tracker() -> RequestTracker:
    return RequestTracker(METRICS.unnamed, "chat")


def generate(of: RequestTracker, tokens: int) -> None:
    of.delta(0, TextDelta(1, "", [], of.num_output + tokens, None, None, 1, 0))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def wait_s(quotas: Quotas, tokens: int, of: ApiKey | None = None) -> int:
    """0 if the request is let in, else what it is told."""
    try:
        quotas.end(quotas.begin(of or key(), tokens, tracker()))
    except RequestError as error:
        assert error.status == 429 and error.code == "rate_limit_exceeded"
        return error.retry_after_s
    return 0


def test_a_minute() -> None:
    clock = Clock()
    quotas = Quotas(clock)
    assert wait_s(quotas, 400) == 0
    assert wait_s(quotas, 300) == 10  # 100 are missing, 10 come in a second
    assert wait_s(quotas, 200) == 0
    assert wait_s(quotas, 1) == 1
    assert wait_s(quotas, 1, key(name="b")) == 0, "another key has another bucket"
    clock.now += 30
    assert wait_s(quotas, 300) == 0
    clock.now += 3600
    assert wait_s(quotas, LIMIT) == 0, "an hour brings no more than a minute"
    assert wait_s(quotas, 1) == 1


def test_a_prompt_above_the_limit_needs_a_full_bucket() -> None:
    clock = Clock()
    quotas = Quotas(clock)
    assert wait_s(quotas, 3 * LIMIT) == 0
    assert wait_s(quotas, 1) == 121
    clock.now += 120
    assert wait_s(quotas, 3 * LIMIT) == 60
    clock.now += 60
    assert wait_s(quotas, 3 * LIMIT) == 0


def test_outputs_count_while_they_come() -> None:
    clock = Clock()
    quotas = Quotas(clock)
    running = tracker()
    ticket = quotas.begin(key(), 100, running)
    generate(running, 800)
    assert wait_s(quotas, 1) == 31  # 300 below zero, and one more
    generate(running, 100)
    quotas.end(ticket)
    assert wait_s(quotas, 1) == 41
    generate(running, 100)
    assert wait_s(quotas, 1) == 41, "a request that is over takes no more"


def test_a_limit_that_changes() -> None:
    clock = Clock()
    quotas = Quotas(clock)
    assert wait_s(quotas, 300) == 0
    assert wait_s(quotas, 61, key(120)) == 1, "half is left of the new limit, too"
    assert wait_s(quotas, 60, key(120)) == 0


def test_full_buckets_are_forgotten() -> None:
    clock = Clock()
    quotas = Quotas(clock)
    assert wait_s(quotas, 100) == 0 and quotas.report() == {"a": (100.0, 500.0, 100.0)}
    clock.now += 60
    assert quotas.report() == {} and quotas.buckets
    clock.now += FORGET_AFTER_S
    assert quotas.report() == {} and not quotas.buckets


Step = tuple[int, int, float]
STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 200), st.sampled_from([0.0, 0.5, 1.0, 5.0])),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.booleans())
def test_several_ingresses(steps: list[Step], is_late: bool) -> None:
    """If all hear of a request before the next one comes, they are as one. One that starts late
    learns what is left from the first report."""
    clock = Clock()
    alone, others = Quotas(clock), [Quotas(clock) for _ in range(3)]
    for number, quotas in enumerate(others):
        quotas.name = f"ingress-{number}"

    def exchange(among: list[Quotas]) -> None:
        for each in among:
            report = each.report()
            for to in among:
                to.hear(each.name, report)

    for index, (at, tokens, seconds) in enumerate(steps):
        among = others[:2] if is_late and index < len(steps) // 2 else others
        exchange(among)
        expected = wait_s(alone, tokens)
        assert wait_s(among[at % len(among)], tokens) == expected
        exchange(among)
        clock.now += seconds


def test_an_ingress_that_starts_again() -> None:
    """It counts from 0 again; the others don't give anything back for that."""
    clock = Clock()
    one, other = Quotas(clock), Quotas(clock)
    assert wait_s(one, 500) == 0
    other.hear("one", one.report())
    assert wait_s(other, 200) == 10
    again = Quotas(clock)
    assert wait_s(again, 50) == 0
    other.hear("one", again.report())
    assert wait_s(other, 200) == 15
    assert wait_s(again, 550) == 0, "it wasn't told"
    again.hear("other", other.report())
    assert wait_s(again, 1) > 0


def test_ingresses_that_are_gone_are_forgotten() -> None:
    """Also by one that never had a request."""
    clock = Clock()
    idle, other = Quotas(clock), Quotas(clock)
    assert wait_s(other, 100) == 0
    for number in range(5):
        idle.hear(f"ingress-{number}", other.report())
        clock.now += FORGET_AFTER_S + 1
        assert wait_s(other, 100) == 0
    assert len(idle.heard) == 1


@pytest.mark.parametrize("pause_s", [0.0, 1.0])
def test_ingresses_that_begin_at_once(pause_s: float) -> None:
    """Neither has heard of the other when it lets the key's first request in."""
    clock = Clock()
    one, other = Quotas(clock), Quotas(clock)
    one.name, other.name = "one", "other"
    assert wait_s(one, 300) == 0 and wait_s(other, 300) == 0
    clock.now += pause_s
    other.hear("one", one.report())
    one.hear("other", other.report())
    for each in (one, other):
        assert wait_s(each, 300) >= 28


def test_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports go to every ingress each second, also behind a report that failed."""
    monkeypatch.setattr(quotas_module, "SHARE_EVERY_S", 0.001)

    class Client(FakeEngineClient):
        calls = 0
        ingresses: list[Quotas]

        async def tell_spending(self, ingress: str, report: SpendingReport) -> None:
            self.calls += 1
            if self.calls == 2:
                raise ConnectionError
            for each in self.ingresses:
                each.hear(ingress, report)

    async def check() -> None:
        client, there, here = Client(), Quotas(), Quotas()
        client.ingresses = [here, there]
        here.share(client)
        here.share(client)
        here.begin(key(), 500, tracker())
        async with asyncio.timeout(10):
            while client.calls < 4:
                await asyncio.sleep(0.001)
        assert wait_s(there, 200) > 0
        assert wait_s(here, 90) == 0, "its own reports take nothing"
        assert here.sharing is not None
        here.sharing.cancel()

    asyncio.run(check())
