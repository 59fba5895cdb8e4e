"""What a routing policy knows of a request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.kvcache import hash_pages


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """One attempt to place a request."""

    request_id: str
    """It stays the same when the request is sent to another replica."""
    token_ids: NDArray[np.int32]
    """[num_tokens]: the prompt and the tokens that were generated already."""
    page_size: int
    """Tokens per page, the same at every replica."""
    page_hashes: NDArray[np.uint64]
    """[num_pages]: the hash of each whole page, by `engine.kvcache.hash_pages`. It starts from
    adapter and cache_salt: equal tokens under others are other pages."""
    adapter: str = ""
    """Digest of its adapter; "": it has none."""
    is_flex: bool = False
    """It runs in what others leave."""

    @classmethod
    def from_tokens(
        cls,
        request_id: str,
        token_ids: NDArray[np.int32],
        page_size: int,
        namespace: str = "",
        adapter: str = "",
        is_flex: bool = False,
    ) -> RouteRequest:
        """Hash the pages, which takes about 0.3 µs each. This is done once for a request."""
        hashes = hash_pages(token_ids, page_size, namespace)
        return cls(request_id, token_ids, page_size, hashes, adapter, is_flex)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def reusable_pages(self) -> int:
        """Pages that can come from a cache. The engine always computes the last token."""
        return (len(self.token_ids) - 1) // self.page_size
