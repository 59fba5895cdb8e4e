"""`Scheduler`: decides every batch, owns all KV bookkeeping, does no I/O.

The loop around it (engine/loop/engine_core.py) is receive -> `add`/`abort`, `next_batch` -> send,
result -> `process_result`, `take_outputs` -> send. The caller passes the time in.

One loop serves all modes: a micro-batch may have `lookahead` steps in flight (normal 1,
overlap 2), pipeline parallelism cycles through several micro-batches. Results of a micro-batch
come back in the order of its steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from engine.constraints.grammar_compiler import GrammarCompiler
from engine.protocol.adapters import AdapterLoaded, AdapterRef, DropAdapter, LoadAdapter
from engine.protocol.messages import AbortRequest, AddRequest, FinishedReq, StepOutputs
from engine.protocol.step import (
    ForcedRun,
    GenerationBatchResult,
    IntArray,
    ModelWorkerBatch,
    SampleMasks,
)
from engine.registry import SCHEDULE_POLICIES
from engine.scheduler.adapters import AdapterTable
from engine.scheduler.admission import make_req
from engine.scheduler.balance import rebalance
from engine.scheduler.batch_builder import build_batch
from engine.scheduler.chunk_sizer import ChunkSizer
from engine.scheduler.committer import Committer
from engine.scheduler.delayed_sample import DelayedSamples
from engine.scheduler.draft_length import DraftLength
from engine.scheduler.flex_pace import FlexPace, StepWork
from engine.scheduler.kv_manager import KVManager
from engine.scheduler.micro_batch import LaunchedStep, MicroBatch
from engine.scheduler.outputs import OutputCollector
from engine.scheduler.prefill_adder import Addition
from engine.scheduler.prefill_planner import PrefillPlanner
from engine.scheduler.rank import Rank
from engine.scheduler.req import Req
from engine.scheduler.requests import Requests
from engine.scheduler.running_batch import BoolArray, ForcedDrafts, RunningBatch
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.scheduler.stats import SchedulerStats
from engine.scheduler.victims import ends_in_flight, flex_victims, retraction_victim

logger = logging.getLogger(__name__)

LAUNCH_LEAD_S = 0.002
"""Beside interactive requests, a step follows one with flex work so long before its end: for the
scheduler and the workers to prepare it."""
EXPIRE_INTERVAL_S = 0.05


class Scheduler:
    """Continuous batching over a paged KV cache with a radix prefix tree."""

    def __init__(self, config: SchedulerConfig, grammars: GrammarCompiler | None = None) -> None:
        """`grammars` compiles those of requests; without it, such requests are refused."""
        self.config, self.grammars = config, grammars
        # Read in every step.
        self._lookahead, self._mixed = config.lookahead, config.engine.enable_mixed_chunk
        self._send_tokens = config.engine.pp_size > 1
        self.kv = KVManager(config)
        self.sizer: ChunkSizer | None = None
        if config.engine.enable_dynamic_chunking and config.chunk_size is not None:
            self.sizer = ChunkSizer(config.chunk_size, config.engine.page_size)
        self.outputs = OutputCollector()
        self.delayed = DelayedSamples(config.vocab_size)
        self.stats = SchedulerStats(kv_total_tokens=self.kv.total_size)
        speculates, has_adapters = self.kv.speculates, config.engine.has_adapters
        self.micro_batches = [
            MicroBatch(
                i, RunningBatch(speculates, has_adapters), RunningBatch(speculates, has_adapters)
            )
            for i in range(config.num_micro_batches)
        ]
        self.adapters: AdapterTable | None = None
        """Set if requests may have adapters."""
        if config.engine.has_adapters:
            engine = config.engine
            self.adapters = AdapterTable(engine.max_loras, engine.max_held_loras)
        self.requests = Requests(
            self.kv,
            self.micro_batches,
            self.outputs,
            self.stats,
            self.adapters,
            config.engine.schedule_conservativeness,
        )
        policy = SCHEDULE_POLICIES[config.engine.schedule_policy]()
        self.pace = FlexPace()
        self.launch_at: float | None = None
        """When `next_batch` may have a step though nothing came meanwhile; None: it won't have."""
        self.prefill = PrefillPlanner(self.requests, config, policy, self.pace, self.sizer)
        self.committer = Committer(self.requests, self.outputs, self.delayed, self.stats)
        self.draft_length: DraftLength | None = None
        if config.engine.speculative_config is not None:
            self.draft_length = DraftLength(config.engine.speculative_config)
        self._next_micro_batch = self._step = 0
        self._next_expire = -math.inf

    # Requests

    def add(self, request: AddRequest, now: float) -> None:
        """Queue a request at time `now`. A refusal is sent as `FinishedReq` (reason "error")."""
        number = self.outputs.reader_no(request.reply_to)
        if (request.reply_to, request.rid) in self.requests.by_key:
            raise ValueError(f"request id {request.rid} of {request.reply_to!r} is in use")
        rank = self.requests.ranks[request.sequence.is_flex]
        made = make_req(request, self.config, rank.shares, now, self.grammars)
        if isinstance(made, FinishedReq):
            self.outputs.finish(number, made)
            return
        made.reader_no = number
        self.requests.add(made)
        rank.full_until = min(rank.full_until, self._step + 1)

    def abort(self, request: AbortRequest) -> None:
        """End a request in any state; its reader isn't told. Unknown ids (it ended) are ignored."""
        req = self.requests.by_key.get((request.reply_to, request.rid))
        if req is not None and not req.finished:
            self.requests.end_now(req)

    def abort_reader(self, reply_to: str) -> None:
        """End every request of a reader that is gone."""
        for req in list(self.requests.by_key.values()):
            if req.reply_to == reply_to and not req.finished:
                self.requests.end_now(req)

    # The loop's side

    @property
    def num_in_flight(self) -> int:
        """Number of steps sent and not processed."""
        return sum(len(mb.in_flight) for mb in self.micro_batches)

    @property
    def is_idle(self) -> bool:
        """No request in any state and no step in flight."""
        return not self.requests.by_key and self.num_in_flight == 0

    def next_batch(self, now: float) -> ModelWorkerBatch | None:
        """Compose the next step of the next micro-batch that may launch one.

        None if there is nothing to do, or nothing until the next result. `now` is in seconds.
        """
        if now >= self._next_expire:
            self._next_expire = now + EXPIRE_INTERVAL_S
            self.requests.expire(now)
        count = len(self.micro_batches)
        lookahead, self.launch_at = self._lookahead, None
        if lookahead > 1 and self.requests.flex.num_reqs and self.pace.is_shared:
            # A prompt that comes waits for one step with flex work, not for two: the next one goes
            # when the one in flight is nearly done, as far as that is known.
            lookahead = self._lookahead if self._is_nearly_done(now) else 1
        while True:
            num_waiting = self.requests.num_waiting
            for offset in range(count):
                mb = self.micro_batches[(self._next_micro_batch + offset) % count]
                if len(mb.in_flight) >= lookahead:
                    continue
                batch = self._compose(mb, now)
                if batch is not None:
                    self._next_micro_batch = (mb.index + 1) % count
                    return batch
            # A retraction made room. With no step in flight, no result would lead to its use.
            if self.num_in_flight or self.requests.num_waiting == num_waiting:
                return None

    def _is_nearly_done(self, now: float) -> bool:
        """Whether the step in flight will have ended when another one could begin. Sets `launch_at`
        if it won't."""
        in_flight = self.micro_batches[0].in_flight
        if len(in_flight) != 1:
            return not in_flight
        (step,) = in_flight
        if step.began is None:
            step.began = now  # of the first step behind an idle time; others follow one another
        cost = self.pace.seconds(step.work)
        if cost is None:
            return False
        ends = step.began + cost
        if now >= ends - LAUNCH_LEAD_S:
            return True
        self.launch_at = ends - LAUNCH_LEAD_S
        return False

    def process_result(self, result: GenerationBatchResult) -> None:
        """Commit tokens and embeddings of the oldest step in flight of the result's micro-batch."""
        mb = next(
            m for m in self.micro_batches if m.in_flight and m.in_flight[0].step == result.step
        )
        step = mb.in_flight.popleft()
        self.stats.steps_total += 1
        for entry in result.prompt_logprobs or ():
            step.reqs[entry.line].add_prompt_logprobs(entry)
        if self.sizer is not None and step.chunk is not None and result.device_s is not None:
            self.sizer.observe(*step.chunk, result.device_s)
        if step.work is not None and result.device_s is not None:
            self.pace.observe(step.work, result.device_s)
        if self.draft_length is not None:
            self.draft_length.observe(step, result)
        if step.embedded:
            self.requests.end_embedded(step.embedded, result.embeddings or ())
        self.committer.commit(mb, step, result)
        self.requests.settle()
        if len(self.micro_batches) > 1:
            rebalance(self.micro_batches, mb, step, self.config.max_micro_batch_size)

    def take_outputs(self) -> list[tuple[str, StepOutputs]]:
        """(reply_to, message) pairs since the last call."""
        return self.outputs.take(self._step)

    def take_orders(self) -> list[LoadAdapter | DropAdapter]:
        """For all workers, to be sent before the steps. Call after `next_batch`."""
        return [] if self.adapters is None else self.adapters.take_orders()

    def prepare_adapter(self, adapter: AdapterRef, tell: Callable[[str], None]) -> None:
        """Have an adapter read before a request needs it; see `AdapterTable.prepare`."""
        if self.adapters is None:
            tell("this engine takes no adapters")
        else:
            self.adapters.prepare(adapter, tell)

    def adapter_loaded(self, answer: AdapterLoaded) -> None:
        """All workers have an adapter that `take_orders` told them to read, or one can't."""
        self.requests.adapter_loaded(answer)

    def take_masks(self) -> list[SampleMasks]:
        """Masks of delayed steps that can be sampled now, to be sent after the steps.

        Call after `next_batch` and after `process_result`.
        """
        return self.delayed.take()

    def flush_cache(self) -> bool:
        """Forget all cached prefixes. If the engine isn't idle, do nothing and return False."""
        if not self.is_idle:
            return False
        self.kv.reset()
        return True

    def check_invariants(self) -> str | None:
        """What breaks the invariants of `KVManager` and `KeyShares`, or None."""
        for mb in self.micro_batches:
            mb.sync_lens()
        reqs = self.requests.by_key.values()
        for rank in self.requests.ranks:
            own = [req for req in reqs if req.is_flex == rank.is_flex]
            if len(own) != rank.num_reqs:
                return f"{rank.num_reqs} requests are counted where is_flex is {rank.is_flex}"
            if (wrong := rank.shares.check(own)) is not None:
                return wrong
        return self.kv.check(reqs) or (None if self.adapters is None else self.adapters.check())

    def on_idle(self) -> None:
        """Look for leaks of KV memory; log, count and repair them. Call when there is no work."""
        for rank in self.requests.ranks:
            rank.ratio.reset()
        if not self.is_idle:
            return
        leak = self.check_invariants()
        if leak is not None:
            logger.error("%s; resetting the KV cache", leak)
            self.stats.kv_leaks_total += 1
            self.kv.reset()
            for rank in self.requests.ranks:
                rank.shares.clear()

    def snapshot_stats(self) -> SchedulerStats:
        """A copy of the statistics, with gauges as they are now."""
        waiting, flex = self.requests.waiting, self.requests.flex
        kv_flex_tokens = 0
        if flex.num_reqs:
            for mb in self.micro_batches:
                mb.sync_lens()
            kv_flex_tokens = sum(
                self.kv.frees(r) for r in self.requests.by_key.values() if r.is_flex
            )
        if self.adapters is not None:
            self.stats.adapters_held = self.adapters.num_held
            self.stats.adapters_running = self.adapters.num_running
            self.stats.adapter_waiting_requests = self.adapters.num_blocked
            self.stats.adapter_loads_total = self.adapters.loads_total
            self.stats.adapter_evictions_total = self.adapters.evictions_total
            self.stats.adapter_displacements_total = self.adapters.displacements_total
        return msgspec.structs.replace(
            self.stats,
            num_waiting=len(waiting),
            num_running=len(self.requests.by_key) - len(waiting),
            waiting_tokens=_num_tokens(waiting),
            kv_cached_tokens=self.kv.tree.evictable_size,
            kv_used_tokens=self.kv.total_size - self.kv.room,
            flex_waiting_tokens=_num_tokens(flex.shares.waiting),
            kv_flex_tokens=kv_flex_tokens,
            num_flex_running=flex.num_reqs - flex.shares.num_waiting,
            num_flex_waiting=flex.shares.num_waiting,
            new_token_ratio=self.requests.interactive.ratio.value,
            spec_decode_accepted_per_position_total=list(
                self.stats.spec_decode_accepted_per_position_total
            ),
        )

    # Composing a step

    def _compose(self, mb: MicroBatch, now: float) -> ModelWorkerBatch | None:
        if self.requests.flex.num_reqs:
            self._pause_flex(mb)
        if self.draft_length is not None:
            self._plan_drafts(mb.running, self.draft_length)
        additions = self.prefill.plan(mb, self._step, now)
        if additions:
            # Flex prompts are no reason for others to pause.
            rides = mb.running.num_flex < len(mb.running) and all(a.req.is_flex for a in additions)
            return self._launch(mb, additions, with_decode=self._mixed or rides)
        if len(mb.running) == 0 or not self._has_decode_room(mb):
            return None
        for rank in self.requests.ranks:
            rank.ratio.on_decode()
        return self._launch(mb, [], with_decode=True)

    def _pause_flex(self, mb: MicroBatch) -> None:
        """Choose the flex requests that decode in the next step of `mb`, beside interactive ones.

        Whoever decoded in the step before goes on, so that some end before others begin.
        """
        running, paused = mb.running, mb.paused
        lines = running.flex_lines
        flex = [req for req, is_flex in zip(running.reqs, lines, strict=True) if is_flex]
        if not flex and not len(paused):
            return
        lens = [*running.seq_lens[lines].tolist(), *paused.seq_lens.tolist()]
        most = self._flex_lines(running, ~lines, lens)
        if len(flex) > most:
            running.move(flex[most:], paused)
        elif len(paused):
            paused.move(paused.reqs[: most - len(flex)], running)
        self._leave_cache(mb)

    def _flex_lines(self, running: RunningBatch, own: BoolArray, lens: Sequence[int]) -> int:
        """How many of flex requests with so many tokens in the KV cache, `lens`, may decode beside
        the lines `own` of `running`."""
        engine, interactive = self.config.engine, self.requests.interactive
        num_own = int(own.sum())
        budget = self.config.chunk_size or engine.max_prefill_tokens
        work = StepWork(num_own, int(running.seq_lens[own].sum()))
        places = self.config.max_micro_batch_size - num_own
        if prompts := self._prompt_tokens(interactive, budget):
            work = StepWork(work.num_tokens + prompts, work.num_context + prompts)
            places = min(places, budget - work.num_tokens)
        allowed, cost = self.pace.allowance(work), self.pace.cost
        ends = np.cumsum(cost.token + cost.context * np.asarray(lens, np.float64))
        least = 0 if work.num_tokens else 1  # or no step would go on
        return max(min(places, int(np.searchsorted(ends, allowed, side="right"))), least)

    def _prompt_tokens(self, rank: Rank, most: int) -> int:
        """Tokens of prompts that a rank's requests have to compute, as far as they are below
        `most`."""
        found = 0
        if rank.chunked is not None:
            found = len(rank.chunked.fill_ids) - rank.chunked.kv_len
        if rank.shares.may_run():
            for req in rank.shares.waiting:
                found += req.prompt_len + len(req.output_ids)
                if found >= most:
                    break
        return min(found, most)

    def _leave_cache(self, mb: MicroBatch) -> None:
        """Retract flex requests whose next tokens would need pages that the prefix cache keeps for
        interactive ones. One that is alone may have them, or it would never end; one that waited
        long for room may, too."""
        kv, running = self.kv, mb.running
        while running.num_flex:
            lines = running.flex_lines
            own, flex = kv.decode_need_of(running, ~lines), kv.decode_need_of(running, lines)
            is_alone = kv.rows.size - kv.rows.available_size() == 1
            if flex <= max(kv.spare_room - own, 0) or is_alone or kv.borrower is not None:
                return
            if ends_in_flight(self.micro_batches) or self.requests.leaving:
                running.move([req for req in running.reqs if req.is_flex], mb.paused)
                return
            victims = flex_victims(mb, self.micro_batches, self.requests.flex.chunked)
            self._retract(victims[0])

    def _retract(self, victim: Req) -> None:
        self.requests.retract(victim)
        rank = self.requests.rank_of(victim)
        rank.ratio.on_retract(
            [r for m in self.micro_batches for r in m.reqs if r.is_flex == rank.is_flex]
        )
        if rank.is_flex:
            self.stats.flex_retractions_total += 1
        else:
            self.stats.retractions_total += 1

    def _plan_drafts(self, running: RunningBatch, length: DraftLength) -> None:
        """Decide how many drafts the next step's rows have; none before anybody must leave.

        With one step in flight the scheduler has the drafts, which came with the last result.
        """
        most: int | IntArray = length.choose(len(running))
        if most and (self.requests.chunked or self.requests.num_waiting):
            # Half of a step's tokens stay for prompts.
            budget = self.config.chunk_size or self.config.engine.max_prefill_tokens
            most = min(length.most, max(budget // 2 // max(len(running), 1) - 1, 0), int(most))
        if most and self._lookahead == 1:
            known = np.fromiter((len(r.drafts) for r in running.reqs), np.int32, len(running))
            most = np.minimum(known, most)
        if running.num_flex and self.requests.interactive.num_reqs:
            most = np.where(running.flex_lines, 0, most)  # each counts as one token
        running.plan_drafts(most, self._forced(running, length.most))
        if running.planned.any() and self.kv.decode_need(running) > self.kv.room_now:
            running.plan_drafts(0)

    def _forced(self, running: RunningBatch, most: int) -> dict[int, ForcedDrafts]:
        """By row of `ReqToTokenPool`: the drafts that constraints give to the next step.

        With a step in flight they begin with the tokens that it will give.
        """
        found: dict[int, ForcedDrafts] = {}
        if not running.num_constrained:
            return found
        least, ahead = (1, most + 1) if self._lookahead > 1 else (0, 0)
        for req in running.reqs:
            if req.constraint is None or (req.is_flex and self.requests.interactive.num_reqs):
                continue
            req.drafts = req.constraint.forced(ahead + most)
            count = min(len(req.drafts) - least, most)
            if count > 0:
                run = ForcedRun(req.prompt_len + len(req.output_ids), req.drafts)
                found[req.req_pool_idx] = ForcedDrafts(run, count)
        return found

    def _launch(
        self, mb: MicroBatch, additions: Sequence[Addition], *, with_decode: bool
    ) -> ModelWorkerBatch:
        self._step += 1
        running = mb.running
        decode = running if with_decode and len(running) else None
        batch, launched = build_batch(
            self.kv,
            self._step,
            mb.index,
            additions,
            decode,
            send_tokens=self._send_tokens,
            whole_steps=self._lookahead == 1,
            adapters=self.adapters,
        )
        if self.draft_length is not None and self._lookahead == 1:
            batch.drafts_wanted = self.draft_length.most
        if (decode is not None and decode.num_constrained) or any(
            a.req.constraint is not None for a in additions
        ):
            self.delayed.launch(batch, launched)
        if self.requests.flex.num_reqs:
            self._note_work(batch, launched)
        if decode is not None:
            for rank in self.requests.ranks:
                rank.shares.charge_rows(decode.num_by_key[rank.is_flex])
            decode.advance(batch.out_cache_loc[len(batch.out_cache_loc) - len(decode) :])
            self.kv.pass_windows(decode.rows, decode.seq_lens)
        for req, _, _ in additions:
            self.kv.cache_unfinished(req)
            self.kv.pass_windows([req.req_pool_idx], [req.kv_len])
        running.append(a.req for a in additions if a.last)
        mb.in_flight.append(launched)
        return batch

    def _note_work(self, batch: ModelWorkerBatch, launched: LaunchedStep) -> None:
        """Tell `pace` what a step computes."""
        own = np.fromiter((not req.is_flex for req in launched.reqs), np.bool_, len(launched.reqs))
        num_tokens, lens = batch.query_lens, batch.seq_lens
        launched.work = StepWork(int(num_tokens.sum()), int(lens.sum()))
        self.pace.launched(StepWork(int(num_tokens[own].sum()), int(lens[own].sum())))

    # Out of room

    def _has_decode_room(self, mb: MicroBatch) -> bool:
        """Make room for one token of every running row, by retracting requests if necessary.

        False if this step must be skipped: a result in flight is about to free the missing room.
        """
        while True:
            need = self.kv.decode_need(mb.running)
            if need <= self.kv.room_now:
                return True
            if self.requests.leaving or ends_in_flight(self.micro_batches):
                return False
            victim = retraction_victim(mb, self.micro_batches, self.requests.chunked)
            if victim is None:
                if self.num_in_flight:
                    return False
                raise RuntimeError(
                    "out of KV room with one request left: max_total_tokens is too small"
                )
            self._retract(victim)
            if len(mb.running) == 0:
                return False


def _num_tokens(reqs: Sequence[Req]) -> int:
    """Tokens of requests' prompts and outputs."""
    return sum(req.prompt_len + len(req.output_ids) for req in reqs)
