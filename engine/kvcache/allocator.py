"""`TokenToKVPoolAllocator`: the free pages of the KV cache."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.errors import KVPoolError
from engine.kvcache.window_pages import WindowPages

Int32Array: TypeAlias = NDArray[np.int32]
Int64Array: TypeAlias = NDArray[np.int64]


class TokenToKVPoolAllocator:
    """Hands out token slots of a paged KV cache; a page belongs to one owner at a time.

    Slot s lies in page s // page_size. Page 0 is where padded tokens write and is never
    handed out, so slots lie in [page_size, (num_pages + 1) * page_size) and the device
    buffers need (num_pages + 1) * page_size places. The page at the end of a request is
    filled before a new one is taken; what is left of it stays with the request.

    Free pages are a stack (last in, first out) in a numpy array, so that a step's pages come off
    in one slice for any batch size. `num_tokens` is rounded down to pages of `page_size`.
    """

    def __init__(self, num_tokens: int, page_size: int, windows: WindowPages | None = None) -> None:
        """`windows` hears of each page that is handed out or comes back."""
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        if num_tokens < page_size:
            raise ValueError(f"num_tokens ({num_tokens}) holds no page of {page_size} tokens")
        self.page_size = page_size
        self.num_pages = num_tokens // page_size
        self.total_size = self.num_pages * page_size
        self._stack: Int32Array = np.empty(self.num_pages, dtype=np.int32)
        # One place per page, page 0 included: True where the page is on the stack.
        self._is_free: NDArray[np.bool_] = np.empty(self.num_pages + 1, dtype=np.bool_)
        # Scratch of _distinct_pages: for each page, a position in the call's array.
        self._seen_at: Int32Array = np.zeros(self.num_pages + 1, dtype=np.int32)
        self._offsets = np.arange(page_size, dtype=np.int32)
        self._num_free = 0
        self._windows = windows
        self.clear()

    def clear(self) -> None:
        """Make every page free, also those that somebody holds."""
        # Descending, so that a fresh pool hands out ascending pages.
        self._stack[:] = np.arange(self.num_pages, 0, -1, dtype=np.int32)
        self._is_free[:] = True
        self._is_free[0] = False
        self._num_free = self.num_pages
        if self._windows is not None:
            self._windows.clear()

    def available_size(self) -> int:
        """Tokens that fit in the free pages."""
        return self._num_free * self.page_size

    def pages_needed_extend(self, prefix_lens: ArrayLike, seq_lens: ArrayLike) -> int:
        """Number of new pages that `alloc_extend` takes for these lengths [B]."""
        prefix = np.asarray(prefix_lens, dtype=np.int64)
        seq = np.asarray(seq_lens, dtype=np.int64)
        return int((self._num_pages_of(seq) - self._num_pages_of(prefix)).sum())

    def pages_needed_decode(self, seq_lens: ArrayLike) -> int:
        """Number of new pages that `alloc_decode` takes; `seq_lens` [B] count the new token."""
        seq = np.asarray(seq_lens)
        if self.page_size == 1:
            return len(seq)
        return int(np.count_nonzero(seq % self.page_size == 1))

    def alloc_extend(
        self, prefix_lens: ArrayLike, seq_lens: ArrayLike, last_locs: ArrayLike
    ) -> Int32Array | None:
        """Slots for the tokens prefix..seq of each request; the rest of its last page comes first.

        `prefix_lens` [B] tokens have slots already, `seq_lens` [B] tokens will have them.
        `last_locs` [B] is the slot of token prefix - 1; any value where the prefix ends a page.
        Returns int32 [sum(seq - prefix)] in request order. If there are too few free pages it
        returns None and changes nothing. Raises `KVPoolError` if a length shrinks, or if a last
        slot isn't where such a prefix ends.
        """
        prefix = np.asarray(prefix_lens, dtype=np.int64)
        seq = np.asarray(seq_lens, dtype=np.int64)
        last = np.asarray(last_locs, dtype=np.int64)
        extend = seq - prefix
        if extend.size and int(extend.min()) < 0:
            raise KVPoolError("alloc_extend: a seq_len is below its prefix_len")
        num_tokens = int(extend.sum())
        size = self.page_size
        if size == 1:
            return self._pop(num_tokens)

        in_page = prefix % size
        if bool(((in_page != 0) & (last % size != in_page - 1)).any()):
            raise KVPoolError("alloc_extend: a last_loc doesn't fit its prefix_len")
        pages = self._pop(self.pages_needed_extend(prefix, seq))
        if pages is None:
            return None
        fresh = (pages[:, np.newaxis] * np.int32(size) + self._offsets).ravel()
        slots = np.empty(num_tokens, dtype=np.int32)
        done = used = 0
        for count, last_loc, room in zip(
            extend.tolist(), last.tolist(), (-prefix % size).tolist(), strict=True
        ):
            # First the room left in the page of last_loc, then pages; only the last may be partial.
            rest = max(count - room, 0)
            slots[done : done + count - rest] = np.arange(last_loc + 1, last_loc + 1 + count - rest)
            slots[done + count - rest : done + count] = fresh[used : used + rest]
            done += count
            used += -(-rest // size) * size
        return slots

    def alloc_decode(self, seq_lens: ArrayLike, last_locs: ArrayLike) -> Int32Array | None:
        """One slot for each request's next token, int32 [B].

        `seq_lens` [B] count the new token. `last_locs` [B] is the slot of the token before; any
        value where a new page begins. If there are too few free pages it returns None and changes
        nothing. Raises `KVPoolError` if a last slot isn't where such a sequence ends.
        """
        size = self.page_size
        seq = np.asarray(seq_lens)
        if size == 1:
            return self._pop(len(seq))
        slots: Int32Array = np.asarray(last_locs, dtype=np.int32) + np.int32(1)
        in_page = (seq - 1) % size
        opens = np.flatnonzero(in_page == 0)
        pages = self._pop(len(opens))
        if pages is None:
            return None
        slots[opens] = pages * np.int32(size)
        if not np.array_equal(slots % size, in_page):
            self._push(pages)
            raise KVPoolError("alloc_decode: a last_loc doesn't fit its seq_len")
        return slots

    def alloc_pages(self, count: int) -> Int32Array | None:
        """Numbers of `count` pages, whose slots belong to the caller; None if too few are free."""
        return self._pop(count)

    def free(self, slots: NDArray[np.integer]) -> None:
        """Free every page that the slots touch; several slots of one page free it once.

        Raises `KVPoolError`, and frees nothing, if a page is free already, a slot is out of range
        or in the padding page, or, with page_size 1, a slot comes twice.
        """
        if slots.size == 0:
            return
        pages = slots
        if self.page_size > 1:
            pages = slots // self.page_size
            # Slots mostly come page by page: this leaves one of each run.
            begins = np.empty(len(pages), dtype=np.bool_)
            begins[0] = True
            np.not_equal(pages[1:], pages[:-1], out=begins[1:])
            pages = pages[begins]
        if int(pages.min()) < 1 or int(pages.max()) > self.num_pages:
            raise KVPoolError(
                f"free: slots {int(slots.min())}..{int(slots.max())} aren't all within "
                f"{self.page_size}..{self.total_size + self.page_size - 1}"
            )
        # Convert to intp once; numpy would convert at each look-up below.
        distinct = self._distinct_pages(pages.astype(np.intp))
        if self.page_size == 1 and len(distinct) != len(pages):
            raise KVPoolError("free: a slot comes twice in one call")
        already = self._is_free.take(distinct)
        if already.any():
            raise KVPoolError(f"free: pages freed twice: {distinct[already][:8].tolist()}")
        self._push(distinct)

    def free_pages(self) -> Int32Array:
        """Numbers of the free pages, ascending; for checks."""
        return np.sort(self._stack[: self._num_free])

    def check_integrity(self) -> None:
        """Compare the stack with the bitmap. Raises `KVPoolError` if they differ."""
        by_bitmap = np.flatnonzero(self._is_free)
        if not np.array_equal(self.free_pages(), by_bitmap):
            raise KVPoolError(
                f"{self._num_free} pages on the free stack, {len(by_bitmap)} in the bitmap"
            )

    def _num_pages_of(self, lens: Int64Array) -> Int64Array:
        pages: Int64Array = (lens + (self.page_size - 1)) // self.page_size
        return pages

    def _pop(self, count: int) -> Int32Array | None:
        """Take pages off the stack, the top one first; a copy, never a view of the stack."""
        rest = self._num_free - count
        if rest < 0:
            return None
        pages = self._stack[rest : self._num_free][::-1].copy()
        self._is_free[pages] = False
        self._num_free = rest
        if self._windows is not None:
            self._windows.attach(pages)
        return pages

    def _push(self, pages: NDArray[np.integer]) -> None:
        """Put distinct pages on the stack so that they come off in the given order."""
        self._stack[self._num_free : self._num_free + len(pages)] = pages[::-1]
        self._is_free[pages] = True
        self._num_free += len(pages)
        if self._windows is not None:
            self._windows.detach(pages)

    def _distinct_pages(self, pages: NDArray[np.intp]) -> NDArray[np.intp]:
        """The pages without repeats, in O(n): np.unique would sort.

        Each place writes its position into its page's entry. Exactly one of a page's places then
        reads its own position back: the one whose write won.
        """
        positions = np.arange(len(pages), dtype=np.int32)
        self._seen_at[pages] = positions
        won = self._seen_at.take(pages) == positions
        return pages if won.all() else pages[won]
