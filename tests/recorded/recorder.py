"""`Recorder`: an ASGI layer that keeps the requests of a client, without what is one machine's."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = ("accept", "anthropic-beta", "anthropic-version", "content-type", "openai-beta")
"""Those that may change what the server does."""
MAX_STRING, KEPT = 160, 40
"""Characters. A longer string is somebody's prompt: its beginning is kept."""
WHOLE = ("arguments", "definition", "pattern", "partial_json")
"""Strings that mean something else once they are cut."""
_ID = re.compile(
    r"\b(?P<kind>call|toolu|chatcmpl|cmpl|msg|resp|fc|ctc|rs|req|run|embd|task|session|user)"
    r"[-_](?=[\w-]*\d)[\w-]{8,}"
)
_PATTERNS = (
    (re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "ID"),
    (re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{10,}\b"), "ID"),
    (re.compile(r"\b20\d\d[-/]\d\d[-/]\d\d([T ]\d\d:\d\d(:\d\d)?(\.\d+)?Z?)?"), "2000-01-01"),
    (re.compile(r"\b[12]\d{9}(\d{3})?\b"), "946684800"),
    (re.compile(r"(?:127\.0\.0\.1|localhost):\d+"), "server"),
)


class Recorder:
    """Call it with the application, and serve the result. `requests` then holds what came."""

    def __init__(self, places: Mapping[str, str]) -> None:
        """`places`: what to write for paths of this machine."""
        self.requests: list[dict[str, Any]] = []
        self.failures: list[str] = []
        """Replies that no client should get."""
        self._places = {**places, socket.gethostname(): "host"}
        self._ids: dict[str, str] = {}

    def __call__(self, app: ASGIApp) -> ASGIApp:
        async def layer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            body, is_whole, status = b"", False, 0

            async def read() -> Message:
                nonlocal body, is_whole
                message = await receive()
                if message["type"] == "http.request" and not is_whole:
                    body += message.get("body", b"")
                    is_whole = not message.get("more_body", False)
                return message

            async def answer(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                    self._keep(scope, body, status)
                elif status >= 400:
                    self.failures[-1] += message.get("body", b"").decode(errors="replace")
                await send(message)

            await app(scope, read, answer)

        return layer

    def _keep(self, scope: Scope, body: bytes, status: int) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        query = scope["query_string"].decode()
        request: dict[str, Any] = {
            "method": scope["method"],
            "path": scope["path"] + ("?" + query if query else ""),
            "headers": {name: headers[name] for name in HEADERS if name in headers},
            "status": status,
        }
        if status >= 400:
            self.failures.append(f"{request['method']} {request['path']}: {status} ")
        if body:
            try:
                request["body"] = self.without_traces(json.loads(body))
            except ValueError:
                self.failures.append(f"{request['path']}: a body that is no JSON")
        if request not in self.requests:
            self.requests.append(request)

    def without_traces(self, value: Any, key: str = "") -> Any:
        """JSON without ids, dates and places, and with long strings cut."""
        if isinstance(value, dict):
            return {self._text(k, k): self.without_traces(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [self.without_traces(item, key) for item in value]
        return self._text(value, key) if isinstance(value, str) else value

    def _text(self, text: str, key: str) -> str:
        for place, name in self._places.items():
            text = text.replace(place, name)
        text = _ID.sub(lambda match: self._id(match[0], match["kind"]), text)
        for pattern, name in _PATTERNS:
            text = pattern.sub(name, text)
        if len(text) <= MAX_STRING or key in WHOLE:
            return text
        return f"{text[:KEPT]}... ({len(text)} characters)"

    def _id(self, text: str, kind: str) -> str:
        """The same name for the same id, so that results still belong to calls."""
        return self._ids.setdefault(text, f"{kind}_{len(self._ids) + 1}")
