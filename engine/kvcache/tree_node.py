"""`TreeNode`: one edge of the radix tree."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.kvcache.page_hash import TOKEN_BYTES

EVICTED = -1


@dataclass(slots=True, eq=False, repr=False)
class TreeNode:
    """A run of whole pages that every path through it shares.

    Callers hold nodes only as handles for locking. A split puts a new node above this one and
    leaves the tail in this object, so that a handle still stands for the same prefix.
    """

    node_id: int
    parent: TreeNode | None
    key: bytes
    """The tokens as int32 bytes. Bytes compare and slice several times faster than small numpy
    arrays, and a page of them is the key in the parent's `children`."""
    indices: NDArray[np.int32]
    """int32 [num_tokens]: their slots, owned by the tree."""
    namespace: str
    children: dict[bytes, TreeNode] = field(default_factory=dict)
    hashes: list[int] = field(default_factory=list)
    """One per page; empty unless the cache has events."""
    lock_ref: int = 0
    """Locks on this node or on nodes below it: at least the locks of each child. `EVICTED` after
    the node has left the tree."""
    last_access: int = 0
    """A tick of the cache's logical clock; so is `created`."""
    created: int = 0
    hits: int = 0
    """Inserts that passed this node: about one for each request that used it."""
    priority: int = 0
    is_flex: bool = False
    """Only flex requests have used the node. So have they those below it, and no others."""
    queued: bool = False
    """The node has an entry in the eviction queue."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the run."""
        return len(self.key) // TOKEN_BYTES

    @property
    def is_root(self) -> bool:
        """Whether the node is the top of a namespace, which holds no tokens."""
        return self.parent is None

    @property
    def is_evictable(self) -> bool:
        """Whether the node is an unlocked leaf."""
        return self.lock_ref == 0 and not self.children and self.parent is not None

    def split(self, head_id: int, at: int, page_bytes: int) -> TreeNode:
        """Put a new node with the first `at` bytes of this one above it, and return that."""
        parent = self.parent
        assert parent is not None
        tokens = at // TOKEN_BYTES
        # Copies: a slice of an array would keep the whole array alive.
        head = TreeNode(
            head_id, parent, self.key[:at], self.indices[:tokens].copy(), self.namespace
        )
        head.lock_ref = self.lock_ref
        head.last_access = self.last_access
        head.created = self.created
        head.hits = self.hits
        head.priority = self.priority
        head.is_flex = self.is_flex
        pages = at // page_bytes
        head.hashes = self.hashes[:pages]
        self.hashes = self.hashes[pages:]
        self.key = self.key[at:]
        self.indices = self.indices[tokens:].copy()
        self.parent = head
        head.children[self.key[:page_bytes]] = self
        parent.children[head.key[:page_bytes]] = head
        return head


def common_bytes(key: bytes, data: bytes, offset: int, page_bytes: int) -> int:
    """Bytes of the whole pages that `key` and `data[offset:]` share; not all of `key`."""
    count = min(len(key), len(data) - offset) // TOKEN_BYTES
    differs = np.frombuffer(key, np.int32, count) != np.frombuffer(data, np.int32, count, offset)
    first = int(differs.argmax())
    common = first if differs[first] else count
    return common * TOKEN_BYTES // page_bytes * page_bytes
