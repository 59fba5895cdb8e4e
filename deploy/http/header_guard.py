"""A guard that sees a client's headers before Ray Serve reads them.

Serve (2.60) decodes some headers as UTF-8 before any of our code runs, and answers other bytes with
its own plain 500, without a line in a log. It returns the client's `X-Request-Id` unchecked, and
lets clients switch off `request_timeout_s` and the end of requests whose client has left.
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names `middlewares`, which puts the guard outside of
Serve's code.
"""

from __future__ import annotations

import os
import re

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

IMPORT_PATH = "deploy.http.header_guard:middlewares"
REQUEST_ID = re.compile(rb"[!-~]{1,128}")
"""An `X-Request-Id` that is kept; others are replaced by a new one."""
UPLOADS = "/v1/files"
NO_WATCH = (b"x-request-disconnect-disabled", b"?1")
"""To notice a client that leaves, Serve reads whatever comes, into memory. Uploads notice it
themselves, and read as fast as they are written to disk."""
_ASCII = re.compile(rb"[ -~]*")
_STEERS_SERVE = {
    b"serve_multiplexed_model_id",
    b"x_request_timeout_seconds",
    b"x_request_disconnect_disabled",
}
"""Which model of a replica, how long at most, whether to go on without a client: none of that is a
client's to say."""
_READ_BY_SERVE = {
    os.environ.get("RAY_SERVE_SESSION_ID_HEADER_KEY", "x-session-id")
    .lower()
    .replace("-", "_")
    .encode(),
    b"traceparent",
    b"tracestate",
}


def middlewares() -> list[Middleware]:
    """The guard as a list, for Serve, which calls this once per process: in the Python proxy, and
    in replicas behind HAProxy.
    """
    return [Middleware(HeaderGuard)]


class HeaderGuard:
    """Drops headers that Serve can't read: an `X-Request-Id` that isn't 1 to 128 printable ASCII
    characters (Serve then makes one), other headers for Serve that aren't ASCII, and those that
    steer Serve."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = [(k, v) for k, v in scope["headers"] if _is_fine(k, v)]
            if scope["method"] == "POST" and scope["path"].endswith(UPLOADS):
                headers.append(NO_WATCH)
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)


def _is_fine(name: bytes, value: bytes) -> bool:
    if name == b"x-request-id":
        return REQUEST_ID.fullmatch(value) is not None
    name = name.replace(b"-", b"_")  # Serve reads `-` and `_` as the same
    if name in _READ_BY_SERVE:
        return _ASCII.fullmatch(value) is not None
    return name not in _STEERS_SERVE
