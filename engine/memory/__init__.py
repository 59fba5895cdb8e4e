"""Scheduler-side KV bookkeeping: which request's tokens lie in which slots. Plain numpy."""

from __future__ import annotations

from engine.memory.allocator import TokenToKVPoolAllocator
from engine.memory.errors import KVPoolError
from engine.memory.eviction import EVICTION_POLICIES, EvictionPolicy
from engine.memory.kv_events import AllCleared, BlockRemoved, BlockStored, KVEvent
from engine.memory.page_hash import hash_pages
from engine.memory.radix_cache import InsertResult, MatchResult, RadixCache
from engine.memory.req_to_token_pool import ReqToTokenPool
from engine.memory.tree_node import TreeNode

__all__ = [
    "EVICTION_POLICIES",
    "AllCleared",
    "BlockRemoved",
    "BlockStored",
    "EvictionPolicy",
    "InsertResult",
    "KVEvent",
    "KVPoolError",
    "MatchResult",
    "RadixCache",
    "ReqToTokenPool",
    "TokenToKVPoolAllocator",
    "TreeNode",
    "hash_pages",
]
