"""`Scheduler`: decides every batch, owns all KV bookkeeping, does no I/O.

The loop around it (engine/engine_core.py) is receive -> `add`/`abort`, `next_batch` -> send,
result -> `process_result`, `take_outputs` -> send. Time is handed in.

One loop serves all modes: a micro-batch may have `lookahead` steps in flight (normal 1,
overlap 2), pipeline parallelism cycles through several micro-batches. Results of a micro-batch
come back in the order of its steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from engine.protocol.messages import (
    AbortRequest,
    AddRequest,
    FinishedReq,
    GenerationBatchResult,
    ModelWorkerBatch,
    SampleMasks,
    StepOutputs,
)
from engine.scheduler.admission import make_req
from engine.scheduler.balance import fair_share, rebalance
from engine.scheduler.batch_builder import build_batch
from engine.scheduler.chunk_sizer import ChunkSizer
from engine.scheduler.delayed_sample import DelayedSamples
from engine.scheduler.kv_manager import KVManager
from engine.scheduler.micro_batch import LaunchedStep, MicroBatch
from engine.scheduler.new_token_ratio import NewTokenRatio
from engine.scheduler.outputs import OutputCollector
from engine.scheduler.prefill_adder import Addition, AddResult, PrefillAdder
from engine.scheduler.req import Req, ReqStatus
from engine.scheduler.schedule_policy import make_policy
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.scheduler.stats import SchedulerStats
from engine.scheduler.victims import ends_in_flight, preemption_victims, retraction_victim

logger = logging.getLogger(__name__)

EXPIRE_INTERVAL_S = 0.05
FULL_RETRY_STEPS = 16
"""Steps until a batch that was full is offered requests again (new_token_ratio decays)."""


class Scheduler:
    """Continuous batching over a paged KV cache with a radix prefix tree."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.kv = KVManager(
            config.num_kv_tokens,
            config.page_size,
            config.max_running_requests,
            config.max_model_len,
            enable_prefix_cache=config.enable_prefix_cache,
            eviction_policy=config.eviction_policy,
            enable_events=config.enable_kv_events,
        )
        self.policy = make_policy(config.schedule_policy)
        self.ratio = NewTokenRatio(config.schedule_conservativeness)
        self.sizer: ChunkSizer | None = None
        if config.enable_dynamic_chunking and config.chunked_prefill_size is not None:
            self.sizer = ChunkSizer(config.chunked_prefill_size, config.page_size)
        self.outputs = OutputCollector()
        self.delayed = DelayedSamples(config.vocab_size)
        self.stats = SchedulerStats(kv_total_tokens=self.kv.total_size)
        self.micro_batches = [MicroBatch(i) for i in range(config.num_micro_batches)]
        self.reqs: dict[tuple[str, int], Req] = {}
        self.waiting_queue: list[Req] = []
        self.chunked_req: Req | None = None
        """The one request whose prompt is partly launched, shared by all micro-batches."""
        self._leaving: list[Req] = []
        """Ended or retracting, but a step in flight still holds them."""
        self._next_micro_batch = 0
        self._step = 0
        self._full_until = 0
        self._next_expire = -math.inf

    # Requests

    def add(self, request: AddRequest, now: float) -> None:
        """Queue a request; a refusal goes out as its `FinishedReq` (reason "error")."""
        number = self.outputs.client_no(request.client)
        key = (request.client, request.rid)
        if key in self.reqs:
            raise ValueError(f"request id {request.rid} of {request.client!r} is in use")
        made = make_req(request, self.config, len(self.waiting_queue), now)
        if isinstance(made, FinishedReq):
            self.outputs.finish(number, made)
            return
        made.client_no = number
        self.reqs[key] = made
        self.waiting_queue.append(made)
        self._full_until = min(self._full_until, self._step + 1)

    def abort(self, request: AbortRequest) -> None:
        """End a request in any state; unknown ids (it just ended) are ignored.

        Its client gets no more output for it, not even the end, if it went away ("abort").
        """
        req = self.reqs.get((request.client, request.rid))
        if req is not None and not req.finished:
            self._finish(req, request.reason, silent=True)

    def abort_client(self, client: str) -> None:
        """End every request of a client that is gone."""
        for req in [r for r in self.reqs.values() if r.client == client and not r.finished]:
            self._finish(req, "abort", silent=True)

    # The loop's side

    @property
    def num_in_flight(self) -> int:
        """Steps sent and not processed."""
        return sum(len(mb.in_flight) for mb in self.micro_batches)

    @property
    def is_idle(self) -> bool:
        """No request in any state and no step in flight."""
        return not self.reqs and self.num_in_flight == 0

    def next_batch(self, now: float) -> ModelWorkerBatch | None:
        """Compose the next step of the next micro-batch that may launch one.

        None: nothing to do, or only results can change that.
        """
        if now >= self._next_expire:
            self._next_expire = now + EXPIRE_INTERVAL_S
            self._expire(now)
        count = len(self.micro_batches)
        retry = True
        while retry:
            sent_back = self.stats.preemptions_total + self.stats.retractions_total
            for offset in range(count):
                mb = self.micro_batches[(self._next_micro_batch + offset) % count]
                if len(mb.in_flight) >= self.config.lookahead:
                    continue
                batch = self._compose(mb)
                if batch is not None:
                    self._next_micro_batch = (mb.index + 1) % count
                    return batch
            # With nothing in flight no result would bring the room that was just made to use.
            made_room = self.stats.preemptions_total + self.stats.retractions_total > sent_back
            retry = made_room and self.num_in_flight == 0
        return None

    def process_result(self, result: GenerationBatchResult) -> None:
        """Commit the tokens of the oldest step in flight of the result's micro-batch."""
        mb = next(
            m for m in self.micro_batches if m.in_flight and m.in_flight[0].step == result.step
        )
        step = mb.in_flight.popleft()
        self.stats.steps_total += 1
        for entry in result.prompt_logprobs or ():
            collected = step.reqs[entry.row].prompt_logprobs
            if entry.start == 0:
                collected.append(None)  # nothing comes before the first token
            collected.extend(entry.logprobs)
        if self.sizer is not None and step.chunk is not None and result.device_s is not None:
            self.sizer.observe(*step.chunk, result.device_s)
        self._commit(mb, step, result)
        if self._leaving:
            self._settle_leaving()
        if len(self.micro_batches) > 1:
            rebalance(self.micro_batches, mb, step, self.config.max_micro_batch_size)

    def take_outputs(self) -> list[tuple[str, StepOutputs]]:
        """(client, message) pairs since the last call."""
        return self.outputs.take(self._step)

    def take_masks(self) -> list[SampleMasks]:
        """Masks of delayed steps that can be sampled now, to be sent after the steps.

        Call after `next_batch` and after `process_result`.
        """
        return self.delayed.take()

    def flush_cache(self) -> bool:
        """Forget all cached prefixes; only when idle, else False."""
        if not self.is_idle:
            return False
        self.kv.reset()
        return True

    def check_invariants(self) -> str | None:
        """What breaks design §3's invariant, or None."""
        for mb in self.micro_batches:
            mb.running.sync_lens()
        return self.kv.check(self.reqs.values())

    def on_idle(self) -> None:
        """Nothing to do: check for leaks (reported, counted, repaired) and rest."""
        self.ratio.reset()
        if not self.is_idle:
            return
        leak = self.check_invariants()
        if leak is not None:
            logger.error("%s; resetting the KV cache", leak)
            self.stats.kv_leaks_total += 1
            self.kv.reset()

    def snapshot_stats(self) -> SchedulerStats:
        """Current statistics."""
        stats = self.stats
        stats.num_waiting = len(self.waiting_queue)
        stats.num_running = len(self.reqs) - stats.num_waiting
        stats.waiting_tokens = sum(r.prompt_len + len(r.output_ids) for r in self.waiting_queue)
        stats.kv_cached_tokens = self.kv.tree.evictable_size
        stats.kv_used_tokens = self.kv.total_size - self.kv.room
        stats.new_token_ratio = self.ratio.value
        return stats

    # Composing a step

    def _compose(self, mb: MicroBatch) -> ModelWorkerBatch | None:
        additions = self._new_prefill(mb)
        if additions:
            return self._launch(mb, additions, with_decode=self.config.enable_mixed_chunk)
        if len(mb.running) == 0 or not self._has_decode_room(mb):
            return None
        self.ratio.on_decode()
        return self._launch(mb, [], with_decode=True)

    def _new_prefill(self, mb: MicroBatch) -> list[Addition]:
        full = self._step < self._full_until
        if self.chunked_req is None and (full or not self.waiting_queue):
            return []
        mixed = self.config.enable_mixed_chunk
        num_decode = len(mb.running) if mixed else 0
        decode_need = self.kv.decode_need(mb.running.seq_lens + 1) if num_decode else 0
        if decode_need > self.kv.room:
            return []
        adder = PrefillAdder(
            self.kv,
            self.ratio,
            (r for m in self.micro_batches for r in m.running.reqs),
            chunk_size=self.config.chunked_prefill_size,
            max_prefill_tokens=self.config.max_prefill_tokens,
            num_decode=num_decode,
            decode_need=decode_need,
            sizer=self.sizer,
        )
        if self.chunked_req is not None:
            added = adder.add_chunked(self.chunked_req)
            if added is not AddResult.ADDED:
                return []
            if not adder.additions[0].last:
                return adder.additions
            self.chunked_req = None
        if not full:
            self._add_waiting(mb, adder)
        return adder.additions

    def _add_waiting(self, mb: MicroBatch, adder: PrefillAdder) -> None:
        slots = self._open_slots(len(mb.running) + sum(a.last for a in adder.additions))
        if slots <= 0 and not self.config.enable_priority_preemption:
            return
        matched = self.policy.sort(self.waiting_queue, self.kv.match)
        admitted: list[Req] = []
        for req in self.waiting_queue:
            if not matched:
                req.begin_round()
                self.kv.match(req)
            if len(admitted) >= slots:
                self._preempt_for(req)
                break
            alone = not admitted and not adder.additions and self._nothing_runs()
            added = adder.add(req, force=alone)
            if added is AddResult.DEFERRED:
                continue
            if added is AddResult.NO_TOKEN and not self._preempt_for(req):
                self._full_until = self._step + FULL_RETRY_STEPS
            if added is not AddResult.ADDED:
                break
            self.kv.admit(req)
            self._on_admitted(req)
            admitted.append(req)
            if not adder.additions[-1].last:
                self.chunked_req = req
                break
        if admitted:
            taken = {id(r) for r in admitted}
            self.waiting_queue = [r for r in self.waiting_queue if id(r) not in taken]

    def _on_admitted(self, req: Req) -> None:
        req.status = ReqStatus.RUNNING
        self.stats.prompt_tokens_total += len(req.fill_ids)
        self.stats.cached_tokens_total += req.cached_len
        if req.num_cached is None:
            req.num_cached = min(req.cached_len, req.prompt_len)

    def _open_slots(self, num_held: int) -> int:
        """Requests that a step may admit whose micro-batch has `num_held`.

        A burst is spread over the micro-batches, so that all stages get work at once. One request
        may always come: it needn't wait for an emptier micro-batch, `rebalance` moves it there.
        """
        rows = self.kv.rows.available_size()
        if len(self.micro_batches) == 1:
            return rows
        share = fair_share(len(self.reqs), self.micro_batches)
        return min(rows, self.config.max_micro_batch_size - num_held, max(share - num_held, 1))

    def _nothing_runs(self) -> bool:
        return self.num_in_flight == 0 and all(len(m.running) == 0 for m in self.micro_batches)

    def _launch(
        self, mb: MicroBatch, additions: Sequence[Addition], *, with_decode: bool
    ) -> ModelWorkerBatch:
        self._step += 1
        running = mb.running
        decode = running if with_decode and len(running) else None
        batch, launched, last_locs = build_batch(
            self.kv,
            self._step,
            mb.index,
            additions,
            decode,
            send_tokens=self.config.pp_size > 1,
        )
        if (decode is not None and decode.num_constrained) or any(
            a.req.constraint is not None for a in additions
        ):
            self.delayed.launch(batch, launched)
        if decode is not None:
            decode.advance(batch.out_cache_loc[len(batch.out_cache_loc) - len(decode) :])
        for req, _, _ in additions:
            self.kv.cache_unfinished(req)
        running.append([a.req for a in additions if a.last], last_locs)
        mb.in_flight.append(launched)
        return batch

    # Results

    def _commit(self, mb: MicroBatch, step: LaunchedStep, result: GenerationBatchResult) -> None:
        tokens = result.next_token_ids
        ended: list[Req] = []
        dropped: list[int] = []
        finished = ReqStatus.FINISHED
        errors: Mapping[int, str] | None = result.row_errors
        terminated: Collection[int] = ()
        if step.constrained:
            errors, terminated = self.delayed.accept(step, result)
        for i, (req, token) in enumerate(zip(step.sampled, tokens, strict=True)):
            if req.status is finished:
                dropped.append(i)
                continue
            if errors is not None and i in errors:
                dropped.append(i)
                ended.append(req)
                self._end(req, "error", message=errors[i], status=500)
                continue
            output = req.output_ids
            output.append(token)
            if not req.started:
                req.started = True
                self.outputs.start(req)
            if result.logprobs is not None:
                logprobs = result.logprobs[i]
                if logprobs is not None:
                    self.outputs.logprobs(req, logprobs)
            if token in req.stop_ids:
                ended.append(req)
                self._end(req, "stop", matched_token=token)
            elif len(output) >= req.max_new_tokens:
                ended.append(req)
                self._end(req, "stop" if i in terminated else "length")
        for i in terminated:
            req = step.sampled[i]
            if not req.finished:
                ended.append(req)
                self._end(req, "stop")
        self.stats.generation_tokens_total += len(tokens) - len(dropped)
        rids, clients = step.rids, step.clients
        if dropped:
            rids, clients = np.delete(rids, dropped), np.delete(clients, dropped)
            tokens = np.delete(tokens, dropped).tolist()
        self.outputs.close_step(step.step, rids, tokens, clients)
        if ended:
            mb.running.remove(ended)
            for req in ended:
                self._release_or_wait(req)

    # Ends

    def _finish(
        self,
        req: Req,
        reason: str,
        *,
        silent: bool = False,
        message: str = "",
        status: int = 0,
    ) -> None:
        """End a request now, from whatever state."""
        if req.status is ReqStatus.WAITING:
            self.waiting_queue = [r for r in self.waiting_queue if r is not req]
        for mb in self.micro_batches:
            mb.running.remove([req])
        self._end(req, reason, silent=silent, message=message, status=status)
        self._release_or_wait(req)

    def _end(
        self,
        req: Req,
        reason: str,
        *,
        silent: bool = False,
        matched_token: int | None = None,
        message: str = "",
        status: int = 0,
    ) -> None:
        req.status = ReqStatus.FINISHED
        self.stats.requests_finished_total += 1
        if self.chunked_req is req:
            self.chunked_req = None
        if not silent:
            self.outputs.finish(
                req.client_no,
                FinishedReq(
                    req.rid,
                    reason,
                    req.prompt_len,
                    len(req.output_ids),
                    req.num_cached or 0,
                    matched_token,
                    message,
                    status,
                ),
            )

    def _release_or_wait(self, req: Req) -> None:
        """Free a request's memory, or remember to once no step in flight holds it."""
        if self._is_in_flight(req):
            if not any(r is req for r in self._leaving):
                self._leaving.append(req)
        else:
            self._release(req)

    def _release(self, req: Req) -> None:
        if self._leaving:
            self._leaving = [r for r in self._leaving if r is not req]
        self.kv.release(req, insert=True)
        self._full_until = 0
        if req.status is ReqStatus.RETRACTING:
            req.status = ReqStatus.WAITING
            self.waiting_queue.append(req)
        else:
            del self.reqs[(req.client, req.rid)]

    def _settle_leaving(self) -> None:
        for req in list(self._leaving):
            if not self._is_in_flight(req):
                self._release(req)

    def _is_in_flight(self, req: Req) -> bool:
        return any(r is req for mb in self.micro_batches for s in mb.in_flight for r in s.reqs)

    def _expire(self, now: float) -> None:
        late: list[tuple[Req, str, int]] = []
        for req in self.waiting_queue:
            if req.queue_deadline is not None and now > req.queue_deadline and not req.started:
                late.append((req, "no capacity: the request waited too long in the queue", 503))
        for req in self.reqs.values():
            if req.deadline is not None and now > req.deadline and not req.finished:
                late.append((req, "the request took longer than its time limit", 408))
        for req, message, status in late:
            if not req.finished:
                self._finish(req, "error", message=message, status=status)

    # Out of room

    def _has_decode_room(self, mb: MicroBatch) -> bool:
        """Make room for one token of every running row, retracting requests if need be.

        False: skip this step, a result in flight is about to free what is missing.
        """
        while True:
            need = self.kv.decode_need(mb.running.seq_lens + 1)
            if need <= self.kv.room:
                return True
            if self._leaving or ends_in_flight(self.micro_batches):
                return False
            victim = retraction_victim(mb, self.micro_batches, self.chunked_req)
            if victim is None:
                if self.num_in_flight:
                    return False
                raise RuntimeError(
                    "out of KV room with one request left: max_total_tokens is too small"
                )
            self._retract(victim)
            self.ratio.on_retract([r for m in self.micro_batches for r in m.running.reqs])
            self.stats.retractions_total += 1
            if len(mb.running) == 0:
                return False

    def _retract(self, req: Req) -> None:
        """Send a running request back to the queue; its tokens so far are kept."""
        for mb in self.micro_batches:
            mb.running.remove([req])
        if self.chunked_req is req:
            self.chunked_req = None
        req.status = ReqStatus.RETRACTING
        req.num_retractions += 1
        self._release_or_wait(req)

    def _preempt_for(self, req: Req) -> bool:
        """Retract running requests of lower priority until `req` would fit; all or nothing.

        `req` itself is admitted by a later step, when the room is there.
        """
        if not self.config.enable_priority_preemption or self._leaving:
            return False
        for mb in self.micro_batches:
            mb.running.sync_lens()
        missing = self.kv.round_up(len(req.fill_ids) - req.cached_len + 1) - self.kv.room
        need_row = self.kv.rows.available_size() == 0
        chosen = preemption_victims(req, self.micro_batches, self.kv.held, missing, need_row)
        if not chosen:
            return False
        for victim in chosen:
            self._retract(victim)
            self.stats.preemptions_total += 1
        return True
