"""One edge of the radix tree."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.kvcache.page_hash import TOKEN_BYTES

EVICTED = -1


class TreeNode:
    """A run of whole pages that every path through it shares.

    Callers hold nodes only as handles for locking. A split puts a new node above this one
    and leaves this object the tail, so that a handle keeps standing for the same prefix.

    Fields:
        key: the tokens as int32 bytes. Bytes compare and slice several times faster than
            small numpy arrays, and a page of them is the children's dict key.
        indices: int32 [num_tokens] slots, owned by the tree.
        hashes: one per page, empty unless the cache has events.
        lock_ref: locks on this node or below; at least that of each child. EVICTED after
            the node has left the tree.
        last_access, created: ticks of the cache's logical clock.
        hits: inserts that passed, i.e. about once for each request that used it.
        queued: the node has an entry in the eviction queue.
    """

    __slots__ = (
        "children",
        "created",
        "hashes",
        "hits",
        "indices",
        "key",
        "last_access",
        "lock_ref",
        "namespace",
        "node_id",
        "parent",
        "priority",
        "queued",
    )

    def __init__(
        self,
        node_id: int,
        parent: TreeNode | None,
        key: bytes,
        indices: NDArray[np.int32],
        namespace: str,
    ) -> None:
        self.node_id = node_id
        self.parent = parent
        self.key = key
        self.indices = indices
        self.namespace = namespace
        self.children: dict[bytes, TreeNode] = {}
        self.hashes: list[int] = []
        self.lock_ref = 0
        self.last_access = 0
        self.created = 0
        self.hits = 0
        self.priority = 0
        self.queued = False

    @property
    def num_tokens(self) -> int:
        return len(self.key) // TOKEN_BYTES

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def is_evictable(self) -> bool:
        """A leaf that nobody has locked."""
        return self.lock_ref == 0 and not self.children and self.parent is not None
