"""`add_pages`: the pages `/chat` and `/status`, which are files of this folder.

They hold nothing of the server but whether it asks for keys. What they show they ask for with the
key that was typed in.
"""

# No `from __future__ import annotations`: FastAPI reads the annotations of the handlers.
from importlib.resources import files
from typing import Literal

from fastapi import FastAPI, Request, Response
from xxhash import xxh3_64_hexdigest

from deploy.http.body import encode_json

PAGES = ("/chat", "/status")
ASSETS = "/pages/"
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # The files have no version in their names: a browser asks again whether they are the same.
    "cache-control": "no-cache",
}
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


def add_pages(app: FastAPI, *, has_keys: bool) -> None:
    """Add the pages and the files that they load. `has_keys`: they have a field for a key."""

    @app.get("/chat", include_in_schema=False)
    async def chat(request: Request) -> Response:
        return _reply(request, "chat.html")

    @app.get("/status", include_in_schema=False)
    async def status(request: Request) -> Response:
        return _reply(request, "status.html")

    @app.get(ASSETS + "{name}", include_in_schema=False)
    async def page_file(
        name: Literal[
            "access.json",
            "api.js",
            "chat.js",
            "figures.js",
            "head.js",
            "htm-preact.js",
            "icon.svg",
            "page.css",
            "status.js",
            "text_parts.js",
            "timeline.js",
        ],
        request: Request,
    ) -> Response:
        if name == "access.json":
            content = encode_json({"keys": has_keys})
            return Response(content, headers=HEADERS, media_type="application/json")
        return _reply(request, name)


def _reply(request: Request, name: str) -> Response:
    content = files("deploy.http.pages").joinpath("static", name).read_bytes()
    tag = f'"{xxh3_64_hexdigest(content)}"'
    headers = {**HEADERS, "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=_TYPES[name.rpartition(".")[2]])
