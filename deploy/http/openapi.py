"""The OpenAPI document: what FastAPI can't know, because handlers read and write bytes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deploy.http.anthropic.endpoints import CountTokensRoute
from deploy.http.anthropic.replies import AnthropicError, MessageEvent, MessageReply
from deploy.http.anthropic.request import MessagesRequest
from deploy.http.generation.json_route import JsonRoute
from deploy.http.openai import replies
from deploy.http.openai.chat import ChatCompletionRequest
from deploy.http.openai.completions import CompletionRequest
from deploy.http.openai.tokenization import DetokenizeRoute, TokenizeRoute

_ERRORS = {
    "400": "A field is wrong; `param` names it.",
    "404": "The model is not the served one.",
    "408": "The request took longer than `request_timeout_s`.",
    "413": "The body is too large.",
    "415": "The body's `Content-Type` is not JSON.",
    "429": "The queue is full.",
    "500": "The request failed.",
    "503": "No engine takes the request.",
}
_GENERATING: dict[str, tuple[type[BaseModel], type[BaseModel], type[BaseModel]]] = {
    "/v1/completions": (CompletionRequest, replies.Completion, replies.CompletionChunk),
    "/v1/chat/completions": (
        ChatCompletionRequest,
        replies.ChatCompletion,
        replies.ChatCompletionChunk,
    ),
    "/v1/messages": (MessagesRequest, MessageReply, MessageEvent),
}
"""By path: the shapes of the body, of the reply and of a stream's event."""
_ASKING: dict[str, type[JsonRoute]] = {
    "/tokenize": TokenizeRoute,
    "/detokenize": DetokenizeRoute,
    "/v1/messages/count_tokens": CountTokensRoute,
}
_READING: dict[str, tuple[type[BaseModel], tuple[str, ...]]] = {
    "/v1/models": (replies.Models, ("503",)),
    "/v1/models/{model}": (replies.Model, ("404", "503")),
    "/version": (replies.Version, ()),
}
_REF = "#/components/schemas/{model}"


def complete_document(document: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's `document` with the bodies of requests and replies."""
    kinds: list[type[BaseModel]] = [replies.Error, AnthropicError, replies.Health]
    kinds += [kind for shapes in _GENERATING.values() for kind in shapes]
    kinds += [kind for kind, _ in _READING.values()]
    kinds += [kind for route in _ASKING.values() for kind in (route.body, route.reply)]
    names, found = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
    refs = {kind: names[kind, "validation"] for kind in kinds}
    document.setdefault("components", {}).setdefault("schemas", {}).update(found["$defs"])
    paths = document["paths"]
    for path, (body, reply, chunk) in _GENERATING.items():
        paths[path]["post"]["requestBody"] = {"required": True, "content": _json(refs[body])}
        paths[path]["post"]["responses"] = {
            "200": {
                "description": "The reply, or with `stream: true` its events.",
                "content": _json(refs[reply])
                | _events(path, {"anyOf": [refs[chunk], refs[_error_of(path)]]}),
            },
            **_errors(path, refs, tuple(_ERRORS)),
        }
    for path, (reply, errors) in _READING.items():
        paths[path]["get"]["responses"] = {
            "200": {"description": "The reply.", "content": _json(refs[reply])},
            **_errors(path, refs, errors),
        }
    for path, route in _ASKING.items():
        paths[path]["post"]["requestBody"] = {"required": True, "content": _json(refs[route.body])}
        paths[path]["post"]["responses"] = {
            "200": {"description": "The reply.", "content": _json(refs[route.reply])},
            **_errors(path, refs, ("400", "404", "413", "415", "500", "503")),
        }
    health = _json(refs[replies.Health])
    for path in ("/health", "/ping"):
        paths[path]["get"]["responses"] = {
            "200": {"description": "Requests can be served.", "content": health},
            "503": {"description": "They can't be served.", "content": health},
        }
    paths["/metrics"]["get"]["responses"] = {
        "200": {
            "description": "Prometheus' text format.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        }
    }
    trace = paths["/debug/trace"]["get"]["responses"]
    trace.pop("422", None)  # a bad query is answered with 400
    trace |= _errors("/debug/trace", refs, ("400", "503"))
    document["components"]["schemas"].pop("HTTPValidationError", None)
    document["components"]["schemas"].pop("ValidationError", None)
    return document


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _error_of(path: str) -> type[BaseModel]:
    return AnthropicError if path.startswith("/v1/messages") else replies.Error


def _events(path: str, shape: dict[str, Any]) -> dict[str, Any]:
    """Server-sent events, each described by OpenAPI 3.2's `itemSchema`."""
    text = {"contentMediaType": "application/json", "contentSchema": shape}
    data = {
        "type": "string",
        "description": "A chunk; or an error, after which nothing follows; at the end [DONE].",
        "anyOf": [{"const": "[DONE]"}, text],
    }
    if _error_of(path) is AnthropicError:
        data = {"type": "string", "description": "An event, or an error.", "anyOf": [text]}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {"text/event-stream": {"itemSchema": event}}


def _errors(
    path: str, refs: dict[type[BaseModel], Any], statuses: tuple[str, ...]
) -> dict[str, Any]:
    content = _json(refs[_error_of(path)])
    return {status: {"description": _ERRORS[status], "content": content} for status in statuses}


class DocumentedApi(FastAPI):
    """A FastAPI application whose document is complete."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = complete_document(super().openapi())
        return self.openapi_schema
