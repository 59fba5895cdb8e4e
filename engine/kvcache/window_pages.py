"""`WindowPages`: memory of layers that see a window, given back behind it."""

from __future__ import annotations

import numpy as np

from engine.errors import KVPoolError
from engine.protocol.step import IntArray, positions


class WindowPages:
    """Which page of the layers with windows belongs to each page of the KV cache.

    All layers know a token by the slot that `TokenToKVPoolAllocator` gave it. Those that keep all
    tokens have a place for each slot. Those with windows have fewer, in *window pages*. A page gets
    one when it is handed out. While a request's next token may see the page, the request holds it.
    The window page of a page that no request holds stays, for requests to come, until another page
    needs it: the one that was left first goes first. The page is *dead* then: its tokens can't end
    a cached prefix any more, but those far enough behind them can.

    Whoever takes pages looks first whether there are as many (`available`). Window page 0 is the
    padding page's. Numbers of pages count the padding page.
    """

    def __init__(self, num_pages: int, num_window_pages: int, page_size: int, reach: int) -> None:
        """`num_window_pages` without the padding page; `reach`: tokens that a query sees at most,
        its own included."""
        self.page_size = page_size
        self.reach = reach
        self.num_window_pages = num_window_pages
        self.window_page: IntArray = np.zeros(num_pages + 1, np.int32)
        """int32 [num_pages + 1]: of each page; 0: it has none."""
        self._holders: IntArray = np.zeros(num_pages + 1, np.int32)
        """Requests whose window holds each page."""
        self._first: dict[int, int] = {}
        """By row of `ReqToTokenPool`: the first page of the request that it holds, counted from
        its first token."""
        self._free = list(range(num_window_pages, 0, -1))
        self._left: dict[int, None] = {}
        """Pages that have a window page and no holder, the one left first in front."""
        self._changed: list[IntArray] = []

    @property
    def available(self) -> int:
        """Window pages that could be taken now."""
        return len(self._free) + len(self._left)

    def clear(self) -> None:
        """Take everything back."""
        self.window_page[:] = 0
        self._holders[:] = 0
        self._first.clear()
        self._left.clear()
        self._changed.clear()
        self._free = list(range(self.num_window_pages, 0, -1))

    def attach(self, pages: IntArray) -> None:
        """Give each of these pages [n], just handed out to a request, a window page, which the
        request holds. Raises `KVPoolError` if requests hold too many."""
        count = len(pages)
        if count == 0:
            return
        if self.available < count:
            raise KVPoolError(f"{count} window pages are needed and {self.available} are left")
        while len(self._free) < count:
            page = next(iter(self._left))
            del self._left[page]
            self._free.append(int(self.window_page[page]))
            self.window_page[page] = 0
        self.window_page[pages] = self._free[-count:][::-1]
        del self._free[-count:]
        self._holders[pages] = 1
        self._changed.append(pages)

    def detach(self, pages: np.ndarray) -> None:
        """These distinct pages [n] belong to nobody any more."""
        for page in pages[self.window_page[pages] != 0].tolist():
            self._left.pop(page, None)
            self._free.append(int(self.window_page[page]))
        self.window_page[pages] = 0
        self._holders[pages] = 0

    def usable(self, pages: np.ndarray) -> int:
        """How many of a cached prefix's pages [n] form a prefix behind which a token can be
        computed: no page that it would see is dead."""
        dead = self.window_page[pages] == 0
        if not dead.any():
            return len(pages)
        numbers = np.arange(len(pages))
        last_dead = np.maximum.accumulate(np.where(dead, numbers, -1))
        good = np.flatnonzero(last_dead < self._first_seen((numbers + 1) * self.page_size))
        return int(good[-1]) + 1 if len(good) else 0

    def begin(self, row: int, pages: np.ndarray) -> None:
        """A request takes `row` behind a cached prefix of `pages` [n], which is `usable`."""
        first = int(self._first_seen(np.array(len(pages) * self.page_size)))
        self._first[row] = first
        seen = pages[first:]
        if (self.window_page[seen] == 0).any():
            raise KVPoolError(f"row {row} begins behind a prefix whose window isn't there")
        self._holders[seen] += 1
        for page in seen.tolist():
            self._left.pop(page, None)

    def advance(self, table: IntArray, rows: np.ndarray, lengths: np.ndarray) -> None:
        """The steps launched so far compute `lengths` tokens [n] of the requests in `rows` [n]:
        these leave what their next token doesn't see. `table` is `ReqToTokenPool.req_to_token`."""
        first = self._first_seen(lengths)
        before = np.fromiter((self._first[row] for row in rows.tolist()), np.int64, len(rows))
        moved = np.flatnonzero(first > before)
        if len(moved) == 0:
            return
        rows, before, first = rows[moved], before[moved], first[moved]
        self._first.update(zip(rows.tolist(), first.tolist(), strict=True))
        counts = first - before
        places = positions(before, counts) * self.page_size
        self._leave(table[np.repeat(rows, counts), places] // self.page_size)

    def end(self, row: int, slots: IntArray) -> None:
        """A request gives `row` back, whose positions have `slots` [n]."""
        first = self._first.pop(row)
        self._leave(slots[first * self.page_size :: self.page_size] // self.page_size)

    def heal(self, pages: np.ndarray, copies: np.ndarray) -> None:
        """Let dead ones of `pages` [n] have the window pages of `copies` [n], which hold the same
        tokens and no request holds."""
        fits = (self.window_page[pages] == 0) & (self.window_page[copies] != 0)
        pages, copies = pages[fits], copies[fits]
        self.window_page[pages] = self.window_page[copies]
        self.window_page[copies] = 0
        for page, copy in zip(pages.tolist(), copies.tolist(), strict=True):
            self._left.pop(copy)
            self._left[page] = None
        if len(pages):
            self._changed.append(pages.astype(np.int32))

    def take_changes(self) -> IntArray | None:
        """int32 [2, n]: pages whose window page is another one than at the last call, and what it
        is now; None: there are none."""
        if not self._changed:
            return None
        pages = np.concatenate(self._changed)
        self._changed.clear()
        return np.stack([pages, self.window_page[pages]])

    def check_integrity(self, num_rows: int) -> None:
        """Raises `KVPoolError` if a window page is lost, given twice, or kept for nobody, or if not
        `num_rows` requests have rows."""
        if len(self._first) != num_rows:
            raise KVPoolError(f"{len(self._first)} requests have windows, {num_rows} have rows")
        is_live = self.window_page != 0
        in_use, left = np.count_nonzero(is_live), np.count_nonzero(is_live & (self._holders == 0))
        if in_use + len(self._free) != self.num_window_pages:
            raise KVPoolError(f"{in_use} window pages are in use, {len(self._free)} are free")
        if left != len(self._left):
            raise KVPoolError(f"{left} pages have no holder, {len(self._left)} are listed")
        if (self._holders < 0).any() or (self._holders[~is_live] > 0).any():
            raise KVPoolError("a request holds a dead page")

    def check_pages(self) -> None:
        """The same, page by page, which takes long."""
        given = self.window_page[self.window_page != 0].tolist()
        if sorted(given + self._free) != list(range(1, self.num_window_pages + 1)):
            raise KVPoolError("a window page was given twice")
        left = np.flatnonzero((self.window_page != 0) & (self._holders == 0)).tolist()
        if sorted(self._left) != left:
            raise KVPoolError("other pages than those without a holder are listed")

    def _first_seen(self, length: np.ndarray) -> np.ndarray:
        """The first page that a token behind `length` others sees."""
        return np.asarray(np.maximum(length + 1 - self.reach, 0) // self.page_size)

    def _leave(self, pages: np.ndarray) -> None:
        np.subtract.at(self._holders, pages, 1)
        for page in pages[self._holders[pages] == 0].tolist():
            self._left[page] = None
