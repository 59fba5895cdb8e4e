"""Which unused prefix is evicted first when KV room runs out."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from typing import TypeAlias

from engine.kvcache.tree_node import TreeNode

EvictionKey: TypeAlias = tuple[int, ...]
_Entry: TypeAlias = tuple[bool, EvictionKey, int, TreeNode]


class EvictionPolicy(ABC):
    """An order in which leaves are evicted."""

    @abstractmethod
    def key(self, node: TreeNode) -> EvictionKey:
        """The lowest key is evicted first. A node's key may rise but must never fall."""


class LRUPolicy(EvictionPolicy):
    """Evicts the leaf that was matched or inserted longest ago."""

    def key(self, node: TreeNode) -> EvictionKey:
        return (node.last_access,)


class LFUPolicy(EvictionPolicy):
    """Evicts the leaf that the fewest requests used, then LRU."""

    def key(self, node: TreeNode) -> EvictionKey:
        return (node.hits, node.last_access)


class FIFOPolicy(EvictionPolicy):
    """Evicts the leaf that was stored first."""

    def key(self, node: TreeNode) -> EvictionKey:
        return (node.created,)


class PriorityPolicy(EvictionPolicy):
    """Evicts the leaf whose requests' largest `priority` is the smallest, then LRU."""

    def key(self, node: TreeNode) -> EvictionKey:
        return (node.priority, node.last_access)


class EvictionQueue:
    """Evictable leaves, the next victim first, without ever walking the tree. Whatever the policy,
    those that only flex requests used go before all others.

    A heap with lazy repair. Every evictable leaf has exactly one entry. An entry may be stale: its
    node was touched since (its key rose), was locked, or got children. The entry is corrected when
    it reaches the top. Because keys never fall, an entry's key is a lower bound of its node's key,
    so the first entry that is exact is the true minimum. Locking and touching cost nothing here,
    and the heap never holds more entries than the tree has nodes.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[_Entry] = []

    def __len__(self) -> int:
        """Number of entries, stale ones included."""
        return len(self._heap)

    def push(self, node: TreeNode) -> None:
        """Tell the queue that this node has become an evictable leaf."""
        if not node.queued:
            node.queued = True
            heapq.heappush(self._heap, self._entry(node))

    def pop(self) -> TreeNode | None:
        """Take the next victim, or None when no leaf is evictable."""
        heap = self._heap
        while heap:
            node = heap[0][-1]
            if not node.is_evictable:
                heapq.heappop(heap)
                node.queued = False
                continue
            entry = self._entry(node)
            if entry != heap[0]:
                heapq.heapreplace(heap, entry)
                continue
            heapq.heappop(heap)
            node.queued = False
            return node
        return None

    def clear(self) -> None:
        for node in self.nodes():
            node.queued = False
        self._heap.clear()

    def nodes(self) -> list[TreeNode]:
        """Nodes with an entry, in no order; for checks."""
        return [entry[-1] for entry in self._heap]

    def _entry(self, node: TreeNode) -> _Entry:
        return (not node.is_flex, self._policy.key(node), node.node_id, node)
