"""Scheduler-side KV bookkeeping: which request's tokens lie in which slots. Plain numpy."""

from __future__ import annotations

from engine.errors import KVPoolError
from engine.kvcache.allocator import TokenToKVPoolAllocator
from engine.kvcache.page_hash import hash_pages
from engine.kvcache.radix_cache import RadixCache
from engine.kvcache.req_to_token_pool import ReqToTokenPool
from engine.kvcache.tree_node import TreeNode

__all__ = [
    "KVPoolError",
    "RadixCache",
    "ReqToTokenPool",
    "TokenToKVPoolAllocator",
    "TreeNode",
    "hash_pages",
]
