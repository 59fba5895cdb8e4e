"""The way of spans to the collector, and the configuration of it."""

from __future__ import annotations

import logging
import sys

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult

from deploy.http.tracing import provider as provider_module
from deploy.http.tracing.options import TracingOptions, check_tracing
from deploy.http.tracing.provider import PatientExporter, Tracing
from deploy.start.config import AppConfig
from engine.errors import ConfigError
from tests.support.collector import Collector
from tests.support.source_files import ROOT


def test_spans_reach_the_collector() -> None:
    with Collector() as collector:
        tracing = Tracing(TracingOptions(collector.url + "/", "a-model"))
        tracing.provider.get_tracer("x").start_span("POST").end()
        tracing.close(30)
        (span,) = collector.spans
    assert collector.paths == {"/v1/traces"}
    assert span.resource["service.name"] == "manta"
    assert span.resource["manta.model"] == "a-model"


def test_a_dead_collector_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tracing = Tracing(TracingOptions("http://127.0.0.1:9", "m"))
    tracer = tracing.provider.get_tracer("x")
    for _ in range(3 * provider_module.MAX_QUEUED_SPANS):
        tracer.start_span("a").end()  # would stand still if the queue had to be emptied
    tracing.close(0.0)


class _Failing:
    def __init__(self) -> None:
        self.error: Exception | None = None

    def export(self, spans: object) -> SpanExportResult:
        if self.error is not None:
            raise self.error
        return SpanExportResult.FAILURE


def test_failures_are_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(provider_module.time, "monotonic", lambda: now)
    inner = _Failing()
    exporter = PatientExporter(inner, "http://c:4318")  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            exporter.export([None] * 2)  # type: ignore[list-item]
        assert len(caplog.records) == 1
        now += provider_module.COMPLAINT_PERIOD_S
        inner.error = OSError("a secret")
        assert exporter.export([None]) is SpanExportResult.FAILURE  # type: ignore[list-item]
    second = caplog.records[1].getMessage()
    assert "at least 9 spans" in second and "OSError" in second and "secret" not in second


@pytest.mark.parametrize(
    "endpoint",
    ["collector:4318", "ftp://c", "http://", "http://c/?a=1", "http://c:99999", "http://c:4318/v1/traces"],
)  # fmt: skip
def test_endpoints_that_cannot_be(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        check_tracing(endpoint)


def test_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as error:
        check_tracing("https://me:hunter2@c:4318")
    assert "hunter2" not in str(error.value)


def test_good_endpoints() -> None:
    for endpoint in (None, "http://c:4318", "https://c/otlp/", "http://[::1]:4318"):
        check_tracing(endpoint)


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.exporter.otlp.proto.http"])
def test_missing_packages_are_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Without:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name.startswith(missing):
                raise ModuleNotFoundError(name)

    for name in [name for name in sys.modules if name.startswith(missing)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Without, *sys.meta_path])
    with pytest.raises(ConfigError, match=r"manta-serve\[otel\]"):
        check_tracing("http://c:4318")


def test_the_configuration_is_checked() -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        AppConfig.from_args({"model": str(ROOT / "models/manta-small"), "otlp_endpoint": "c:4318"})
