"""How many requests wait for their first token, by the prefixes of their prompts."""

from __future__ import annotations

from typing import Final

from deploy.routing.route_request import RouteRequest

STEP_TOKENS: Final = 256
"""Only prefixes of a multiple of this length are counted."""


class WaitingPrefixes:
    """Counts requests without a first token by the prefixes of their prompts.

    The chained hash of a prefix's last page stands for the prefix. One page in STEP_TOKENS tokens
    is counted, not each, so that the longest prompts cost some microseconds.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[str, list[int]]] = {}
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        """Requests."""
        return len(self._waiting)

    def add(self, request: RouteRequest, replica: str) -> None:
        """It was sent to this replica. If it is known already, its old entry goes."""
        self.remove(request.request_id)
        step = _step(request)
        prefixes: list[int] = request.page_hashes[step - 1 :: step].tolist()
        self._waiting[request.request_id] = (replica, prefixes)
        counts = self._counts
        for prefix in prefixes:
            counts[prefix] = counts.get(prefix, 0) + 1

    def remove(self, request_id: str) -> None:
        """It waits no longer. Unknown requests are ignored."""
        _, prefixes = self._waiting.pop(request_id, ("", []))
        counts = self._counts
        for prefix in prefixes:
            if counts[prefix] > 1:
                counts[prefix] -= 1
            else:
                del counts[prefix]

    def forget(self, replica: str) -> None:
        """A replica has gone, and with it the requests that it had."""
        for request_id in [key for key, (at, _) in self._waiting.items() if at == replica]:
            self.remove(request_id)

    def count(self, request: RouteRequest, num_pages: int) -> int:
        """Requests that begin with the first num_pages pages of this one, rounded down to a
        multiple of STEP_TOKENS."""
        step = _step(request)
        last = num_pages // step * step - 1
        return self._counts.get(request.page_hashes.item(last), 0) if last >= 0 else 0


def _step(request: RouteRequest) -> int:
    """STEP_TOKENS in pages, at least 1."""
    return max(STEP_TOKENS // request.page_size, 1)
