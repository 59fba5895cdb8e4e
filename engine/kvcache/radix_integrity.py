"""What must hold for every radix tree; for tests and idle checks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from engine.errors import KVPoolError
from engine.kvcache.page_hash import TOKEN_BYTES, chain_hashes, root_hash
from engine.kvcache.tree_node import TreeNode


def check_tree(tops: Mapping[str, TreeNode], page_size: int, has_hashes: bool) -> None:
    """Check links, keys, page alignment, locks, hashes and that no slot comes twice.

    `tops` are the roots by namespace, pages have `page_size` tokens, and with `has_hashes` nodes
    must carry their pages' hashes. Raises `KVPoolError`, which says what is wrong and where.
    """
    slots: list[NDArray[np.int32]] = []
    for namespace, top in tops.items():
        if not top.children:
            raise KVPoolError("an empty namespace was left behind")
        if has_hashes and top.hashes != [root_hash(namespace)]:
            raise KVPoolError("a namespace's root hash is wrong")
        stack = [top]
        while stack:
            node = stack.pop()
            for first_page, child in node.children.items():
                _check_edge(node, first_page, child, page_size, has_hashes)
                slots.append(child.indices)
            stack.extend(node.children.values())
    if slots:
        everything = np.concatenate(slots)
        if len(np.unique(everything)) != len(everything):
            raise KVPoolError("a slot is in the tree twice")


def _check_edge(
    node: TreeNode, first_page: bytes, child: TreeNode, page_size: int, has_hashes: bool
) -> None:
    name = f"node {child.node_id}"
    if child.parent is not node:
        raise KVPoolError(f"{name} doesn't point back to its parent")
    if child.namespace != node.namespace:
        raise KVPoolError(f"{name} is in another namespace than its parent")
    if not child.key or len(child.key) % (page_size * TOKEN_BYTES):
        raise KVPoolError(f"{name} isn't made of whole pages")
    if child.key[: page_size * TOKEN_BYTES] != first_page:
        raise KVPoolError(f"{name} is filed under another page than its first")
    if child.indices.dtype != np.int32 or len(child.indices) != child.num_tokens:
        raise KVPoolError(f"{name} has {len(child.indices)} slots, {child.num_tokens} tokens")
    pages = child.indices.reshape(-1, page_size)
    if (pages[:, 0] % page_size).any() or (np.diff(pages, axis=1) != 1).any():
        raise KVPoolError(f"{name} has slots that aren't whole pages")
    if node.is_flex and not child.is_flex:
        raise KVPoolError(f"{name} isn't flex, but its parent is")
    if child.lock_ref < 0:
        raise KVPoolError(f"{name} is in the tree with lock_ref {child.lock_ref}")
    if child.children and child.lock_ref < max(c.lock_ref for c in child.children.values()):
        raise KVPoolError(f"{name} has fewer locks than a child")
    expected = chain_hashes(child.key, page_size, node.hashes[-1]) if has_hashes else []
    if child.hashes != expected:
        raise KVPoolError(f"{name} has the wrong page hashes")
