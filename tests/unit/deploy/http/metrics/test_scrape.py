"""One scrape covers all ingresses, and asks them seldom."""

from __future__ import annotations

import asyncio
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.http.engine_client import EngineClient, IngressReports, PlainFamily
from deploy.http.metrics import RequestTracker, ServerMetrics, Work, scrape
from deploy.http.served_models import ServedModels
from engine.errors import EngineDeadError
from engine.protocol.tokenizer_messages import TextDelta
from tests.support.fake_client import FakeEngineClient
from tests.support.metrics_text import values


class OneOfMany(FakeEngineClient):
    """`ingress` is its name; the others are in `others`, with the number of those that are
    silent."""

    def __init__(self, name: str = "a") -> None:
        super().__init__()
        self._name = name
        self.others: dict[str, list[PlainFamily]] = {}
        self.num_silent = 0
        self.num_asked = 0
        self.error: Exception | None = None

    @property
    def ingress(self) -> str:
        return self._name

    async def ingress_metrics(self, timeout_s: float) -> IngressReports:
        self.num_asked += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return IngressReports(self.others, self.num_silent)


def counted(requests: int) -> ServerMetrics:
    metrics = ServerMetrics("vllm")
    metrics.add_endpoint("completions")
    for _ in range(requests):
        tracker = RequestTracker(metrics.unnamed, "completions", "alice")
        tracker.work = Work(time.perf_counter(), 1, [8])
        tracker.delta(0, TextDelta(1, "x", [1], 1, None, None, 3, 2, queue_s=0.25))
        tracker.delta(0, TextDelta(1, "y", [2], 4, "stop", None, 3, 2))
        tracker.end(200)
    return metrics


def render(metrics: ServerMetrics, client: EngineClient) -> str:
    return asyncio.run(metrics.render(lambda: ServedModels(client))).decode()


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def up(text: str) -> dict[str, float]:
    return {
        dict(labels)["ingress"]: value
        for (name, labels), value in samples(text).items()
        if name == "manta_ingress_up"
    }


def test_every_series_of_every_ingress_stands_once() -> None:
    client, other = OneOfMany("a"), OneOfMany("b")
    client.others = {
        "b": counted(3).report(ServedModels(other)),
        "a": counted(9).report(ServedModels(client)),
    }
    found = samples(render(counted(2), client))
    assert all(dict(labels)["model_name"] == "fake" for _, labels in found)
    requests = {
        dict(labels)["ingress"]: value
        for (name, labels), value in found.items()
        if name == "manta_requests_total"
    }
    assert requests == {"a": 2, "b": 3}, "what the ingress itself has is as of now"
    engines = [labels for name, labels in found if name == "manta_engine_num_running"]
    assert sorted(dict(labels)["replica"] for labels in engines) == ["0", "1"]
    assert not any("ingress" in dict(labels) for labels in engines)


def test_scrapes_share_a_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "FRESH_S", 3600.0)
    client, metrics = OneOfMany(), counted(0)

    async def run() -> None:
        await asyncio.gather(*(metrics.render(lambda: ServedModels(client)) for _ in range(20)))
        assert client.num_asked == 1
        metrics.refused("forbidden")
        text = (await metrics.render(lambda: ServedModels(client))).decode()
        assert client.num_asked == 1
        assert values(text)['manta_refusals_total{reason="forbidden"}'] == 1

    asyncio.run(run())


def test_one_that_gives_up_does_not_end_the_scrape_of_others() -> None:
    client = OneOfMany()
    client.stats_delay_s = 0.05

    async def run() -> None:
        metrics = counted(1)
        first = asyncio.create_task(metrics.render(lambda: ServedModels(client)))
        second = asyncio.create_task(metrics.render(lambda: ServedModels(client)))
        await asyncio.sleep(0)
        first.cancel()
        assert b"manta_engine_num_running{" in await second
        assert first.cancelled()

    asyncio.run(run())


def test_silent_ingresses_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "FRESH_S", -1.0)
    client, metrics = OneOfMany("a"), counted(1)
    client.others = {"b": counted(1).report(ServedModels(OneOfMany("b")))}
    assert up(render(metrics, client)) == {"a": 1, "b": 1}
    b, client.others, client.num_silent = client.others, {}, 1
    assert up(render(metrics, client)) == {"a": 1, "b": 0}
    client.num_silent = 2
    assert up(render(metrics, client)) == {"a": 1, "b": 0, "unknown": 0}
    client.num_silent = 0
    assert up(render(metrics, client)) == {"a": 1}, "Serve has ended it"
    client.others = b
    assert up(render(metrics, client)) == {"a": 1, "b": 1}


def test_no_error_hides_what_is_measured_here() -> None:
    client = OneOfMany("a")
    client.error = EngineDeadError("Serve is away")
    text = render(counted(2), client)
    assert values(text)['manta_requests_total{endpoint="completions",status="200"}'] == 2
    assert up(text) == {"a": 1, "unknown": 0}


def test_there_are_no_metrics_before_there_is_a_client() -> None:
    def starting() -> ServedModels:
        raise EngineDeadError("the server is still starting")

    with pytest.raises(EngineDeadError, match="starting"):
        asyncio.run(ServerMetrics().render(starting))
