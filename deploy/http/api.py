"""The HTTP application: its routes, and a reply in OpenAI's shape for every error."""

# No `from __future__ import annotations`: FastAPI reads the annotations of the handlers.
import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.http.access.gate import Gate, Rules
from deploy.http.access.hosts import HostGuard
from deploy.http.access.key_file import KeyFile
from deploy.http.access.paths import app_path
from deploy.http.access.quotas import Quotas
from deploy.http.anthropic.dialect import ANTHROPIC
from deploy.http.batches.driver import BATCHES, BatchDriver
from deploy.http.body import json_response
from deploy.http.dialect import RouteParts
from deploy.http.docs_page import ASSETS, add_docs
from deploy.http.engine_client import EngineHealth, ModelInfo
from deploy.http.errors import ErrorReply, failure_of
from deploy.http.generation.endpoint import CLIENT_GONE, Endpoint
from deploy.http.generation.unattended import BackgroundAnswers
from deploy.http.header_guard import REQUEST_ID
from deploy.http.metrics import ServerMetrics
from deploy.http.old_clients import OldClients
from deploy.http.openai.dialect import OPENAI
from deploy.http.openai.errors import openai_error
from deploy.http.openapi import DocumentedApi
from deploy.http.pages.pages import ASSETS as PAGE_ASSETS
from deploy.http.pages.pages import PAGES, add_pages
from deploy.http.records.opening import open_files, open_store
from deploy.http.records.runner import RecordRunner, RecordWorker
from deploy.http.served_models import ServedModels, overall
from deploy.http.settings import ApiSettings
from deploy.http.sglang.dialect import SGLANG
from deploy.http.slash_end import SlashEnd
from deploy.http.status import StatusProbe
from engine import __version__
from engine.errors import EngineDeadError, RequestError
from engine.process.shared_answer import SharedAnswer
from engine.trace import CAPACITY, chrome_trace_json

HEALTH_FRESH_S = 0.5
"""The engines are asked for their health at most that often, however often it is asked for."""
DIALECTS = (OPENAI, ANTHROPIC, SGLANG)
"""All APIs that are served. Errors of paths that none has are worded by the first."""


def build_api(
    models_provider: Callable[[], ServedModels], settings: ApiSettings | None = None
) -> FastAPI:
    """Build the application. It asks `models_provider` at each request, so it can be built before
    there is a client. Ray Serve can ship it (`serve.ingress(build_api(...))`); each process then
    has metrics of its own.
    """
    settings = settings or ApiSettings()
    metrics, quotas = ServerMetrics(settings.server.metrics_names), Quotas()
    endpoints: dict[str, Endpoint] = {}
    store = open_store(settings.server, metrics.store_failed)
    files = open_files(settings.server, metrics.store_failed)
    app = _Api(settings, metrics)
    app.state.metrics = metrics
    app.state.quotas = quotas
    app.state.store = store
    app.state.files = files
    app.state.tracing = None
    app.state.endpoints = endpoints
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_bad_query)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(RequestError, _on_error)
    app.add_exception_handler(EngineDeadError, _on_error)
    app.add_exception_handler(Exception, _on_error)

    keys = KeyFile(settings.server.api_keys_file) if settings.server.api_keys_file else None
    app.state.runner = runner = None
    workers: dict[str, RecordWorker] = {}
    if store is not None:

        def digests() -> list[str]:
            return [client.model_info.digest for client in models_provider()]

        stream_age_s = settings.server.request_store_stream_age_s
        app.state.runner = runner = RecordRunner(
            store, files, digests, workers, metrics.taken_up, stream_age_s
        )
    kinds = [(kind, dialect.error_reply) for dialect in DIALECTS for kind in dialect.routes]
    for kind, error_reply in kinds:
        parts = models_provider, metrics, settings, quotas, store, runner, files, error_reply
        route = kind(RouteParts(*parts))
        if isinstance(route, Endpoint):
            endpoints |= dict.fromkeys(route.paths, route)
            if store is not None:
                workers[route.name] = BackgroundAnswers(store, route, keys)
        for path, method in itertools.product(kind.paths, kind.methods):
            app.add_api_route(
                path,
                route.handle,
                methods=[method],
                name=path[1:].replace("/", "_"),
                description=kind.description,
                response_model=None,
            )

    if store is not None and files is not None:
        workers[BATCHES] = BatchDriver(
            store, files, endpoints, models_provider, keys, metrics.lines
        )

    @app.get("/v1/models")
    async def list_models() -> Response:
        infos = [client.model_info for client in models_provider()]
        models = [_describe_model(info, name) for info in infos for name in info.names]
        ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"], "has_more": False}
        return json_response({"object": "list", "data": models, **ends})

    @app.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> Response:
        client = models_provider().of(model or "(none)")
        return json_response(_describe_model(client.model_info, model))

    answer = SharedAnswer[dict[str, EngineHealth]](HEALTH_FRESH_S)

    @app.get("/health")
    @app.get("/ping")
    async def health(model: Annotated[str, Query()] = "") -> Response:
        try:
            states = await answer.get(models_provider().health)
        except Exception as exception:  # not started, or lost: both mean "not healthy"
            return json_response({"status": "unavailable", "detail": type(exception).__name__}, 503)
        if model and model not in states:
            # Who has no key may ask, so that nothing else is said.
            raise RequestError("There is no such base model.", "model", status=404)
        return _health_reply({model: states[model]} if model else states)

    @app.get("/metrics")
    async def scrape() -> Response:
        text = await metrics.render(models_provider)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    @app.get("/debug/trace")
    async def trace(last: Annotated[int, Query(ge=1, le=CAPACITY)] = 2000) -> Response:
        engines = await models_provider().trace(last)
        return StreamingResponse(_gently(chrome_trace_json(engines)), media_type="application/json")

    status = StatusProbe(models_provider, metrics, store, runner)

    @app.get("/debug/status")
    async def show_status() -> Response:
        return json_response(await status.look())

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    add_docs(app)
    add_pages(app, has_keys=bool(settings.server.api_keys_file))
    return app


class _Api(DocumentedApi):
    def __init__(self, settings: ApiSettings, metrics: ServerMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        super().__init__(
            DIALECTS,
            title="Manta",
            version=__version__,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
        )

    def build_middleware_stack(self) -> ASGIApp:
        """Each layer sees a request before those that were put on earlier."""
        settings, refused = self._settings, self._metrics.refused
        server = settings.server
        stack = super().build_middleware_stack()
        if server.api_keys_file:
            keys = KeyFile(server.api_keys_file)
            stack = Gate(stack, keys, access_rules(self), _worded, refused)
        if server.cors_origins:
            stack = CORSMiddleware(
                stack,
                allow_origins=server.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            )
        if server.allowed_hosts or settings.is_local:
            browsers_only = not server.allowed_hosts
            stack = HostGuard(
                stack, server.allowed_hosts, _worded, refused, browsers_only=browsers_only
            )
        if settings.tracing is not None:
            # Needs OpenTelemetry's packages, which an install may lack.
            from deploy.http.tracing.layer import TracingLayer
            from deploy.http.tracing.provider import Tracing

            self.state.tracing = tracing = Tracing(settings.tracing)
            stack = TracingLayer(stack, tracing.provider, known_paths(self))
        stack = SlashEnd(stack, known_paths(self), PAGES)
        # Outside of Starlette's own middleware: its answers to crashes need an id too.
        return OldClients(RequestIdMiddleware(stack, settings.add_request_id_header))


def access_rules(app: FastAPI) -> Rules:
    """Who may use which path of the application, if there are keys."""
    kinds = [kind for dialect in DIALECTS for kind in dialect.routes]
    user = {path for kind in kinds if not kind.for_admins for path in kind.paths}
    return Rules(
        open=frozenset({("GET", path) for path in ("/health", "/-/healthz", *PAGES)}),
        open_prefixes=(ASSETS, PAGE_ASSETS),
        user=frozenset(user | {"/v1/models", "/version", "/ping"}),
        user_prefixes=(
            *("/v1/models/", "/v1/responses/", "/v1/chat/completions/", "/v1/completions/"),
            *("/v1/messages/", "/generate/", "/v1/files/", "/v1/batches/"),
        ),
        known=known_paths(app),
    )


def known_paths(app: FastAPI) -> frozenset[str]:
    """The paths of the application's routes."""
    return frozenset(str(getattr(route, "path", "")) for route in app.routes)


class RequestIdMiddleware:
    """Gives every request an id: the client's `X-Request-Id`, or a new one.

    It also stores `send` as it is here, outside of Starlette's wrappers, in the request's state.
    The wrappers have nothing to do once a response has started, but each would cost time for every
    chunk. So streams use the stored `send`.
    """

    def __init__(self, app: ASGIApp, add_header: bool) -> None:
        self._app = app
        self._add_header = add_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((v for k, v in scope["headers"] if k == b"x-request-id"), b"")
        request_id = given.decode() if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_id=request_id, send=send)
        if not self._add_header:
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (b"x-request-id", request_id.encode())
                message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        await self._app(scope, receive, send_with_id)


def _health_reply(states: dict[str, EngineHealth]) -> Response:
    """503 unless every model is served; of several, each is told."""
    state = overall(states)
    body: dict[str, Any] = {"status": "ok" if state.ok else "unavailable"}
    if not state.ok:
        body["detail"] = state.detail
    if len(states) > 1:
        body["models"] = {name: "ok" if s.ok else s.detail for name, s in states.items()}
    return json_response(body, 200 if state.ok else 503)


def _describe_model(info: ModelInfo, name: str) -> dict[str, Any]:
    """The model or an adapter as OpenAI's clients read it, and as Anthropic's do."""
    created = datetime.fromtimestamp(info.created, UTC)
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": "manta",
        "root": info.name,
        "parent": None if name == info.name else info.name,
        "max_model_len": info.resolved.max_model_len,
        "type": "model",
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": info.resolved.max_model_len,
    }


async def _gently(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield megabytes to one reader in pieces, so that the streams of other readers go on."""
    for piece in pieces:
        yield piece
        await asyncio.sleep(0)


def _error(reply: ErrorReply, headers: dict[str, str] | None = None) -> Response:
    return Response(
        reply.body, reply.status, reply.headers | (headers or {}), media_type="application/json"
    )


def _worded(path: str, failure: RequestError) -> ErrorReply:
    """The failure as the API of the path says it."""
    dialect = next((dialect for dialect in DIALECTS if dialect.has(path)), OPENAI)
    return dialect.error_reply(failure)


async def _on_error(request: Request, exception: Exception) -> Response:
    failure = failure_of(exception, request.state.request_id)
    if "anthropic-version" in request.headers:  # on a path that several APIs have
        return _error(ANTHROPIC.error_reply(failure))
    return _error(_worded(app_path(request.scope), failure))


async def _on_client_gone(request: Request, exception: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _on_bad_query(request: Request, exception: Exception) -> Response:
    assert isinstance(exception, RequestValidationError)
    first = exception.errors()[0]
    field = str(first["loc"][-1])
    return _error(openai_error(RequestError(f"{field}: {first['msg']}", field)))


async def _on_http_exception(request: Request, exception: Exception) -> Response:
    assert isinstance(exception, HTTPException)
    path = app_path(request.scope)
    asked = f"{request.method} {path[:200]}"
    message = {
        404: f"Invalid URL ({asked}).",
        405: f"Method not allowed ({asked}).",
    }.get(exception.status_code, exception.detail)
    headers = dict(exception.headers or {})
    return _error(_worded(path, RequestError(message, status=exception.status_code)), headers)
