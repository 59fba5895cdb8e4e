"""`KVManager`: rows, pages and the prefix tree, moved together.

The only place that allocates, evicts and frees KV. All sizes in tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from engine.kvcache import KVPoolError, RadixCache, ReqToTokenPool, TokenToKVPoolAllocator
from engine.kvcache.radix_cache import InsertResult, MatchResult
from engine.kvcache.window_pages import WindowPages
from engine.protocol.step import IntArray, positions
from engine.scheduler.req import Req
from engine.scheduler.running_batch import BoolArray, RunningBatch
from engine.scheduler.scheduler_config import SchedulerConfig

PROTECTED_SHARE = 2
"""Flex requests evict nothing of what interactive ones left in the prefix cache, unless that is
more than the total size by this, or one had to wait long (`KVManager.borrower`). Without a bound
they would have no room: in time what interactive requests leave fills any cache."""


class KVManager:
    """KV bookkeeping of one engine.

    Invariant: total = free + evictable + locked + held by requests (see `check`).
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.page_size = config.engine.page_size
        self.enable_prefix_cache = config.engine.enable_prefix_cache
        self._spare = config.engine.draft_tokens + 1
        self.speculates = config.engine.speculative_config is not None
        # Drafts get whole pages: the last one may reach beyond the longest request.
        width = config.max_model_len + config.engine.page_size
        self.rows = ReqToTokenPool(config.max_rows, width)
        self._windows = config.windows
        self.window_pages: WindowPages | None = None
        """None: all layers have the same pages."""
        if self._windows is not None:
            size = config.engine.page_size
            num_pages = config.num_kv_tokens // size
            num_window_pages = self._windows.tokens(config.num_kv_tokens) // size
            self.window_pages = WindowPages(num_pages, num_window_pages, size, self._windows.reach)
        self.allocator = TokenToKVPoolAllocator(
            config.num_kv_tokens, config.engine.page_size, self.window_pages
        )
        self.borrower: Req | None = None
        """A flex request that had to wait long: nothing is protected from it while it runs."""
        self.tree = RadixCache(
            self.allocator,
            config.engine.page_size,
            disable=not config.engine.enable_prefix_cache,
            eviction_policy=config.engine.eviction_policy,
            enable_events=config.engine.enable_kv_events,
        )

    @property
    def total_size(self) -> int:
        """KV slots in all, free or not."""
        return self.allocator.total_size

    @property
    def room(self) -> int:
        """Tokens that could be allocated now: free or evictable."""
        return self.allocator.available_size() + self.tree.evictable_size

    @property
    def spare_room(self) -> int:
        """Tokens that could be allocated now for flex requests. What the prompt of `borrower` still
        needs is in it."""
        left = self.tree.evictable_size - self.tree.evictable_flex_size
        protected = min(left, self.total_size // PROTECTED_SHARE)
        if self.borrower is not None:
            lent = max(len(self.borrower.fill_ids) - self.borrower.kv_len, 0)
            protected = max(protected - lent, 0)
        return self.room - protected

    @property
    def room_now(self) -> int:
        """The same, and no more than layers with windows have room for at this time."""
        if self.window_pages is None:
            return self.room
        return min(self.room, self.window_pages.available * self.page_size)

    def round_up(self, tokens: int) -> int:
        """Tokens rounded up to whole pages."""
        return -(-tokens // self.page_size) * self.page_size

    def held(self, req: Req) -> int:
        """Tokens of whole pages that `req` owns outside the tree."""
        return self.round_up(req.slots_len - req.cached_len)

    def frees(self, req: Req) -> int:
        """Tokens of room that the end of `req` gives back."""
        if req.req_pool_idx == 0 or req.last_node is None:
            return 0
        return self.held(req) + self.tree.held_alone(req.last_node)

    def match(self, req: Req) -> None:
        """Find the cached prefix of `req.fill_ids`; at least one token is left to compute."""
        limit = 0 if req.needs_whole_prompt else len(req.fill_ids) - 1
        found = self._find(req, req.fill_ids[:limit])
        if self.window_pages is not None:
            usable = self.window_pages.usable(self._pages(found.indices)) * self.page_size
            if usable < len(found.indices):
                found = self._find(req, req.fill_ids[:usable])
        req.last_node = found.last_node
        req.prefix_indices = found.indices
        req.cached_len = len(found.indices)

    def _find(self, req: Req, tokens: IntArray) -> MatchResult:
        return self.tree.match_prefix(tokens, req.sequence.namespace, is_flex=req.is_flex)

    def admit(self, req: Req) -> None:
        """Give a matched and locked request a row that holds its cached prefix."""
        idx = self.rows.alloc()
        if idx is None or req.last_node is None:
            raise KVPoolError("admit needs a free row and a matched request")
        req.req_pool_idx = idx
        req.kv_len = req.cached_len
        req.installed = False
        self.rows.req_to_token[idx, : req.cached_len] = req.prefix_indices
        if self.window_pages is not None:
            pages = self._pages(req.prefix_indices)
            self.window_pages.begin(idx, pages)

    @property
    def window_room(self) -> int:
        """Tokens that layers with windows can hold of requests to come, besides a step's own."""
        if self.window_pages is None or self._windows is None:
            return 0
        return self.window_pages.available * self.page_size - self._windows.per_step

    def held_in_windows(self, length: int) -> int:
        """Tokens that a request of `length` tokens holds there, at most."""
        return 0 if self._windows is None else min(length, self._windows.per_request)

    def expected_in_windows(self, length: int, expected: int) -> int:
        """Tokens that it will hold there besides, if `expected` tokens more are computed. Only the
        window is held, so it may be longer than their room."""
        longest = self.round_up(length + expected + self._spare)
        return max(0, self.held_in_windows(longest) - self.held_in_windows(length))

    def seen_in_windows(self, req: Req) -> int:
        """Tokens, at most, that a matched request takes there of cached prefixes' room."""
        if self._windows is None:
            return 0
        return min(req.cached_len, self._windows.reach + self.page_size)

    def pass_windows(self, rows: ArrayLike, lengths: ArrayLike) -> None:
        """The steps launched so far compute `lengths` tokens [n] of the requests in `rows` [n], or
        more: what is behind the windows of these can be used for other tokens from now on."""
        if self.window_pages is not None:
            table = self.rows.req_to_token
            self.window_pages.advance(table, np.asarray(rows), np.asarray(lengths))

    def take_window_changes(self) -> IntArray | None:
        """`ModelWorkerBatch.window_pages` of the next step."""
        return None if self.window_pages is None else self.window_pages.take_changes()

    def _pages(self, slots: IntArray) -> IntArray:
        """The pages of whole pages' slots."""
        return slots[:: self.page_size] // self.page_size

    def extend(self, reqs: Sequence[Req], lens: Sequence[int]) -> IntArray:
        """Slots for the next `lens[i]` tokens of each request. Raises if there is no room."""
        table = self.rows.req_to_token
        starts = [r.kv_len for r in reqs]
        ends = [r.kv_len + n for r, n in zip(reqs, lens, strict=True)]
        last = [int(table[r.req_pool_idx, r.kv_len - 1]) if r.kv_len else -1 for r in reqs]
        self._make_room(self.allocator.pages_needed_extend(starts, ends))
        locs = self.allocator.alloc_extend(starts, ends, last)
        if locs is None:
            raise KVPoolError("extend without room: the scheduler must check first")
        at = 0
        for req, n, end in zip(reqs, lens, ends, strict=True):
            table[req.req_pool_idx, req.kv_len : end] = locs[at : at + n]
            req.kv_len = end
            at += n
            req.last_loc = int(locs[at - 1])
        return locs

    def decode_need(self, running: RunningBatch) -> int:
        """Tokens of new pages for the next decode step of `running`."""
        if running.speculates:
            return self.reserve_need(running.alloc, running.targets)
        return self.allocator.pages_needed_decode(running.seq_lens + 1) * self.page_size

    def decode_need_of(self, running: RunningBatch, lines: BoolArray) -> int:
        """The same of some of its lines [B]."""
        if running.speculates:
            return self.reserve_need(running.alloc[lines], running.targets[lines])
        return self.allocator.pages_needed_decode(running.seq_lens[lines] + 1) * self.page_size

    def decode(self, rows: IntArray, seq_lens: IntArray, last_locs: IntArray) -> IntArray:
        """One slot per row [B]; `seq_lens` count the new token. Raises if there is no room."""
        self._make_room(self.allocator.pages_needed_decode(seq_lens))
        locs = self.allocator.alloc_decode(seq_lens, last_locs)
        if locs is None:
            raise KVPoolError("decode without room: the scheduler must check first")
        self.rows.req_to_token[rows, seq_lens - 1] = locs
        return locs

    def reserve_need(self, alloc: IntArray, targets: IntArray) -> int:
        """Tokens of the new pages that `reserve` takes."""
        size = self.page_size
        return int(np.maximum(-(-targets // size) - -(-alloc // size), 0).sum()) * size

    def reserve(self, rows: IntArray, alloc: IntArray, targets: IntArray) -> IntArray:
        """Give rows [B] that have slots for `alloc` [B] positions those for `targets`, in whole
        pages. Returns the positions that have slots now. Raises if there is no room."""
        size = self.page_size
        grows = targets > alloc
        if not grows.any():
            return alloc
        rows, have, want = rows[grows], alloc[grows], targets[grows]
        first_page, last_page = -(-have // size), -(-want // size)
        num_pages = last_page - first_page
        total = int(num_pages.sum())
        self._make_room(total)
        pages = self.allocator.alloc_pages(total)
        if pages is None:
            raise KVPoolError("drafts without room: the scheduler must check first")
        table = self.rows.req_to_token
        # First what is left of the row's last page, then the pages.
        rest = first_page * size - have
        if rest.any():
            last = table[rows, have - 1]
            at = positions(have, rest)
            table[np.repeat(rows, rest), at] = np.repeat(last - have + 1, rest) + at
        slots = (pages[:, np.newaxis] * np.int32(size) + np.arange(size, dtype=np.int32)).ravel()
        counts = num_pages * size
        table[np.repeat(rows, counts), positions(first_page * size, counts)] = slots
        reached = alloc.copy()
        reached[grows] = last_page * size
        return reached

    def slot_at(self, rows: IntArray, at: IntArray) -> IntArray:
        """Slot int32 [B] of position at[i] of each row i."""
        found: IntArray = self.rows.req_to_token[rows, at]
        return found

    def slots(self, rows: IntArray, starts: IntArray, counts: IntArray) -> IntArray:
        """Slots int32 [sum(counts)] of the positions from starts [B] on, row after row."""
        found: IntArray = self.rows.req_to_token[np.repeat(rows, counts), positions(starts, counts)]
        return found

    def cache_unfinished(self, req: Req) -> None:
        """Share what `req` has launched so far, so that requests behind it can use it.

        This is safe before the step has run: workers execute steps in order. If another request put
        the same tokens there first, nothing is inserted: this one keeps its copy until it ends.
        """
        if not self.enable_prefix_cache or req.last_node is None:
            return
        whole = req.kv_len // self.page_size * self.page_size
        if whole <= req.cached_len:
            return
        tokens = req.fill_ids[:whole]
        slots = self.rows.req_to_token[req.req_pool_idx, :whole]
        found = self._find(req, tokens).indices
        if len(found) > req.cached_len:
            if self.window_pages is None or self.window_pages.usable(self._pages(found)) > (
                req.cached_len // self.page_size
            ):
                return
            # What the tree has can't be used any more.
            if not self.tree.replace(tokens, slots, req.cached_len, req.sequence.namespace):
                return
        node = self._insert(req, tokens, slots).last_node
        self.tree.inc_lock_ref(node)
        self.tree.dec_lock_ref(req.last_node)
        req.last_node = node
        req.cached_len = whole

    def _insert(self, req: Req, tokens: IntArray, slots: IntArray) -> InsertResult:
        sequence = req.sequence
        return self.tree.insert(
            tokens,
            slots,
            sequence.namespace,
            -sequence.priority,
            req.page_hashes,
            is_flex=req.is_flex,
        )

    def release(self, req: Req, *, insert: bool) -> None:
        """Take row and KV back from a request that no step in flight holds.

        With `insert`, whole pages of committed tokens stay in the tree and can be evicted.
        """
        if req.last_node is None or not req.req_pool_idx:
            return
        if req is self.borrower:
            self.borrower = None
        row = self.rows.req_to_token[req.req_pool_idx]
        if self.window_pages is not None:
            self.window_pages.end(req.req_pool_idx, row[: req.slots_len])
        keep = req.cached_len
        if insert and self.enable_prefix_cache:
            tokens = np.concatenate([req.origin_input_ids, np.asarray(req.output_ids, np.int32)])
            known = min(req.kv_len, len(tokens)) // self.page_size * self.page_size
            if known > req.cached_len:
                done = self._insert(req, tokens[:known], row[:known]).prefix_len
                if done > req.cached_len:
                    if self.window_pages is not None:
                        held = self._find(req, tokens[:done])
                        pages = self._pages(held.indices[req.cached_len :])
                        self.window_pages.heal(pages, self._pages(row[req.cached_len : done]))
                    self.allocator.free(row[req.cached_len : done].copy())
                keep = known
        if req.slots_len > keep:
            self.allocator.free(row[keep : req.slots_len].copy())
        self.tree.dec_lock_ref(req.last_node)
        self.rows.free(req.req_pool_idx)
        req.req_pool_idx = 0
        req.last_node = None
        req.cached_len = req.kv_len = req.alloc_len = 0

    def check(self, active: Iterable[Req]) -> str | None:
        """What breaks the invariant, or None. `active`: every request that has a row."""
        reqs = [r for r in active if r.req_pool_idx]
        held = sum(self.held(r) for r in reqs)
        free = self.allocator.available_size()
        evictable, locked = self.tree.evictable_size, self.tree.protected_size
        if free + evictable + locked + held != self.total_size:
            return (
                f"KV leak: free {free} + evictable {evictable} + locked {locked} + held {held} "
                f"!= total {self.total_size}"
            )
        if self.window_pages is not None:
            try:
                self.window_pages.check_integrity(len(reqs))
            except KVPoolError as error:
                return f"window leak: {error}"
        rows = self.rows.available_size()
        if rows + len(reqs) != self.rows.size:
            return f"row leak: free {rows} + in use {len(reqs)} != total {self.rows.size}"
        if not reqs and locked:
            return f"lock leak: {locked} tokens locked and no request"
        return None

    def reset(self) -> None:
        """Forget everything; only when no request holds anything."""
        self.tree.reset()
        self.allocator.clear()
        self.borrower = None

    def _make_room(self, pages: int) -> None:
        missing = pages * self.page_size - self.allocator.available_size()
        if missing > 0:
            self.tree.evict(missing)
