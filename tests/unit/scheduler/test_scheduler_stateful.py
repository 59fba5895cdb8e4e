"""Stateful property test of the scheduler: any order of events, shrunk to the shortest failure."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.protocol.messages import AbortRequest
from engine.protocol.pooling import Pooling
from engine.protocol.sequence import KeyLimits
from engine.speculative.config import SpeculativeConfig
from tests.support.scheduler_harness import MODES, VOCAB, Harness

CHOICES = [
    None,
    None,
    [[20]],
    [[20, 21, 22, 20, 21, 22, 20, 21], [20, 21, 22, 21], [20, 21], [22] * 12],
]
KEYS = [None, KeyLimits("a", max_running=2), KeyLimits("b"), KeyLimits("c", max_running=1)]
STEMS = [[(7 * i + k * k) % VOCAB for k in range(50)] for i in range(3)]


class SchedulerMachine(RuleBasedStateMachine):
    """add, abort, retract, evict, flush, launch, process, time passing; checked after each."""

    @initialize(
        mode=st.sampled_from(MODES),
        page=st.sampled_from([1, 4, 16]),
        policy=st.sampled_from(["lpm", "fcfs", "priority"]),
        chunk=st.sampled_from([-1, 16, 32]),
        mixed=st.booleans(),
        cache=st.booleans(),
        kv=st.sampled_from([96, 128, 320]),
        careful=st.sampled_from([0.01, 1.0]),
        eos=st.sampled_from([(), (7,)]),
        drafts=st.sampled_from([0, 0, 1, 4, 7]),
        adaptive=st.booleans(),
        longest=st.sampled_from([96, 93]),
        window=st.sampled_from([None, 1, 5, 16]),
    )
    def start(
        self,
        mode: dict[str, Any],
        page: int,
        policy: str,
        chunk: int,
        mixed: bool,
        cache: bool,
        kv: int,
        careful: float,
        eos: tuple[int, ...],
        drafts: int,
        adaptive: bool,
        longest: int,
        window: int | None,
    ) -> None:
        speculative = None
        if drafts:
            kv = max(kv, 112)  # a request and the drafts of two steps
            speculative = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=drafts,
                draft_length="adaptive" if adaptive else "fixed",
            )
        self.h = Harness(
            **mode,
            speculative_config=speculative,
            max_model_len=longest,
            page_size=page,
            num_kv_tokens=kv,
            schedule_policy=policy,
            enable_priority_preemption=policy == "priority",
            chunked_prefill_size=chunk,
            max_prefill_tokens=96,
            enable_mixed_chunk=mixed,
            enable_prefix_cache=cache,
            schedule_conservativeness=careful,
            eos_token_ids=eos,
            window=window,
            swa_full_tokens_ratio=0.01,  # as few places as there may be
        )
        self.next_rid = 0

    @precondition(lambda self: len(self.h.scheduler.requests.by_key) < 20)
    @rule(
        stem=st.sampled_from(STEMS),
        shared=st.integers(1, 50),
        tail=st.integers(0, 20),
        max_tokens=st.integers(1, 40),
        stop=st.none() | st.integers(0, VOCAB - 1),
        priority=st.integers(0, 2),
        resume=st.sampled_from([0, 0, 1, 5]),
        reply_to=st.sampled_from(["a", "b"]),
        choices=st.sampled_from(CHOICES),
        key=st.sampled_from(KEYS),
        is_flex=st.booleans(),
    )
    def add(
        self,
        stem: list[int],
        shared: int,
        tail: int,
        max_tokens: int,
        stop: int | None,
        priority: int,
        resume: int,
        reply_to: str,
        choices: list[list[int]] | None,
        key: KeyLimits | None,
        is_flex: bool,
    ) -> None:
        prompt = stem[:shared] + [(self.next_rid + 3 * k) % VOCAB for k in range(tail)]
        self.h.add(
            self.next_rid,
            prompt,
            max_tokens,
            reply_to=reply_to,
            choices=choices,
            stop=None if stop is None else [stop],
            priority=priority,
            resume=resume,
            key=key,
            is_flex=is_flex,
        )
        self.next_rid += 1

    @precondition(lambda self: len(self.h.scheduler.requests.by_key) < 20)
    @rule(
        stem=st.sampled_from(STEMS),
        shared=st.integers(1, 50),
        tail=st.integers(0, 46),
        pooling=st.sampled_from(["last", "mean"]),
        priority=st.integers(0, 2),
        reply_to=st.sampled_from(["a", "b"]),
        is_flex=st.booleans(),
    )
    def embed(
        self,
        stem: list[int],
        shared: int,
        tail: int,
        pooling: Pooling,
        priority: int,
        reply_to: str,
        is_flex: bool,
    ) -> None:
        prompt = stem[:shared] + [(self.next_rid + 3 * k) % VOCAB for k in range(tail)]
        self.h.embed(
            self.next_rid,
            prompt,
            pooling,
            reply_to=reply_to,
            priority=priority,
            is_flex=is_flex,
        )
        self.next_rid += 1

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        alive = [k for k, r in self.h.scheduler.requests.by_key.items() if not r.finished]
        if alive:
            key = data.draw(st.sampled_from(alive))
            self.h.aborted.add(key)
            self.h.scheduler.abort(AbortRequest(rid=key[1], reply_to=key[0]))

    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        running = [r for m in self.h.scheduler.micro_batches for r in m.reqs]
        running += self.h.scheduler.requests.chunked
        if running:
            self.h.scheduler.requests.retract(data.draw(st.sampled_from(running)))

    @rule(tokens=st.integers(1, 64))
    def evict(self, tokens: int) -> None:
        self.h.scheduler.kv.tree.evict(tokens)

    @rule()
    def flush(self) -> None:
        idle = self.h.scheduler.is_idle
        assert self.h.scheduler.flush_cache() == idle

    @rule(count=st.integers(1, 4))
    def launch(self, count: int) -> None:
        for _ in range(count):
            if not self.h.launch():
                break

    @rule(count=st.integers(1, 4))
    def process(self, count: int) -> None:
        for _ in range(count):
            if self.h.worker.pending:
                self.h.process()

    @rule(turns=st.integers(1, 10))
    def run_on(self, turns: int) -> None:
        for _ in range(turns):
            self.h.step()

    @invariant()
    def nothing_leaks(self) -> None:
        if hasattr(self, "h"):
            self.h.check()

    def teardown(self) -> None:
        if hasattr(self, "h"):
            self.h.run()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
