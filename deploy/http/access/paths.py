"""`app_path`: the path of a request as the application's routing sees it."""

from __future__ import annotations

from starlette._utils import get_route_path
from starlette.types import Scope


def app_path(scope: Scope) -> str:
    """Without the prefix that Serve mounts the application at."""
    return get_route_path(scope)
