"""What a routing policy knows of a request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.kvcache import hash_pages


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """One attempt to place a request.

    Fields:
        request_id: stays the same when the request is resubmitted elsewhere.
        token_ids: int32 [num_tokens], the whole input: a resubmitted request's contains the
            tokens that were emitted already.
        page_size: tokens a page; every replica's.
        page_hashes: uint64 [num_pages], hash of each whole page, as engine.kvcache.page_hash
            makes them (from the namespace on, so that equal tokens under another cache_salt are
            other pages).
    """

    request_id: str
    token_ids: NDArray[np.int32]
    page_size: int
    page_hashes: NDArray[np.uint64]

    @classmethod
    def from_tokens(
        cls, request_id: str, token_ids: NDArray[np.int32], page_size: int, namespace: str = ""
    ) -> RouteRequest:
        """Hash the pages (about 0.3 µs each), once: they travel with the request from here."""
        hashes = hash_pages(token_ids, page_size, namespace)
        return cls(request_id, token_ids, page_size, hashes)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def reusable_pages(self) -> int:
        """Pages that a cache can spare: the engine always computes the last token."""
        return (len(self.token_ids) - 1) // self.page_size
