"""`add_docs`: the page `/docs`, which shows the OpenAPI document, from files of this machine.

FastAPI's own page loads its script from a public server, which sees who reads it.
"""

# No `from __future__ import annotations`: FastAPI reads the annotations of the handlers.
from importlib.resources import files
from typing import Literal

from fastapi import FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html

PAGE = "/docs"
ASSETS = f"{PAGE}/assets/"
_SCRIPT, _STYLE, _ICON = "swagger-ui-bundle.js", "swagger-ui.css", "favicon.png"
_TYPES = {_SCRIPT: "text/javascript", _STYLE: "text/css", _ICON: "image/png"}


def add_docs(app: FastAPI) -> None:
    """Add the page and its files (Swagger UI, as the package fastapi-offline brings it)."""

    @app.get(PAGE, include_in_schema=False)
    async def docs(request: Request) -> Response:
        root = str(request.scope.get("root_path", ""))
        return get_swagger_ui_html(
            openapi_url=f"{root}{app.openapi_url}",
            title=f"{app.title}: API",
            swagger_js_url=f"{root}{ASSETS}{_SCRIPT}",
            swagger_css_url=f"{root}{ASSETS}{_STYLE}",
            swagger_favicon_url=f"{root}{ASSETS}{_ICON}",
        )

    @app.get(ASSETS + "{name}", include_in_schema=False)
    async def asset(
        name: Literal["swagger-ui-bundle.js", "swagger-ui.css", "favicon.png"],
    ) -> Response:
        content = files("fastapi_offline").joinpath("static", name).read_bytes()
        return Response(content, media_type=_TYPES[name])
