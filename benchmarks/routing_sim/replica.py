"""One replica: the engine's prefix cache under a fluid model of its device."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.routing_sim.trace import PAGE_SIZE, Tokens, TraceRequest
from engine.kvcache import RadixCache, TokenToKVPoolAllocator, TreeNode
from engine.protocol.messages import KVEvent

PREFILL_TOKENS_PER_MS = 40.0
CHUNK_TOKENS = 2048
STEP_MS = 8.0
STEP_MS_PER_DECODE = 0.02
MAX_DECODES = 1024
MAX_ADAPTERS = 8
"""In a replica's memory."""
LOAD_S = 0.2
"""That reading an adapter takes; one is read at a time, beside the steps."""


class _NoSlots(TokenToKVPoolAllocator):
    """The pool of a tree whose slots don't matter. It drops the slots that it gets back.

    Finding and freeing real slots would be a third of the simulation's time.
    """

    def __init__(self) -> None:
        super().__init__(PAGE_SIZE, PAGE_SIZE)

    def free(self, slots: NDArray[np.integer]) -> None:
        del slots


class CacheModel:
    """The engine's RadixCache, kept to a size, fed with whole requests.

    Simplification: KV of running requests isn't charged to it, as if that KV lay elsewhere.
    """

    def __init__(self, cache_tokens: int, *, enable_events: bool = False) -> None:
        self.cache_tokens = cache_tokens
        self.tree = RadixCache(_NoSlots(), PAGE_SIZE, enable_events=enable_events)
        self._slots = np.zeros(0, dtype=np.int32)

    def match(self, prompt: Tokens, adapter: str = "") -> tuple[int, TreeNode]:
        """Cached tokens of a prompt, without its last, which the engine always computes; and the
        node."""
        found = self.tree.match_prefix(prompt[:-1], adapter)
        return len(found.indices), found.last_node

    def insert(self, tokens: Tokens, adapter: str = "") -> None:
        """Add the tokens that are missing, then evict down to the size."""
        if len(self._slots) < len(tokens):
            self._slots = np.zeros(2 * len(tokens), dtype=np.int32)
        self.tree.insert(tokens, self._slots, adapter)
        over = self.tree.total_size - self.cache_tokens
        if over > 0:
            self.tree.evict(over)


@dataclass(slots=True)
class RunRecord:
    """The record of a request. Times are seconds; replica is where it ran.

    prompt: its tokens, empty from the first token on.
    """

    request: TraceRequest
    replica: int
    prompt: Tokens = field(repr=False)
    started: float = -1.0
    first_token: float = -1.0
    finished: float = -1.0
    cached_tokens: int = 0

    @property
    def uncached_tokens(self) -> int:
        return self.request.num_prompt - self.cached_tokens


class Replica:
    """First come, first served chunked prefill; decodes share steps. Driven by the simulator.

    Nobody waits for an adapter of another request.

    u uncached tokens take u * (1/40 + (8 + 0.02 R) / 2048) ms with R decodes running: chunks
    of 2,048 tokens at 40 tokens/ms, each with a step's overhead. A decode step takes
    8 + 0.02 R ms, and 51.2 ms more while there's prefill. (The figures are of the order of
    an 8B model on one H100.) Cached tokens are looked up when a prefill starts; the prompt
    enters the cache when it ends, prompt and output when the request does.
    """

    def __init__(self, number: int, cache_tokens: int, *, enable_events: bool) -> None:
        self.number = number
        self.cache = CacheModel(cache_tokens, enable_events=enable_events)
        self.queue: deque[RunRecord] = deque()
        self.prefilling: RunRecord | None = None
        self.adapters: OrderedDict[str, float] = OrderedDict()
        """Adapters in memory by name, with the time at which each has been read."""
        self.num_loads = 0
        self._in_use: Counter[str] = Counter()
        self._reads_until = 0.0
        self.busy_s: list[tuple[float, float]] = []
        self.version = 0
        self._node: TreeNode | None = None
        # Decodes by the step at which they end; steps are counted from the replica's start.
        self._decodes: list[tuple[float, int, RunRecord]] = []
        self._steps = 0.0
        self._at = 0.0

    def add(self, record: RunRecord, now: float) -> None:
        """A request comes; its adapter is read behind those that are being read."""
        self.queue.append(record)
        adapter = record.request.adapter
        if not adapter:
            return
        self._in_use[adapter] += 1
        if adapter not in self.adapters:
            self.num_loads += 1
            self._reads_until = max(self._reads_until, now) + LOAD_S
            self.adapters[adapter] = self._reads_until
        self.adapters.move_to_end(adapter)
        while len(self.adapters) > MAX_ADAPTERS:
            idle = next((name for name in self.adapters if not self._in_use[name]), None)
            if idle is None:
                break
            del self.adapters[idle]

    def next_read(self, now: float) -> float | None:
        """When the next adapter has been read that a request waits for."""
        waiting = (self.adapters[r.request.adapter] for r in self.queue if r.request.adapter)
        return min((at for at in waiting if at > now), default=None)

    def _take(self, now: float) -> RunRecord | None:
        """The first request whose adapter is there."""
        for at, record in enumerate(self.queue):
            if self.adapters.get(record.request.adapter, 0.0) <= now:
                del self.queue[at]
                return record
        return None

    def try_prefill(self, now: float) -> float | None:
        """Start the next prefill if there is one. Returns the time of its end in seconds."""
        if self.prefilling or not self.queue or len(self._decodes) >= MAX_DECODES:
            return None
        self._advance(now)
        record = self._take(now)
        if record is None:
            return None
        record.started = now
        record.cached_tokens, self._node = self.cache.match(record.prompt, record.request.adapter)
        self.cache.tree.inc_lock_ref(self._node)
        self.prefilling = record
        overhead = STEP_MS + STEP_MS_PER_DECODE * len(self._decodes)
        per_token = 1 / PREFILL_TOKENS_PER_MS + overhead / CHUNK_TOKENS
        end = now + record.uncached_tokens * per_token / 1e3
        self.busy_s.append((now, end))
        return end

    def end_prefill(self, now: float) -> RunRecord:
        """The prompt is in the cache, the first token is out; decoding starts."""
        record = self.prefilling
        assert record is not None and self._node is not None
        self._advance(now)
        self.prefilling = None
        record.first_token = now
        self.cache.insert(record.prompt, record.request.adapter)
        record.prompt = record.prompt[:0].copy()
        self.cache.tree.dec_lock_ref(self._node)
        steps = len(record.request.output) - 1
        heapq.heappush(self._decodes, (self._steps + steps, record.request.number, record))
        return record

    def end_decodes(self, now: float) -> list[RunRecord]:
        """End the decodes whose last token is out; returns their records."""
        self._advance(now)
        ended = []
        # The clock's rounding must not leave a decode a millionth of a step short.
        while self._decodes and self._decodes[0][0] <= self._steps + 1e-6:
            record = heapq.heappop(self._decodes)[2]
            record.finished = now
            self._in_use[record.request.adapter] -= 1
            self.cache.insert(record.request.whole(), record.request.adapter)
            ended.append(record)
        return ended

    def next_end(self, now: float) -> float | None:
        """When the next decode ends if nothing changes until then, in seconds."""
        if not self._decodes:
            return None
        return now + max(self._decodes[0][0] - self._steps, 0.0) * self._step_ms() / 1e3

    def drain_events(self) -> list[KVEvent]:
        return self.cache.tree.drain_events()

    def _advance(self, now: float) -> None:
        self._steps += (now - self._at) * 1e3 / self._step_ms()
        self._at = now

    def _step_ms(self) -> float:
        chunk = CHUNK_TOKENS / PREFILL_TOKENS_PER_MS if self.prefilling else 0.0
        return STEP_MS + STEP_MS_PER_DECODE * len(self._decodes) + chunk
