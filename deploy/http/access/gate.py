"""`Gate`: lets a request pass to the application if its key allows its path."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from deploy.http.access.key_file import KeyFile
from deploy.http.access.paths import app_path
from deploy.http.errors import ErrorReply
from engine.errors import RequestError

_BEARER = re.compile(rb"bearer +([^\s]+) *", re.IGNORECASE)

Level = Literal["open", "user", "admin"]
"""Who may use a path: everybody, every key, or keys with the role `admin`."""


class Rules(NamedTuple):
    """Levels of paths. A path that none of the rules has is of level `user` if the application
    doesn't know it (it answers 404), else `admin`."""

    open: frozenset[tuple[str, str]]
    """Pairs of method and path."""
    open_prefixes: tuple[str, ...]
    """Beginnings of the paths of files that everybody may read."""
    user: frozenset[str]
    user_prefixes: tuple[str, ...]
    known: frozenset[str]
    """All paths of the application."""

    def level(self, method: str, path: str) -> Level:
        """Of a request."""
        if (method, path) in self.open or (method == "GET" and path.startswith(self.open_prefixes)):
            return "open"
        if path in self.user or path.startswith(self.user_prefixes) or path not in self.known:
            return "user"
        return "admin"


class Gate:
    """Answers 401 and 403 itself, before anything of a body is read.

    It decides by the path that routing goes by, `scope["path"]`, never by a URL that a client's
    `Host` is part of (CVE-2026-48746). The key that it found is in the request's state, as `key`.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyFile,
        rules: Rules,
        error_reply: Callable[[str, RequestError], ErrorReply],
        refused: Callable[[str], None],
    ) -> None:
        """`error_reply` words a failure for a path; `refused` is told a word for each refusal."""
        self._app = app
        self._keys = keys
        self._rules = rules
        self._error_reply = error_reply
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http":
            path = app_path(scope)
            level = self._rules.level(scope["method"], path)
            if level != "open":
                failure = self._check(scope, level)
                if failure is not None:
                    self._refused("unauthorized" if failure.status == 401 else "forbidden")
                    await send_refusal(scope, send, self._error_reply(path, failure))
                    return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, level: Level) -> RequestError | None:
        secrets = _secrets(scope)
        key = self._keys.find(secrets)
        if key is None:
            message = "The API key is not valid."
            if not secrets:
                message = "This server wants an API key: send `Authorization: Bearer KEY`."
            return RequestError(message, status=401, code="invalid_api_key")
        if level == "admin" and key.role != "admin":
            return RequestError(
                "This path needs a key with the role admin.", status=403, code="admin_only"
            )
        scope.setdefault("state", {})["key"] = key
        return None


def _secrets(scope: Scope) -> list[bytes]:
    """What the client sent as keys."""
    found = []
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            found.append(value.strip())
        elif name == b"authorization" and (match := _BEARER.fullmatch(value.strip())):
            found.append(match[1])
    return [secret for secret in found[:4] if secret]


async def send_refusal(scope: Scope, send: Send, reply: ErrorReply) -> None:
    """Answer a request whose body, if it has one, isn't read: the connection ends with it."""
    headers = {"content-type": "application/json", "content-length": str(len(reply.body))}
    headers |= reply.headers
    if reply.status == 401:
        headers["www-authenticate"] = "Bearer"
    given = dict(scope["headers"])
    if b"transfer-encoding" in given or given.get(b"content-length", b"0").strip() != b"0":
        headers["connection"] = "close"
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": raw})
    await send({"type": "http.response.body", "body": reply.body, "more_body": False})
