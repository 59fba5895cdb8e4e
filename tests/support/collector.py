"""`Collector`: receives traces over OTLP/HTTP, as an OpenTelemetry collector does."""

from __future__ import annotations

import gzip
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Span(NamedTuple):
    """One received span; ids in hex, times in ns."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start: int
    end: int
    is_error: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]


class Collector:
    """An HTTP server in a thread."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.paths: set[str] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        bodies, paths = self.bodies, self.paths

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                paths.add(self.path)
                bodies.append(body)
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        return Handler

    @property
    def spans(self) -> list[Span]:
        """All spans so far."""
        return [span for body in list(self.bodies) for span in _read(body)]

    def traces(self, number: int, limit_s: float = 30.0) -> dict[str, list[Span]]:
        """By trace id, in order of time, once there are `number` traces whose server span came."""
        deadline = time.monotonic() + limit_s
        while True:
            found: dict[str, list[Span]] = defaultdict(list)
            for span in sorted(self.spans, key=lambda span: span.start):
                found[span.trace_id].append(span)
            whole = [one for one in found.values() if any(server_span([s]) for s in one)]
            if len(whole) >= number:
                return dict(found)
            assert time.monotonic() < deadline, f"{len(whole)} of {number} traces: {dict(found)}"
            time.sleep(0.1)


def server_span(trace: list[Span]) -> Span | None:
    """The trace's span of the HTTP request."""
    return next((span for span in trace if span.name.startswith("POST")), None)


def _read(body: bytes) -> list[Span]:
    message = ExportTraceServiceRequest.FromString(body)
    return [
        Span(
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.name,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            span.status.code == span.status.STATUS_CODE_ERROR,
            _values(span.attributes),
            _values(group.resource.attributes),
        )
        for group in message.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


def _values(attributes: Any) -> dict[str, Any]:
    return {item.key: _plain(item.value) for item in attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(one) for one in value.array_value.values]
    return getattr(value, kind)
