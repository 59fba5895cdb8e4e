"""`RadixCache`: KV pages of past requests, found again by their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.errors import KVPoolError
from engine.kvcache.allocator import TokenToKVPoolAllocator
from engine.kvcache.eviction import EvictionQueue
from engine.kvcache.kv_events import KVEventLog
from engine.kvcache.page_hash import TOKEN_BYTES, chain_hashes, root_hash
from engine.kvcache.radix_integrity import check_tree
from engine.kvcache.tree_node import EVICTED, TreeNode, common_bytes
from engine.protocol.messages import BlockStored, KVEvent
from engine.registry import EVICTION_POLICIES


class MatchResult(NamedTuple):
    """The longest cached prefix: its slots, int32 [matched], and the node where it ends."""

    indices: NDArray[np.int32]
    last_node: TreeNode


class InsertResult(NamedTuple):
    """How many leading tokens the tree held already, and the node where the path ends."""

    prefix_len: int
    last_node: TreeNode


class RadixCache:
    """A radix tree over token ids whose edges own the KV pages of their tokens.

    (RadixAttention, arXiv:2312.07104; paged as in SGLang's and mini-sglang's trees.)
    Everything is in whole pages: a match is rounded down to one, edges split between pages,
    and a request's partial last page stays with the request. Each namespace has a tree of its
    own, so equal tokens under different cache salts or adapters never meet.

    A node is protected while `lock_ref` > 0, which holds for every ancestor of a locked node.
    Unlocked leaves are evictable, least recently used first; their ancestors follow. Time is a
    counter of operations: no clock is read.
    """

    def __init__(
        self,
        allocator: TokenToKVPoolAllocator,
        page_size: int,
        *,
        disable: bool = False,
        eviction_policy: str = "lru",
        enable_events: bool = False,
    ) -> None:
        """Evicted pages go back to `allocator`, whose pages have `page_size` tokens too.

        With `disable` nothing is held: matches are empty, `insert` leaves all slots with the
        caller. `eviction_policy` is a word of `EVICTION_POLICIES`. With `enable_events` what
        enters and leaves the tree is logged for `drain_events`.
        """
        if page_size != allocator.page_size:
            raise ValueError(f"page_size {page_size} isn't the allocator's {allocator.page_size}")
        self.allocator = allocator
        self.page_size = page_size
        self.disable = disable
        self._page_bytes = page_size * TOKEN_BYTES
        self._queue = EvictionQueue(EVICTION_POLICIES[eviction_policy]())
        self._events = KVEventLog() if enable_events else None
        self._clock = 0
        self._next_node_id = 0
        self._evictable_size = 0
        self._flex_size = 0
        self._protected_size = 0
        self._no_indices = np.empty(0, dtype=np.int32)
        # Empty matches end on this node, in any namespace. Callers lock it like any other node,
        # which has no effect; it never has children.
        self.root = TreeNode(self._new_id(), None, b"", self._no_indices, "")
        self._namespaces: dict[str, TreeNode] = {}

    @property
    def evictable_size(self) -> int:
        """Tokens in unlocked nodes: all of them can be evicted."""
        return self._evictable_size

    @property
    def evictable_flex_size(self) -> int:
        """Tokens in unlocked nodes that only flex requests have used; they are evicted first."""
        return self._flex_size

    @property
    def protected_size(self) -> int:
        """Tokens in locked nodes, which can't be evicted."""
        return self._protected_size

    @property
    def total_size(self) -> int:
        """Tokens in the tree."""
        return self._evictable_size + self._protected_size

    def match_prefix(
        self, token_ids: NDArray[np.int32], namespace: str = "", *, is_flex: bool = False
    ) -> MatchResult:
        """Find the longest cached prefix of `token_ids` (int32 [num_tokens]), in whole pages.

        The prefix counts as used now, with `is_flex` by a flex request. The node in which the match
        ends may be split. The slots are the tree's: lock `last_node` before the next `evict`, and
        keep it locked while the slots are in use.
        """
        top = self._namespaces.get(namespace)
        if top is None:
            return MatchResult(self._no_indices, self.root)
        path, matched = self._descend(top, self._aligned_bytes(token_ids), is_flex)
        if matched == 0:
            return MatchResult(self._no_indices, self.root)
        return MatchResult(np.concatenate([node.indices for node in path]), path[-1])

    def insert(
        self,
        token_ids: NDArray[np.int32],
        indices: NDArray[np.int32],
        namespace: str = "",
        priority: int = 0,
        page_hashes: Sequence[int] = (),
        *,
        is_flex: bool = False,
    ) -> InsertResult:
        """Give the whole pages of a request to the tree: `token_ids` and their slots, `indices`.

        With aligned = len(token_ids) rounded down to pages, the tree now owns
        indices[prefix_len:aligned], which it copies. It doesn't take indices[:prefix_len]: slots
        there that aren't the tree's own are duplicates, which the caller frees. The tail beyond
        aligned stays with the caller. A disabled cache takes nothing, and prefix_len is 0.

        `priority` is for the policy of that name; the highest of a node's requests counts.
        `is_flex` is as in `match_prefix`. `page_hashes` are hashes of the first pages that were
        computed already (see `hash_pages`); events need the hashes of all.
        Raises `ValueError` if there are too few slots.
        """
        if self.disable:
            return InsertResult(0, self.root)
        data = self._aligned_bytes(token_ids)
        aligned = len(data) // TOKEN_BYTES
        if len(indices) < aligned:
            raise ValueError(f"insert: {aligned} tokens but only {len(indices)} slots")
        if aligned == 0:
            return InsertResult(0, self.root)
        top = self._namespaces.get(namespace)
        if top is None:
            top = TreeNode(self._new_id(), None, b"", self._no_indices, namespace)
            if self._events is not None:
                top.hashes = [root_hash(namespace)]
            self._namespaces[namespace] = top
        path, matched = self._descend(top, data, is_flex)
        for node in path:
            if node.is_flex or not is_flex:
                node.hits += 1
                node.priority = max(node.priority, priority)
        last = path[-1] if path else top
        prefix_len = matched // TOKEN_BYTES
        if matched < len(data):
            owned = np.array(indices[prefix_len:aligned], dtype=np.int32)
            known = page_hashes[prefix_len // self.page_size : aligned // self.page_size]
            last = self._add_leaf(last, data[matched:], owned, priority, known, is_flex)
        return InsertResult(prefix_len, last)

    def replace(
        self,
        token_ids: NDArray[np.int32],
        indices: NDArray[np.int32],
        start: int,
        namespace: str = "",
    ) -> bool:
        """Let the cached pages of `token_ids` behind the first `start` tokens be those of
        `indices`, which hold the same tokens, and free the tree's own. False, and nothing is done,
        if some of them are locked, or `start` isn't where a node begins."""
        path, _ = self._descend(self._namespaces[namespace], self._aligned_bytes(token_ids), True)
        at, nodes = 0, []
        for node in path:
            if at >= start:
                nodes.append((node, at))
            elif at + len(node.indices) > start:
                return False
            at += len(node.indices)
        if not nodes or any(node.lock_ref for node, _ in nodes):
            return False
        self.allocator.free(np.concatenate([node.indices for node, _ in nodes]))
        for node, first in nodes:
            node.indices = np.array(indices[first : first + len(node.indices)], dtype=np.int32)
        return True

    def inc_lock_ref(self, node: TreeNode) -> None:
        """Protect the path to this node. Raises `KVPoolError` if the node has been evicted."""
        if node.lock_ref == EVICTED:
            raise KVPoolError(f"inc_lock_ref: node {node.node_id} has been evicted")
        parent = node.parent
        while parent is not None:
            if node.lock_ref == 0:
                size = len(node.indices)
                self._evictable_size -= size
                self._protected_size += size
                if node.is_flex:
                    self._flex_size -= size
            node.lock_ref += 1
            node = parent
            parent = node.parent

    def dec_lock_ref(self, node: TreeNode) -> None:
        """Take back one `inc_lock_ref`. Raises `KVPoolError` if the node isn't locked."""
        parent = node.parent
        # Ancestors hold at least their children's locks, so this check covers the path.
        if parent is not None and node.lock_ref <= 0:
            raise KVPoolError(f"dec_lock_ref: node {node.node_id} isn't locked")
        while parent is not None:
            node.lock_ref -= 1
            if node.lock_ref == 0:
                size = len(node.indices)
                self._evictable_size += size
                self._protected_size -= size
                if node.is_flex:
                    self._flex_size += size
                if not node.queued and not node.children:
                    self._queue.push(node)
            node = parent
            parent = node.parent

    def held_alone(self, node: TreeNode) -> int:
        """Tokens that the end of one lock on this node would make evictable."""
        found = 0
        while node.parent is not None and node.lock_ref == 1:
            found += len(node.indices)
            node = node.parent
        return found

    def evict(self, num_tokens: int) -> int:
        """Free unlocked leaves in the policy's order until `num_tokens` are free.

        Returns the number of tokens freed. Whole nodes are freed, so it may be more than
        `num_tokens`. It is less if everything left is locked.
        """
        victims: list[TreeNode] = []
        freed = 0
        while freed < num_tokens:
            node = self._queue.pop()
            if node is None:
                break
            freed += len(node.indices)
            if node.is_flex:
                self._flex_size -= len(node.indices)
            victims.append(node)
            self._remove_leaf(node)
        if victims:
            self._evictable_size -= freed
            self.allocator.free(np.concatenate([node.indices for node in victims]))
            if self._events is not None:
                self._events.removed([page for node in victims for page in node.hashes])
        return freed

    def reset(self) -> None:
        """Free everything, or nothing and raise `KVPoolError` if something is locked."""
        if self._protected_size:
            raise KVPoolError(f"reset: {self._protected_size} tokens are locked")
        self.allocator.free(self.all_indices())
        for node in self._nodes():
            node.lock_ref = EVICTED
        self._queue.clear()
        self._namespaces.clear()
        self._evictable_size = self._flex_size = 0
        if self._events is not None:
            self._events.cleared()

    def num_nodes(self) -> int:
        """Number of nodes; walks the whole tree."""
        return sum(1 for _ in self._nodes())

    def all_indices(self) -> NDArray[np.int32]:
        """Every slot the tree owns, int32 [total_size], in no order."""
        return np.concatenate([self._no_indices, *(node.indices for node in self._nodes())])

    @property
    def has_events(self) -> bool:
        """Whether the cache was built with events."""
        return self._events is not None

    @property
    def has_pending_events(self) -> bool:
        """Whether `drain_events` would return any."""
        return self._events is not None and self._events.has_pending

    def drain_events(self) -> list[KVEvent]:
        """Events since the last call, in order; none when events are off."""
        return [] if self._events is None else self._events.drain()

    def snapshot(self) -> tuple[int, list[BlockStored]]:
        """The tree as it stands, for a reader that missed events.

        Returns the number of the last event that the snapshot contains, and `BlockStored` events of
        that number, parents first. The reader drops what it knew, applies them, and goes on with
        events of higher numbers. Raises `KVPoolError` if events are off.
        """
        if self._events is None:
            raise KVPoolError("snapshot: the cache was built without enable_events")
        seq = self._events.seq
        stored = [
            BlockStored(seq, list(node.hashes), _parent_hash(node), node.namespace)
            for node in self._nodes()
        ]
        return seq, stored

    def check_integrity(self) -> None:
        """Compare the tree with the counters, the queue and the allocator.

        Raises `KVPoolError`, which says what is wrong.
        """
        check_tree(self._namespaces, self.page_size, self._events is not None)
        nodes = list(self._nodes())
        locked = sum(len(node.indices) for node in nodes if node.lock_ref > 0)
        unlocked = sum(len(node.indices) for node in nodes if node.lock_ref == 0)
        if (locked, unlocked) != (self._protected_size, self._evictable_size):
            raise KVPoolError(
                f"protected and evictable are {locked} and {unlocked} tokens, the counters say "
                f"{self._protected_size} and {self._evictable_size}"
            )
        flex = sum(len(node.indices) for node in nodes if node.lock_ref == 0 and node.is_flex)
        if flex != self._flex_size:
            raise KVPoolError(f"{flex} tokens are of flex requests, not {self._flex_size}")
        queued = {id(node) for node in self._queue.nodes()}
        if len(queued) != len(self._queue):
            raise KVPoolError("a node is in the eviction queue twice")
        if queued != {id(node) for node in nodes if node.queued}:
            raise KVPoolError("the eviction queue and the nodes' queued flags differ")
        if any(node.is_evictable and not node.queued for node in nodes):
            raise KVPoolError("an evictable leaf isn't in the eviction queue")
        pages = self.all_indices() // self.page_size
        if np.isin(pages, self.allocator.free_pages()).any():
            raise KVPoolError("the tree holds a page that the allocator calls free")

    def _aligned_bytes(self, token_ids: NDArray[np.int32]) -> bytes:
        """The whole pages of `token_ids` as int32 bytes."""
        aligned = len(token_ids) // self.page_size * self.page_size
        return token_ids[:aligned].astype(np.int32, copy=False).tobytes()

    def _descend(self, top: TreeNode, data: bytes, is_flex: bool) -> tuple[list[TreeNode], int]:
        """The nodes that match `data` below `top`, and the bytes of it that they match.

        The last node is split if the match ends inside. With `is_flex`, those that others have used
        stay as they are; without it, no node is left to flex requests alone.
        """
        self._clock += 1
        clock = self._clock
        page_bytes = self._page_bytes
        path: list[TreeNode] = []
        offset = 0
        node = top
        while offset < len(data):
            child = node.children.get(data[offset : offset + page_bytes])
            if child is None:
                break
            whole = data.startswith(child.key, offset)
            if not whole:
                at = common_bytes(child.key, data, offset, page_bytes)
                child = child.split(self._new_id(), at, page_bytes)
            if child.is_flex or not is_flex:
                child.last_access = clock
            if child.is_flex and not is_flex:
                child.is_flex = False
                if child.lock_ref == 0:
                    self._flex_size -= len(child.indices)
            path.append(child)
            offset += len(child.key)
            if not whole:
                break
            node = child
        return path, offset

    def _add_leaf(
        self,
        parent: TreeNode,
        key: bytes,
        indices: NDArray[np.int32],
        priority: int,
        known_hashes: Sequence[int],
        is_flex: bool,
    ) -> TreeNode:
        leaf = TreeNode(self._new_id(), parent, key, indices, parent.namespace)
        leaf.last_access = leaf.created = self._clock
        leaf.hits = 1
        leaf.priority = priority
        leaf.is_flex = is_flex
        parent.children[key[: self._page_bytes]] = leaf
        self._evictable_size += len(indices)
        if is_flex:
            self._flex_size += len(indices)
        if self._events is not None:
            hashes = list(known_hashes)
            rest = key[len(hashes) * self._page_bytes :]
            before = hashes[-1] if hashes else parent.hashes[-1]
            leaf.hashes = hashes + chain_hashes(rest, self.page_size, before)
            self._events.stored(list(leaf.hashes), parent.hashes[-1], leaf.namespace)
        self._queue.push(leaf)
        return leaf

    def _remove_leaf(self, node: TreeNode) -> None:
        """Unlink an evicted leaf. Its parent may become evictable."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key[: self._page_bytes]]
        node.lock_ref = EVICTED
        if parent.is_evictable:
            self._queue.push(parent)
        elif parent.is_root and not parent.children:
            # Salts come and go; an empty namespace must not stay behind.
            del self._namespaces[parent.namespace]

    def _new_id(self) -> int:
        self._next_node_id += 1
        return self._next_node_id

    def _nodes(self) -> Iterator[TreeNode]:
        """All nodes but the namespaces' tops, parents before children."""
        stack = [child for top in self._namespaces.values() for child in top.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _parent_hash(node: TreeNode) -> int:
    assert node.parent is not None
    return node.parent.hashes[-1]
