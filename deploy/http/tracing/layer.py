"""`TracingLayer`: the ASGI layer that traces requests."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.http.access.api_key import ApiKey
from deploy.http.access.paths import app_path
from deploy.http.tracing.request_trace import RequestTrace
from engine import __version__

_W3C = TraceContextTextMapPropagator()


class TracingLayer:
    """Traces each POST, refused ones too. Others are probes, scrapes and pages.

    It lies inside the layer that gives requests their ids. Endpoints find the trace in the
    request's state.
    """

    def __init__(self, app: ASGIApp, provider: TracerProvider, routes: Iterable[str]) -> None:
        """`routes`: the paths that the application has. Others are not named in traces, because
        anybody can invent them."""
        self._app = app
        self._tracer = provider.get_tracer("manta", __version__)
        self._routes = frozenset(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        parent = parent_of(scope["headers"])
        given = get_current_span(parent).get_span_context()
        if given.is_valid and not given.trace_flags.sampled:
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        state["trace"] = trace = RequestTrace()
        path = app_path(scope)

        async def send_noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        finally:
            attributes: dict[str, AttributeValue] = {"manta.request_id": state["request_id"]}
            key: ApiKey | None = state.get("key")
            if key is not None:
                attributes["manta.key"] = key.name
            route = path if path in self._routes else ""
            trace.export(self._tracer, parent, "POST", route, attributes)


def parent_of(headers: Iterable[tuple[bytes, bytes]]) -> Context:
    """The client's span, by W3C's `traceparent` and `tracestate`; empty if it named none."""
    carrier: dict[str, list[str]] = {"traceparent": [], "tracestate": []}
    for name, value in headers:
        if (key := name.decode("latin-1")) in carrier:
            carrier[key].append(value.decode("latin-1"))
    if len(carrier["traceparent"]) != 1:
        return Context()
    return _W3C.extract(carrier, Context())
