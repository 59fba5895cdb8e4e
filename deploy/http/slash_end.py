"""`SlashEnd`: a path with a slash at its end is the path without it."""

from __future__ import annotations

from collections.abc import Collection

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from deploy.http.access.paths import app_path


class SlashEnd:
    """Takes one slash off the end of a path where a route has the rest.

    A redirect would need the address that the client used, and behind TLS and proxies only the
    client knows it. This is outside of the checks of keys: they see the path that is routed. Pages
    load files relative to their own address, so browsers are sent there, relative too.
    """

    def __init__(self, app: ASGIApp, paths: Collection[str], pages: Collection[str]) -> None:
        """`paths` are those of the application's routes, `pages` those of them that are pages."""
        self._app = app
        self._paths = frozenset(paths)
        self._pages = frozenset(pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            path = app_path(scope).removesuffix("/")
            if path in self._pages:
                await RedirectResponse(f"..{path}")(scope, receive, send)
                return
            if path in self._paths or path.startswith("/v1/models/"):
                scope = {**scope, "path": scope["path"][:-1]}
        await self._app(scope, receive, send)
