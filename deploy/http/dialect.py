"""`Dialect`: one API, as a list of routes and its words for errors. `Route`: one of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from deploy.http.access.quotas import Quotas
from deploy.http.errors import ErrorReply
from deploy.http.files.file_store import FileStore
from deploy.http.metrics import ServerMetrics
from deploy.http.records.runner import RecordRunner
from deploy.http.records.store import RecordStore
from deploy.http.served_models import ServedModels
from deploy.http.settings import ApiSettings
from engine.errors import RequestError


class RouteParts(NamedTuple):
    """What routes share."""

    models_provider: Callable[[], ServedModels]
    """Asked at each request."""
    metrics: ServerMetrics
    settings: ApiSettings
    quotas: Quotas
    store: RecordStore | None
    """Of requests; None: none are kept."""
    runner: RecordRunner | None
    """Makes answers in the background; None: there are none."""
    files: FileStore | None
    """Of batches; None: none are kept."""
    error_reply: Callable[[RequestError], ErrorReply]
    """A failure in the words of the route's API."""


class Route(ABC):
    """One route. Ray Serve ships it to each ingress replica."""

    paths: ClassVar[tuple[str, ...]]
    """The same under several names; the first is the usual one."""
    methods: ClassVar[tuple[Literal["GET", "POST", "DELETE"], ...]] = ("POST",)
    description: ClassVar[str]
    """For the OpenAPI document, as `body`, `reply`, `events` and `errors` are."""
    parameters: ClassVar[tuple[dict[str, Any], ...]] = ()
    """Parts of the path, and of the query, as OpenAPI describes them."""
    body: ClassVar[type[BaseModel] | None] = None
    """Shape of the request; None if it has none."""
    form: ClassVar[dict[str, Any] | None] = None
    """JSON schema of the request, if it is a form."""
    reply: ClassVar[type[BaseModel] | None]
    """Shape of the reply; None if it is plain text."""
    events: ClassVar[tuple[type[BaseModel], ...]] = ()
    """Shapes of what a stream's events hold; empty if the route doesn't stream."""
    done: ClassVar[str] = ""
    """What the last event of a stream holds instead."""
    for_admins: ClassVar[bool] = False
    """Whether keys need the role admin."""
    errors: ClassVar[tuple[int, ...]]
    """Statuses of failures."""

    def __init__(self, parts: RouteParts) -> None:
        self.models_provider, self.metrics, self.settings = parts[:3]
        self.quotas, self.store, self.runner, self.files, self.error_reply = parts[3:]

    @abstractmethod
    async def handle(self, request: Request) -> Response:
        """The HTTP handler. Raises `RequestError` and `EngineDeadError`, which the application
        answers."""


class Dialect(NamedTuple):
    """One API. `error`: the shape of `error_reply`'s bodies; `prefixes`: beginnings of paths that
    are its own besides those of its routes."""

    routes: tuple[type[Route], ...]
    error_reply: Callable[[RequestError], ErrorReply]
    error: type[BaseModel]
    prefixes: tuple[str, ...] = ()

    def has(self, path: str) -> bool:
        """Whether the path belongs to this API."""
        named = any(path in route.paths for route in self.routes)
        return named or path.startswith(self.prefixes)
