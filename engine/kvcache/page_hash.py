"""Names for pages of tokens that mean the same in every process."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4


def root_hash(namespace: str = "") -> int:
    """The hash that a namespace's chains start from."""
    return xxh3_64_intdigest(namespace.encode())


def chain_hashes(token_bytes: bytes, page_size: int, parent_hash: int) -> list[int]:
    """Hashes of the whole pages in `token_bytes` (int32, little endian), continuing a chain."""
    stride = page_size * TOKEN_BYTES
    hashes: list[int] = []
    previous = parent_hash
    for start in range(0, len(token_bytes) - stride + 1, stride):
        page = token_bytes[start : start + stride]
        previous = xxh3_64_intdigest(previous.to_bytes(8, "little") + page)
        hashes.append(previous)
    return hashes


def hash_pages(
    token_ids: NDArray[np.int32], page_size: int, namespace: str = ""
) -> NDArray[np.uint64]:
    """Hash each whole page of a prompt together with everything before it.

    A page's hash is xxh3_64(hash of the page before, 8 bytes little endian + the page's token ids,
    int32 little endian); the first page follows the hash of the namespace. So equal hashes mean
    equal prefixes, and an index of hashes can be searched from the left. (The chaining is vLLM's
    and nano-vllm's; the hash is not Python's, which differs between processes.)

    Takes token_ids [num_tokens], returns uint64 [num_tokens // page_size]: a last partial page has
    no hash.
    """
    token_bytes = np.asarray(token_ids).astype("<i4", copy=False).tobytes()
    hashes = chain_hashes(token_bytes, page_size, root_hash(namespace))
    return np.array(hashes, dtype=np.uint64)
