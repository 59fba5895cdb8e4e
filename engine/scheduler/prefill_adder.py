"""`PrefillAdder`: which waiting requests, and how much of each, go into one prefill step.

Budgets, in tokens (SGLang's PrefillAdder):
  rem_total   KV room minus what running requests are expected to still need
  rem_now     KV room for what this step itself allocates
In layers with windows the first two are `rem_window_total` and `rem_window_now`; there a request
holds its window, however long it is.
  rem_chunk   prompt tokens that the step may compute (chunked_prefill_size or max_prefill_tokens)

With a `ChunkSizer`, rem_chunk is in tokens without a prefix. A token behind a long prefix takes
more time, and it takes more of rem_chunk by the same factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from engine.scheduler.chunk_sizer import ChunkSizer
from engine.scheduler.kv_manager import KVManager
from engine.scheduler.new_token_ratio import NewTokenRatio
from engine.scheduler.req import Req
from engine.scheduler.scheduler_config import SchedulerConfig

SHARE_WINDOW = 32
"""A request waits for another's prefill if this many of their next uncached tokens are equal."""


class AddResult(Enum):
    """What the adder did with a request that was offered to it."""

    ADDED = "added"
    DEFERRED = "deferred"
    """Another request is computing its uncached prefix; it may go in later steps."""
    NO_TOKEN = "no_token"
    """No KV room: nothing more fits until requests leave."""
    OTHER = "other"
    """The step is full; the next step may take the request."""


class Addition(NamedTuple):
    """A row of the step: the next `num_tokens` tokens of `req`; `last` if they end its prompt."""

    req: Req
    num_tokens: int
    last: bool


class PrefillAdder:
    """Collects the rows of one prefill step; locks the cached prefix of each."""

    def __init__(
        self,
        kv: KVManager,
        ratio: NewTokenRatio,
        running: Iterable[Req],
        config: SchedulerConfig,
        *,
        num_decode: int,
        decode_need: int,
        sizer: ChunkSizer | None = None,
    ) -> None:
        """`num_decode` tokens of decodes are in the step too (mixed); they need `decode_need`
        tokens of KV room."""
        self.kv = kv
        self.ratio = ratio
        self.sizer = sizer
        self.chunking = config.chunk_size is not None
        budget = config.chunk_size or config.engine.max_prefill_tokens
        self.rem_chunk = max(budget - num_decode, kv.page_size)
        running = list(running)
        reserved = sum(ratio.reserve(r) for r in running)
        self.rem_total = kv.room - decode_need - reserved
        self.rem_now = kv.room - decode_need
        self.rem_window_total = window_room(kv, ratio, running) - decode_need
        self.rem_window_now = kv.room_now - decode_need
        self.additions: list[Addition] = []
        self._owners: set[tuple[int, str, bytes]] = set()
        self._least = kv.page_size
        """Tokens that the first row gets in any case: decodes must not starve prompts."""
        self._lendable = self._lendable_now = 0
        """Tokens that `rem_total` and `rem_now` lack only because the prefix cache protects them
        from flex requests."""
        self.missing = 0
        """Tokens that the last request lacked which didn't fit, if it did; also `in_windows`."""
        self.missing_in_windows = 0

    def open_to_flex(
        self,
        ratio: NewTokenRatio,
        running: Iterable[Req],
        *,
        num_decode: int,
        decode_need: int,
        kept: int,
        most: float,
    ) -> None:
        """From now on flex requests are offered, and may take what the others leave.

        `running` flex requests come first, of which `num_decode` tokens are in the step; so are
        decodes that need `decode_need` tokens of KV room and weren't counted yet. `kept` tokens of
        room must stay, and what the prefix cache protects. `most` tokens may be computed.
        """
        running = list(running)
        self.ratio = ratio
        protected = self.kv.room - self.kv.spare_room if kept else 0
        self._lendable, self._lendable_now = max(protected - kept, 0), protected
        self.rem_total -= sum(map(ratio.reserve, running)) + decode_need + max(kept, protected)
        self.rem_now -= decode_need + protected
        expected = window_room(self.kv, ratio, ()) - window_room(self.kv, ratio, running)
        self.rem_window_total -= expected + decode_need
        self.rem_window_now -= decode_need
        self.rem_chunk -= num_decode
        if most < math.inf:
            self.rem_chunk = min(self.rem_chunk, int(most))
            self._least = 0

    def reserve(self, req: Req) -> None:
        """Keep the room that the rest of a partly launched request needs. Call it before requests
        are offered, and `add_chunked` before or behind that."""
        self._own(req, req.kv_len)
        ahead = len(req.fill_ids) - req.kv_len + self.ratio.reserve(req)
        self.rem_window_total -= self.kv.expected_in_windows(req.kv_len, ahead)
        self.rem_total -= self.ratio.reserve(req) + self._pages(req.kv_len, len(req.fill_ids))

    def add_chunked(self, req: Req) -> AddResult:
        """Continue a request whose prompt is partly launched, and whose room is reserved."""
        left = len(req.fill_ids) - req.kv_len
        num = min(left, self._allowed(req.kv_len))
        if num < left:
            num = self._page_floor(req.kv_len, num)
        if num <= 0:
            return AddResult.OTHER
        pages = self._pages(req.kv_len, req.kv_len + num)
        rem_now = self.rem_now + (self._lendable_now if self.kv.borrower is not None else 0)
        if pages > min(rem_now, self.rem_window_now):
            self.missing = pages - rem_now
            self.missing_in_windows = pages - self.rem_window_now
            return AddResult.NO_TOKEN
        self.rem_total += pages
        self._take(req, num, last=num == left)
        return AddResult.ADDED

    def add(
        self, req: Req, *, force: bool = False, whole: bool = False, borrows: bool = False
    ) -> AddResult:
        """Offer a matched waiting request. `force`: nothing else runs, so it must go. `whole`: not
        a part of its prompt, because another request's is partly launched. `borrows`: a flex
        request may have what the prefix cache protects."""
        if self._is_shared(req):
            return AddResult.DEFERRED
        if req.last_node is None:
            raise ValueError("offer only matched requests")
        extend = len(req.fill_ids) - req.cached_len
        output = self.ratio.reserve(req)
        # Locking takes the cached prefix out of the evictable room, so charge for it first.
        before = self.kv.room
        self.kv.tree.inc_lock_ref(req.last_node)
        locked = before - self.kv.room
        need = self._pages(req.cached_len, len(req.fill_ids))
        rem_total = self.rem_total + (self._lendable if borrows else 0) - locked
        rem_now = self.rem_now + (self._lendable_now if borrows else 0) - locked
        fits = need + output <= rem_total and need <= rem_now
        in_windows = self.kv.expected_in_windows(0, len(req.fill_ids) + output)
        fits = fits and in_windows <= max(self.rem_window_total, 0)
        if not fits and not force:
            self.kv.tree.dec_lock_ref(req.last_node)
            self.missing = max(need + output - rem_total, need - rem_now)
            self.missing_in_windows = in_windows - max(self.rem_window_total, 0)
            return AddResult.NO_TOKEN
        num = extend
        allowed = self._allowed(req.cached_len)
        if extend > allowed and (self.chunking or self.additions or not self._least):
            in_parts = self.chunking and not whole
            num = self._page_floor(req.cached_len, allowed) if in_parts else 0
            if num <= 0:
                self.kv.tree.dec_lock_ref(req.last_node)
                return AddResult.OTHER
        seen = self.kv.seen_in_windows(req)
        in_windows_now = self._pages(req.cached_len, req.cached_len + num) + seen
        if in_windows_now > self.rem_window_now and not force:
            self.kv.tree.dec_lock_ref(req.last_node)
            self.missing, self.missing_in_windows = 0, in_windows_now - self.rem_window_now
            return AddResult.NO_TOKEN
        self.rem_window_now -= seen
        self.rem_window_total -= in_windows
        self.rem_total -= locked
        self.rem_now -= locked
        self._own(req, req.cached_len)
        req.kv_len = req.cached_len
        self.rem_total -= output + need - self._pages(req.kv_len, req.kv_len + num)
        self._take(req, num, last=num == extend)
        return AddResult.ADDED

    def _take(self, req: Req, num: int, *, last: bool) -> None:
        pages = self._pages(req.kv_len, req.kv_len + num)
        self.rem_now -= pages
        self.rem_window_now -= pages
        self.rem_total -= pages
        self.rem_chunk -= self._cost(req.kv_len, num)
        self.additions.append(Addition(req, num, last))

    def _allowed(self, prefix_len: int) -> int:
        """Tokens behind `prefix_len` that the rest of the step has time for."""
        allowed = self.rem_chunk
        if self.sizer is not None:
            allowed = allowed * self.sizer.size_behind(prefix_len) // self.sizer.base_size
        return allowed if self.additions else max(allowed, self._least)

    def _cost(self, prefix_len: int, num: int) -> int:
        if self.sizer is None:
            return num
        return -(-num * self.sizer.base_size // self.sizer.size_behind(prefix_len))

    def _pages(self, start: int, end: int) -> int:
        return self.kv.round_up(end) - self.kv.round_up(start)

    def _page_floor(self, start: int, num: int) -> int:
        """A middle chunk ends at a page boundary, so that its pages can be shared."""
        return (start + num) // self.kv.page_size * self.kv.page_size - start

    def _key(self, req: Req, start: int) -> tuple[int, str, bytes] | None:
        window = max(SHARE_WINDOW, self.kv.page_size)
        ahead = req.fill_ids[start : start + window]
        if not self.kv.enable_prefix_cache or len(ahead) < window or req.needs_whole_prompt:
            return None
        return (id(req.last_node), req.sequence.namespace, ahead.tobytes())

    def _own(self, req: Req, start: int) -> None:
        key = self._key(req, start)
        if key is not None:
            self._owners.add(key)

    def _is_shared(self, req: Req) -> bool:
        key = self._key(req, req.cached_len)
        return key is not None and key in self._owners


def window_room(kv: KVManager, ratio: NewTokenRatio, running: Iterable[Req]) -> int:
    """Tokens that layers with windows have left for new requests, less what `running` ones are
    expected to still need."""
    if kv.window_pages is None:
        return 0
    ahead = (
        kv.expected_in_windows(r.prompt_len + len(r.output_ids), ratio.reserve(r)) for r in running
    )
    return kv.window_room - sum(ahead)
