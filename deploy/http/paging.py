"""`PageQuery`: which part of a list a request asks for, as OpenAI's API has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.datastructures import QueryParams

from engine.errors import RequestError

MAX_ITEMS = 100
"""Of a page, unless a list allows more."""
AFTER = {"name": "after", "in": "query", "schema": {"type": "string"}}
ORDER = {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}}


def limit_parameter(most: int = MAX_ITEMS) -> dict[str, Any]:
    """How OpenAPI describes `limit`."""
    schema = {"type": "integer", "minimum": 1, "maximum": most}
    return {"name": "limit", "in": "query", "schema": schema}


PAGE_PARAMETERS: tuple[dict[str, Any], ...] = (limit_parameter(), ORDER, AFTER)


class PageQuery(NamedTuple):
    """`after`: id of the last item of the page before."""

    after: str | None
    limit: int
    newest_first: bool

    @classmethod
    def of(
        cls,
        query: QueryParams,
        *,
        newest_first: bool = True,
        most: int = MAX_ITEMS,
        default: int = 20,
    ) -> PageQuery:
        """`newest_first`: unless the query says how. `most` and `default`: of `limit`. Raises
        `RequestError`."""
        order = query.get("order", "desc" if newest_first else "asc")
        if order not in ("asc", "desc"):
            raise RequestError("order must be asc or desc.", "order")
        limit = query.get("limit", str(default))
        is_number = limit.isascii() and limit.isdigit() and len(limit) < 8
        if not is_number or not 1 <= int(limit) <= most:
            raise RequestError(f"limit must be a number from 1 to {most}.", "limit")
        return cls(query.get("after") or None, int(limit), order == "desc")

    def within(self, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The page of `items`, all that there are, the oldest first. Raises `RequestError`."""
        items = items[::-1] if self.newest_first else items
        if self.after is not None:
            ids = [item["id"] for item in items]
            if self.after not in ids:
                raise RequestError("after must be the id of an item.", "after")
            items = items[ids.index(self.after) + 1 :]
        return self.shown(items)

    def shown(self, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The page as it is sent; `items`: it, or it and more."""
        page = items[: self.limit]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }
