"""`Harness`: a scheduler with a worker that models KV memory."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest

from engine.constraints import ConstraintSpec
from engine.protocol.adapters import AdapterRef
from engine.protocol.messages import FinishedReq
from engine.protocol.pooling import Pooling
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.sequence import KeyLimits
from engine.protocol.step import GenerationBatchResult
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.speculative.config import SpeculativeConfig
from engine.speculative.step_filler import StepFiller
from tests.support.drafters import RightUntilError
from tests.support.fake_worker import (
    FakeWorker,
    allowed_tokens,
    next_token,
    reference,
    reference_embedding,
)
from tests.support.requests import add_request
from tests.support.scheduler_configs import scheduler_config

VOCAB = 50


class Harness:
    """Scheduler, fake worker, and a record of what every reader got."""

    def __init__(self, config: SchedulerConfig | None = None, **overrides: Any) -> None:
        """`overrides` are arguments of `scheduler_config`; with a `config` there are none."""
        values: dict[str, Any] = dict(
            num_kv_tokens=256,
            max_model_len=96,
            vocab_size=VOCAB,
            page_size=4,
            max_running_requests=8,
            chunked_prefill_size=16,
            max_prefill_tokens=64,
            enable_kv_events=True,
        )
        values.update(overrides)
        self.config = config or scheduler_config(**values)
        self.scheduler = Scheduler(self.config)
        self.worker = FakeWorker(
            self.config.num_kv_tokens + self.config.engine.page_size,
            self.config.max_rows,
            self.config.max_model_len,
            VOCAB,
            _filler(self.config),
            self.config.windows,
        )
        self.now = 0.0
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.finished: dict[tuple[str, int], FinishedReq] = {}
        self.cached: dict[tuple[str, int], int] = {}
        self.expected: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        """Finish reason of each request if nothing disturbs it."""
        self.aborted: set[tuple[str, int]] = set()
        self.embeddings: dict[tuple[str, int], bytes] = {}
        self.expected_embeddings: dict[tuple[str, int], bytes] = {}

    def embed(
        self,
        rid: int,
        prompt: list[int],
        pooling: Pooling = "last",
        *,
        reply_to: str = "c",
        priority: int = 0,
        salt: str = "",
        adapter: AdapterRef | None = None,
        is_flex: bool = False,
    ) -> None:
        """Queue a request for an embedding."""
        self.expected_embeddings[(reply_to, rid)] = reference_embedding(prompt, pooling)
        self.expected[(reply_to, rid)] = []
        self.reasons[(reply_to, rid)] = "stop"
        self.scheduler.add(
            add_request(
                rid=rid,
                reply_to=reply_to,
                input_ids=np.asarray(prompt, np.int32),
                params=SamplingParams(),
                priority=priority,
                namespace=salt if adapter is None else adapter.namespace(salt),
                adapter=adapter,
                pooling=pooling,
                is_flex=is_flex,
            ),
            self.now,
        )

    def add(
        self,
        rid: int,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        reply_to: str = "c",
        stop: list[int] | None = None,
        priority: int = 0,
        salt: str = "",
        resume: int = 0,
        choices: list[list[int]] | None = None,
        ignore_eos: bool = False,
        key: KeyLimits | None = None,
        adapter: AdapterRef | None = None,
        is_flex: bool = False,
        **params: Any,
    ) -> None:
        """Queue a request; `choices` constrain it."""
        limit = min(max_tokens, self.config.max_model_len - len(prompt))
        eos = () if ignore_eos else self.config.resolved.model.eos_token_ids
        stop_ids = frozenset(stop or ()) | frozenset(eos)
        out = reference(prompt, limit, VOCAB, stop_ids, choices, eos)
        resume = min(resume, len(out) - 1)
        self.expected[(reply_to, rid)] = out[resume:]
        whole = choices is not None and not allowed_tokens(out, choices, eos)
        stopped = out[-1] in stop_ids or whole
        self.reasons[(reply_to, rid)] = "stop" if stopped else "length"
        self.scheduler.add(
            add_request(
                rid=rid,
                reply_to=reply_to,
                input_ids=np.asarray(prompt, np.int32),
                params=SamplingParams(
                    max_tokens=max_tokens,
                    stop_token_ids=stop or [],
                    ignore_eos=ignore_eos,
                    seed=0,
                    constraint=None
                    if choices is None
                    else ConstraintSpec("token_choice", {"choices": choices}),
                    **params,
                ),
                priority=priority,
                namespace=salt if adapter is None else adapter.namespace(salt),
                key=key,
                adapter=adapter,
                is_flex=is_flex,
                output_ids=np.asarray(out[:resume], np.int32) if resume else None,
            ),
            self.now,
        )

    def launch(self) -> bool:
        self.now += 0.001
        batch = self.scheduler.next_batch(self.now)
        if batch is not None:
            self.worker.launch(batch)
            in_flight = (s for m in self.scheduler.micro_batches for s in m.in_flight)
            step = next(s for s in in_flight if s.step == batch.step)
            constrained = any(r.constraint is not None for r in step.sampled)
            assert batch.delayed_sample == constrained
        self.send_masks()
        return batch is not None

    def process(self) -> None:
        self.scheduler.process_result(self.worker.run())
        self.send_masks()
        self.collect()

    def send_masks(self) -> None:
        for masks in self.scheduler.take_masks():
            self.worker.sample(masks)

    def collect(self) -> None:
        for reply_to, out in self.scheduler.take_outputs():
            for rid, cached, _ in out.started:
                self.cached[(reply_to, rid)] = cached
            counts = [1] * len(out.rids) if out.counts is None else out.counts
            rids = [r for r, count in zip(out.rids, counts, strict=True) for _ in range(count)]
            for rid, token in zip(rids, out.token_ids, strict=True):
                key = (reply_to, rid)
                assert key not in self.finished, "token after the end"
                assert key not in self.aborted, "token after abort"
                self.tokens[key].append(token)
            for end in out.finished:
                key = (reply_to, end.rid)
                assert key not in self.finished, "ended twice"
                self.finished[key] = end
            for rid, embedding in (out.embeddings or {}).items():
                assert (reply_to, rid) not in self.aborted, "embedding after abort"
                assert self.finished[(reply_to, rid)].reason == "stop"
                self.embeddings[(reply_to, rid)] = embedding

    def step(self) -> bool:
        """One turn of the loop: launch what may be launched, then process the oldest result."""
        while self.launch():
            if (
                self.scheduler.num_in_flight
                >= self.config.lookahead * self.config.num_micro_batches
            ):
                break
        if self.worker.pending:
            self.process()
            return True
        self.collect()
        return False

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.step() and self.scheduler.is_idle:
                break
            self.check()
        else:
            pytest.fail("no end in sight")
        self.check_done()

    def check(self) -> None:
        leak = self.scheduler.check_invariants()
        assert leak is None, leak
        if self.scheduler.kv.window_pages is not None:
            self.scheduler.kv.window_pages.check_pages()
        for req in self.scheduler.requests.by_key.values():
            share = self.scheduler.requests.rank_of(req).shares.get(req.sequence.key)
            assert share is not None
            assert share.num_running <= (share.limits.max_running or self.config.max_rows)
        for m in self.scheduler.micro_batches:
            assert all(r.is_flex for r in m.paused.reqs)
            for batch in (m.running, m.paused):
                count = sum(r.constraint is not None for r in batch.reqs)
                assert batch.num_constrained == count
                for is_flex in (False, True):
                    names = [r.key_name for r in batch.reqs if r.is_flex == is_flex]
                    assert batch.num_by_key[is_flex] == Counter(names)

    def check_done(self) -> None:
        assert self.scheduler.is_idle
        self.check()
        self.scheduler.kv.tree.check_integrity()
        assert self.scheduler.kv.tree.protected_size == 0
        assert not self.worker.masks and not self.scheduler.take_masks()
        for key, out in self.expected.items():
            if key in self.aborted:
                assert out[: len(self.tokens[key])] == self.tokens[key]
                continue
            end = self.finished[key]
            assert end.status != 500, end.message
            if end.reason != "error":
                assert self.tokens[key] == out, key
                assert end.reason == self.reasons[key], key
                assert self.embeddings.get(key) == self.expected_embeddings.get(key), key


def drafting(count: int = 4, length: Any = "fixed", **more: Any) -> Harness:
    """A harness whose rows have up to `count` drafts."""
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=count, draft_length=length)
    return Harness(speculative_config=config, **more)


def _filler(config: SchedulerConfig) -> StepFiller | None:
    """For a scheduler that speculates: three of four drafts are right."""
    if config.engine.speculative_config is None:
        return None
    drafter = RightUntilError(
        config.engine.speculative_config,
        lambda tokens: next_token(np.asarray(tokens, np.int32), VOCAB),
    )
    return StepFiller(drafter, config.max_rows + 1)


MODES = [
    dict(lookahead=1),
    dict(lookahead=2),
    dict(lookahead=1, num_micro_batches=2, pp_size=2, max_micro_batch_size=4),
    dict(lookahead=1, num_micro_batches=5, pp_size=4, max_micro_batch_size=2),
]


MODE_IDS = ["normal", "overlap", "pp2", "pp4"]


def prompt(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(n)]


def random_choices(rng: random.Random) -> list[list[int]]:
    """Choices of few different tokens, so that they share prefixes; one may begin another."""
    lens = [rng.randrange(1, 16) for _ in range(rng.randrange(1, 6))]
    choices = [[rng.randrange(20, 23) for _ in range(n)] for n in lens]
    if rng.random() < 0.5:
        choices.append(choices[0][: rng.randrange(1, len(choices[0]) + 1)])
    return choices


def cost(a: float, b: float, c: float, prefix: int, n: int) -> float:
    """Seconds of a chunk: every token reads the prefix and the tokens before it in the chunk."""
    return c + b * n + a * n * (2 * prefix + n)


class TimedWorker(FakeWorker):
    """Says how long each step took on a device with the given coefficients."""

    def __init__(self, *args: Any, coefficients: tuple[float, float, float]) -> None:
        super().__init__(*args)
        self.coefficients = coefficients
        self.chunks: list[list[tuple[int, int]]] = []
        """By step without decode rows: (tokens, prefix) of each row."""

    def run(self) -> GenerationBatchResult:
        batch = self.pending[0]
        prompts = self.open | {item.row for item in batch.new_rows}
        lines = zip(
            batch.req_pool_indices.tolist(),
            batch.query_lens.tolist(),
            batch.seq_lens.tolist(),
            strict=True,
        )
        rows = [(n, end - n) for row, n, end in lines if row in prompts]
        if len(rows) == len(batch.req_pool_indices):
            self.chunks.append(rows)
        a, b, c = self.coefficients
        result = super().run()
        result.device_s = c + sum(cost(a, b, 0.0, prefix, n) for n, prefix in rows)
        return result
