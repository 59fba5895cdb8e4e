"""`Quotas`: tokens per minute of each key, over all ingresses.

A key has a bucket of `tokens_per_minute` tokens, which fills up within a minute. A request is let
in if the bucket holds the tokens of its prompts, or is full. They are taken at once. Tokens of its
outputs are taken as they come, so the bucket can fall below zero; the next request then waits until
it has risen again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from deploy.http.access.api_key import ApiKey
from deploy.http.engine_client import EngineClient, Spending, SpendingReport
from deploy.http.metrics import RequestTracker
from engine.errors import RequestError

logger = logging.getLogger(__name__)

SHARE_EVERY_S = 1.0
FORGET_AFTER_S = 120.0
"""A bucket is full long before, and what other ingresses took is in it."""


@dataclass(eq=False)
class Ticket:
    """A request that was let in, and how many of its output tokens were taken."""

    bucket: _Bucket
    tracker: RequestTracker
    taken: int = 0


@dataclass
class _Bucket:
    """`level` is as of `filled_at`."""

    capacity: float
    level: float
    filled_at: float
    spent: float = 0.0
    """What the requests of this process took in all."""
    reported: float = 0.0
    """What the others know of that."""
    deficit: float = 0.0
    """What the requests of this process took and time hasn't brought back yet."""
    used_at: float = 0.0
    tickets: set[Ticket] = field(default_factory=set)

    def fill(self, capacity: float, now: float) -> None:
        """Let in what the time since the last call brings. The key may have another limit now."""
        if capacity != self.capacity:
            self.level *= capacity / self.capacity
            self.deficit *= capacity / self.capacity
            self.capacity = capacity
        came = (now - self.filled_at) * capacity / 60
        self.level = min(capacity, self.level + came)
        self.deficit = max(0.0, self.deficit - came)
        self.filled_at = now

    def take(self, tokens: float) -> None:
        """For requests of this process."""
        self.level -= tokens
        self.spent += tokens
        self.deficit += tokens

    def take_outputs(self) -> None:
        """Take the tokens that came since the last call."""
        for ticket in self.tickets:
            there = ticket.tracker.num_output
            self.take(there - ticket.taken)
            ticket.taken = there


class _Heard(NamedTuple):
    """What another ingress said last of a key, and when."""

    told: Spending
    at: float


class Quotas:
    """Of one ingress. All methods run in its event loop.

    Each ingress has buckets of its own, and tells the others every `SHARE_EVERY_S` what its
    requests took. So what one ingress lets in the others know a second later. Until then a key that
    sends to all of them at once can take its bucket once from each.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.buckets: dict[str, _Bucket] = {}
        self.heard: dict[tuple[str, str], _Heard] = {}
        """By ingress and key."""
        self.name = ""
        self.sharing: asyncio.Task[None] | None = None

    def begin(self, key: ApiKey, num_prompt: int, tracker: RequestTracker) -> Ticket:
        """Let a request in with `num_prompt` tokens of prompts. `key` has a limit. What is
        returned is to be given to `end`.

        Raises `RequestError` (429) with the seconds after which it would be let in.
        """
        limit, now = key.tokens_per_minute, self._clock()
        if limit is None:
            raise ValueError(f"the key {key.name} has no limit")
        bucket = self.buckets.get(key.name)
        if bucket is None:
            bucket = self.buckets[key.name] = _Bucket(limit, self._told(key.name, limit), now)
        bucket.take_outputs()
        bucket.fill(limit, now)
        needed = min(num_prompt, limit)
        if bucket.level < needed:
            wait_s = max(1, math.ceil((needed - bucket.level) * 60 / limit))
            raise RequestError(
                f"The key {key.name} has used its {limit} tokens per minute; try again in "
                f"{wait_s} s.",
                status=429,
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )
        bucket.take(num_prompt)
        ticket = Ticket(bucket, tracker)
        bucket.tickets.add(ticket)
        return ticket

    def end(self, ticket: Ticket) -> None:
        """A request that was let in is over."""
        ticket.bucket.take_outputs()
        ticket.bucket.tickets.discard(ticket)
        ticket.bucket.used_at = self._clock()

    def report(self) -> SpendingReport:
        """What the others have to know: of keys that took something since the last report, or whose
        buckets aren't full."""
        now, found = self._clock(), {}
        for name, bucket in list(self.buckets.items()):
            bucket.take_outputs()
            bucket.fill(bucket.capacity, now)
            if bucket.level < bucket.capacity or bucket.spent != bucket.reported:
                found[name] = Spending(bucket.spent, bucket.level, bucket.deficit)
                bucket.reported = bucket.spent
            elif not bucket.tickets and now - bucket.used_at > FORGET_AFTER_S:
                del self.buckets[name]
        return found

    def hear(self, ingress: str, report: SpendingReport) -> None:
        """Another ingress reports. Of one that wasn't heard before only the deficit is taken: what
        it took long ago has come back."""
        if ingress == self.name:
            return
        now = self._clock()
        # Here, as an ingress may hear the others for long before it has something to report.
        self.heard = {k: h for k, h in self.heard.items() if now - h.at <= FORGET_AFTER_S}
        for name, told in report.items():
            before = self.heard.get((ingress, name))
            self.heard[ingress, name] = _Heard(told, now)
            bucket = self.buckets.get(name)
            if bucket is None:
                continue
            bucket.fill(bucket.capacity, now)
            if before is None or told.spent < before.told.spent:
                bucket.level -= told.deficit
            else:
                bucket.level -= told.spent - before.told.spent

    def _told(self, name: str, limit: float) -> float:
        """The level of a new bucket: full, or as the others know it."""
        now = self._clock()
        levels = [
            heard.told.level + (now - heard.at) * limit / 60
            for (_, key), heard in self.heard.items()
            if key == name
        ]
        return min([float(limit), *levels])

    def share(self, client: EngineClient) -> None:
        """Begin to tell the other ingresses, if that hasn't begun. To be called in the loop."""
        if self.sharing is None:
            self.name = uuid.uuid4().hex
            self.sharing = asyncio.create_task(self._share(client))

    async def _share(self, client: EngineClient) -> None:
        while True:
            await asyncio.sleep(SHARE_EVERY_S)
            report = self.report()
            if not report:
                continue
            try:
                await client.tell_spending(self.name, report)
            except Exception as error:  # the next second tells it again, in total
                logger.warning("quotas were not shared: %s", type(error).__name__)
