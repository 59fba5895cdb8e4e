"""`PageQuery`: which part of a list a request asks for."""

from __future__ import annotations

from typing import Any, NamedTuple

from starlette.datastructures import QueryParams

from engine.errors import RequestError

ORDER = {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}}
AFTER = {"name": "after", "in": "query", "schema": {"type": "string"}}


def limit_parameter(most: int) -> dict[str, Any]:
    """How OpenAPI describes `limit`."""
    schema = {"type": "integer", "minimum": 1, "maximum": most}
    return {"name": "limit", "in": "query", "schema": schema}


class PageQuery(NamedTuple):
    """`after`: id of the last one of the page before; None: from the beginning."""

    limit: int
    after: str | None
    newest_first: bool

    @classmethod
    def read(
        cls, query: QueryParams, *, most: int, default: int = 20, newest_first: bool = True
    ) -> PageQuery:
        """`limit`, `after` and `order` of a query. Raises `RequestError`."""
        order = query.get("order", "desc" if newest_first else "asc")
        if order not in ("asc", "desc"):
            raise RequestError("order must be asc or desc.", "order")
        given = query.get("limit", str(default))
        is_number = given.isascii() and given.isdigit() and len(given) < 8
        if not is_number or not 1 <= int(given) <= most:
            raise RequestError(f"limit must be a number from 1 to {most}.", "limit")
        return cls(int(given), query.get("after") or None, order == "desc")

    @staticmethod
    def shown(page: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
        """The list as the API shows it."""
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": has_more,
        }
