"""`Requests`: every request of the engine, from its arrival to the release of its memory."""

from __future__ import annotations

from collections.abc import Sequence

from engine.protocol.adapters import AdapterLoaded
from engine.protocol.messages import FinishedReq
from engine.scheduler.adapters import AdapterTable
from engine.scheduler.kv_manager import KVManager
from engine.scheduler.micro_batch import MicroBatch
from engine.scheduler.new_token_ratio import NewTokenRatio
from engine.scheduler.outputs import OutputCollector
from engine.scheduler.rank import Rank
from engine.scheduler.req import Req, ReqStatus
from engine.scheduler.stats import SchedulerStats


class Requests:
    """The requests that wait, run or are leaving. The `Scheduler` composes steps from them.

    A request that ends or is retracted leaves its batch at once. It keeps its row and KV memory,
    and is listed as leaving, until no step in flight holds it. Then it is gone, or waits again.
    """

    def __init__(
        self,
        kv: KVManager,
        micro_batches: Sequence[MicroBatch],
        outputs: OutputCollector,
        stats: SchedulerStats,
        adapters: AdapterTable | None = None,
        conservativeness: float = 1.0,
    ) -> None:
        """`adapters`: None if requests can't have any. `conservativeness` is `NewTokenRatio`'s."""
        self.kv = kv
        self.micro_batches = micro_batches
        self._outputs = outputs
        self.stats = stats
        self.adapters = adapters
        self.by_key: dict[tuple[str, int], Req] = {}
        """All requests by (reply_to, rid)."""
        self.interactive = Rank(False, NewTokenRatio(conservativeness))
        self.flex = Rank(True, NewTokenRatio(conservativeness))
        self.ranks = (self.interactive, self.flex)
        """The higher one first."""
        self.leaving: list[Req] = []
        """Requests that have ended or retract, while a step in flight still holds them."""

    def add(self, req: Req) -> None:
        """Put a new request into the waiting queue."""
        self.by_key[(req.reply_to, req.rid)] = req
        rank = self.rank_of(req)
        rank.num_reqs += 1
        rank.shares.add(req)
        if self.adapters is not None:
            self.adapters.wait(req)

    def rank_of(self, req: Req) -> Rank:
        """The rank that a request belongs to."""
        return self.ranks[req.is_flex]

    @property
    def waiting(self) -> list[Req]:
        """Requests that wait for a row."""
        if not self.flex.num_reqs:
            return self.interactive.shares.waiting
        return self.interactive.shares.waiting + self.flex.shares.waiting

    @property
    def num_waiting(self) -> int:
        """Their number."""
        return sum(rank.shares.num_waiting for rank in self.ranks)

    @property
    def chunked(self) -> list[Req]:
        """Those whose prompts are partly launched: at most one of each rank."""
        return [rank.chunked for rank in self.ranks if rank.chunked is not None]

    def look_again(self) -> None:
        """Room was given back: the next step looks at waiting requests."""
        for rank in self.ranks:
            rank.full_until = 0

    def take(self, req: Req, now: float) -> None:
        """A waiting request has got its row at time `now`, and runs. The caller takes it out of
        its rank's `shares`."""
        req.status = ReqStatus.RUNNING
        self.stats.prompt_tokens_total += len(req.fill_ids)
        self.stats.cached_tokens_total += req.cached_len
        if req.num_cached is None:
            req.num_cached = min(req.cached_len, req.prompt_len)
            req.queue_s = now - req.arrival
        self.rank_of(req).shares.admit(req)
        if self.adapters is not None:
            req.adapter_slot = self.adapters.slot_of(req)
            self.adapters.run(req)

    def end(self, req: Req, told: FinishedReq | None) -> None:
        """Decide that a request has ended. `told` is what its reader gets, None if nothing.

        The caller takes the request out of its batch and calls `let_go`.
        """
        req.status = ReqStatus.FINISHED
        self.stats.requests_finished_total += 1
        self._forget_chunked(req)
        if told is not None:
            self._outputs.finish(req.reader_no, told)

    def end_now(self, req: Req, told: FinishedReq | None = None) -> None:
        """End a request in any state. `told` is as in `end`."""
        if req.status is ReqStatus.WAITING:
            self.rank_of(req).shares.forget_waiting([req])
        self._leave_batch(req)
        self.end(req, told)
        self.let_go(req)

    def adapter_loaded(self, answer: AdapterLoaded) -> None:
        """Workers have read an adapter; if they couldn't, its requests end."""
        assert self.adapters is not None
        for req in self.adapters.loaded(answer):
            told = req.finish("error", message=answer.error, status=400, param="model")
            self.end_now(req, told)
        self.look_again()

    def end_embedded(self, reqs: Sequence[Req], embeddings: Sequence[bytes]) -> None:
        """End the requests whose embeddings [len(reqs)] have come; "" is one that failed."""
        for req, embedding in zip(reqs, embeddings, strict=True):
            if req.finished:
                continue
            told = req.fail("the model produced NaN for this request")
            if embedding:
                req.started = True
                self._outputs.start(req)
                self._outputs.embedding(req, embedding)
                told = req.finish("stop")
            self.end(req, told)
            self.let_go(req)

    def expire(self, now: float) -> None:
        """End the requests whose time limit, in the queue or in all, is over at time `now`."""
        late: list[tuple[Req, str, int]] = []
        for req in self.waiting:
            if req.queue_deadline is not None and now > req.queue_deadline and not req.started:
                late.append((req, "no capacity: the request waited too long in the queue", 503))
        for req in self.by_key.values():
            if req.deadline is not None and now > req.deadline and not req.finished:
                late.append((req, "the request took longer than its time limit", 408))
        for req, message, status in late:
            if not req.finished:
                self.end_now(req, req.finish("error", message=message, status=status))

    def retract(self, req: Req) -> None:
        """Send a running request back to the queue. Its tokens so far are kept."""
        self._leave_batch(req)
        self._forget_chunked(req)
        req.status = ReqStatus.RETRACTING
        self.let_go(req)

    def let_go(self, req: Req) -> None:
        """Release a request, or list it as leaving while a step in flight holds it."""
        if not self.is_in_flight(req):
            self._release(req)
        elif not any(r is req for r in self.leaving):
            self.leaving.append(req)

    def settle(self) -> None:
        """Release the leaving requests that no step holds any more. Called when a step is back."""
        for req in list(self.leaving):
            if not self.is_in_flight(req):
                self._release(req)

    def is_in_flight(self, req: Req) -> bool:
        """Whether a step in flight holds the request."""
        return any(r is req for mb in self.micro_batches for s in mb.in_flight for r in s.reqs)

    def _leave_batch(self, req: Req) -> None:
        for mb in self.micro_batches:
            mb.remove([req])

    def _forget_chunked(self, req: Req) -> None:
        rank = self.rank_of(req)
        if rank.chunked is req:
            rank.chunked = None

    def _release(self, req: Req) -> None:
        self.leaving = [r for r in self.leaving if r is not req]
        held_row = req.req_pool_idx != 0
        self.kv.release(req, insert=True)
        self.look_again()
        rank = self.rank_of(req)
        if req.status is ReqStatus.RETRACTING:
            req.status = ReqStatus.WAITING
            rank.shares.wait(req)
        if held_row:
            rank.shares.release(req)
        if self.adapters is not None:
            self._update(self.adapters, req, held_row=held_row)
        if req.status is ReqStatus.FINISHED:
            del self.by_key[(req.reply_to, req.rid)]
            rank.num_reqs -= 1

    def _update(self, adapters: AdapterTable, req: Req, *, held_row: bool) -> None:
        req.adapter_slot = -1
        if held_row:
            adapters.release(req)
        if req.status is ReqStatus.FINISHED:
            adapters.forget(req)
        else:
            adapters.wait(req)
