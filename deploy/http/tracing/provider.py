"""`Tracing`: one process's way for spans to the collector."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from deploy.http.tracing.options import TracingOptions
from engine import __version__

logger = logging.getLogger(__name__)

MAX_QUEUED_SPANS = 8192
EXPORT_TIMEOUT_S = 5.0
COMPLAINT_PERIOD_S = 60.0
FLUSH_S = 2.0


class PatientExporter(SpanExporter):
    """Exports with another exporter, and says at most once a minute that it failed."""

    def __init__(self, inner: SpanExporter, endpoint: str) -> None:
        self._inner = inner
        self._endpoint = endpoint
        self._num_lost = 0
        self._complained_at: float | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result, why = self._inner.export(spans), ""
        except Exception as exception:
            # The processor would log a traceback for every batch.
            result, why = SpanExportResult.FAILURE, f" ({type(exception).__name__})"
        if result is not SpanExportResult.SUCCESS:
            self._complain(len(spans), why)
        return result

    def _complain(self, num_spans: int, why: str) -> None:
        self._num_lost += num_spans
        now = time.monotonic()
        if self._complained_at is None or now - self._complained_at >= COMPLAINT_PERIOD_S:
            logger.warning(
                "the collector at %s doesn't take traces%s: at least %d spans are lost",
                self._endpoint,
                why,
                self._num_lost,
            )
            self._complained_at, self._num_lost = now, 0

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)


class Tracing:
    """A `TracerProvider` of our own, and a thread that sends its spans in batches.

    A full queue loses its oldest spans. No request waits for the collector.
    """

    def __init__(self, options: TracingOptions) -> None:
        url = options.endpoint.rstrip("/") + "/v1/traces"
        exporter = OTLPSpanExporter(url, timeout=EXPORT_TIMEOUT_S)
        # These report every attempt and every lost span. `PatientExporter` reports for them.
        for name in ("exporter.otlp", "exporter.http", "sdk._shared_internal"):
            logging.getLogger(f"opentelemetry.{name}").setLevel(logging.CRITICAL)
        resource = Resource.create(
            {
                "service.name": "manta",
                "service.version": __version__,
                "manta.model": options.model,
            }
        )
        self.provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.provider.add_span_processor(
            BatchSpanProcessor(
                PatientExporter(exporter, options.endpoint), max_queue_size=MAX_QUEUED_SPANS
            )
        )

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Send what is left, for at most `timeout_s`."""
        # The SDK's own time limits don't hold while a collector doesn't answer.
        closing = threading.Thread(target=self.provider.shutdown, daemon=True)
        closing.start()
        closing.join(timeout_s)
