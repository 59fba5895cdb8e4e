"""The OpenAPI document: what FastAPI can't know, because handlers read and write bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deploy.http.dialect import Dialect, Route
from deploy.http.openai import replies

_ERRORS = {
    400: "A field is wrong; `param` names it.",
    401: "The API key is missing or not valid.",
    403: "A page of another site sent the request, or the API key may not do this.",
    404: "The model is not the served one.",
    409: "The request was begun by another model or configuration.",
    408: "The request took longer than `request_timeout_s`, or its body didn't come in time.",
    413: "The body is too large.",
    415: "The body's `Content-Type` is not JSON.",
    421: "`Host` doesn't name this server.",
    429: "The queue is full, or the API key's quota is used up.",
    500: "The request failed.",
    503: "No engine takes the request.",
}
_READING: dict[str, tuple[type[BaseModel], tuple[int, ...]]] = {
    "/v1/models": (replies.Models, (503,)),
    "/v1/models/{model}": (replies.Model, (404, 503)),
    "/version": (replies.Version, ()),
}
_TEXT: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
_REF = "#/components/schemas/{model}"


def complete_document(document: dict[str, Any], dialects: Sequence[Dialect]) -> dict[str, Any]:
    """FastAPI's `document` with the bodies of requests and replies."""
    routes = [(route, dialect) for dialect in dialects for route in dialect.routes]
    kinds: list[type[BaseModel]] = [replies.Error, replies.Health]
    kinds += [dialect.error for dialect in dialects]
    kinds += [kind for kind, _ in _READING.values()]
    for route, _ in routes:
        kinds += [*filter(None, (route.reply, route.body)), *route.events]
    names, found = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
    refs = {kind: names[kind, "validation"] for kind in kinds}
    document.setdefault("components", {}).setdefault("schemas", {}).update(found["$defs"])
    paths = document["paths"]
    for route, dialect in routes:
        for path in route.paths:
            for method in route.methods:
                _describe(paths[path][method.lower()], route, refs, refs[dialect.error])
    for path, (reply, errors) in _READING.items():
        paths[path]["get"]["responses"] = {
            "200": {"description": "The reply.", "content": _json(refs[reply])},
            **_errors(refs[replies.Error], errors),
        }
    health = _json(refs[replies.Health])
    for path in ("/health", "/ping"):
        paths[path]["get"]["responses"] = {
            "200": {"description": "Requests can be served.", "content": health},
            **_errors(refs[replies.Error], (404,)),
            "503": {"description": "They can't be served.", "content": health},
        }
    paths["/metrics"]["get"]["responses"] = {
        "200": {
            "description": "Prometheus' text format.",
            "content": _TEXT,
        }
    }
    trace = paths["/debug/trace"]["get"]["responses"]
    trace.pop("422", None)  # a bad query is answered with 400
    trace |= _errors(refs[replies.Error], (400, 503))
    paths["/debug/status"]["get"]["responses"] |= _errors(refs[replies.Error], (503,))
    document["components"]["schemas"].pop("HTTPValidationError", None)
    document["components"]["schemas"].pop("ValidationError", None)
    return document


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _describe(
    operation: dict[str, Any], route: type[Route], refs: dict[type[BaseModel], Any], error: Any
) -> None:
    """Complete the description of one method of a route. `error`: the schema of its errors."""
    if route.parameters:
        operation["parameters"] = list(route.parameters)
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(refs[route.body])}
    if route.form is not None:
        content = {"multipart/form-data": {"schema": route.form}}
        operation["requestBody"] = {"required": True, "content": content}
    description, content = "The reply.", _TEXT if route.reply is None else _json(refs[route.reply])
    if route.events:
        description = "The reply, or with `stream: true` its events."
        content |= _events([refs[event] for event in route.events], route.done)
    operation["responses"] = {
        "200": {"description": description, "content": content},
        **_errors(error, route.errors),
    }


def _events(shapes: list[Any], done: str) -> dict[str, Any]:
    """Server-sent events, each described by OpenAPI 3.2's `itemSchema`."""
    text = {"contentMediaType": "application/json", "contentSchema": {"anyOf": shapes}}
    data: dict[str, Any] = {
        "type": "string",
        "description": "An event, or an error, after which nothing follows.",
        "anyOf": [text],
    }
    if done:
        data["description"] += f" At the end {done}."
        data["anyOf"].insert(0, {"const": done})
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {"text/event-stream": {"itemSchema": event}}


def _errors(shape: Any, statuses: tuple[int, ...]) -> dict[str, Any]:
    content = _json(shape)
    return {
        str(status): {"description": _ERRORS[status], "content": content} for status in statuses
    }


class DocumentedApi(FastAPI):
    """A FastAPI application whose document is complete."""

    def __init__(self, dialects: Sequence[Dialect], **options: Any) -> None:
        self._dialects = dialects
        super().__init__(**options)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = complete_document(super().openapi(), self._dialects)
        return self.openapi_schema
