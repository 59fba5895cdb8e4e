"""Pipeline micro-batches: equally full, none starved, several chunks of a prompt in flight."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest

from engine.protocol.messages import AbortRequest
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.step import ForwardMode, ModelWorkerBatch
from tests.support.requests import add_request
from tests.support.scheduler_harness import VOCAB, Harness, prompt

PIPELINES = [(2, 0), (2, 2), (4, 0), (4, 2)]
"""(pp_size, pp_async_depth)"""


class Launch(NamedTuple):
    """A step as the workers see it, and the sizes of the micro-batches at that time."""

    batch: ModelWorkerBatch
    counts: list[int]


class Pipeline(Harness):
    """A full pipeline: every micro-batch has a step in flight before the oldest result is taken."""

    def __init__(self, pp_size: int, depth: int, **overrides: Any) -> None:
        self.num = pp_size + depth
        values: dict[str, Any] = dict(
            num_kv_tokens=65536,
            max_model_len=1024,
            max_running_requests=64,
            max_micro_batch_size=-(-64 // self.num),
            chunked_prefill_size=64,
            num_micro_batches=self.num,
            pp_size=pp_size,
        )
        super().__init__(**{**values, **overrides})
        self.launches: list[Launch] = []
        self.results = 0
        self.gaps: dict[tuple[str, int], int] = defaultdict(int)
        """By request: most results between two of its tokens."""
        self._last: dict[tuple[str, int], int] = {}

    @property
    def counts(self) -> list[int]:
        return [len(m.running) for m in self.scheduler.micro_batches]

    @property
    def spread(self) -> int:
        return max(self.counts) - min(self.counts)

    def launch(self) -> bool:
        launched = super().launch()
        if launched:
            self.launches.append(Launch(self.worker.pending[-1], self.counts))
        return launched

    def process(self) -> None:
        before = {key: len(out) for key, out in self.tokens.items()}
        super().process()
        self.results += 1
        for key, out in self.tokens.items():
            if len(out) > before.get(key, 0):
                if key in self._last:
                    self.gaps[key] = max(self.gaps[key], self.results - self._last[key])
                self._last[key] = self.results

    def start(self, rid: int, num_prompt: int, num_output: int = 1000) -> None:
        """Queue a request whose tokens nobody compares (to know them takes longest)."""
        ids = random.Random(rid).choices(range(VOCAB), k=num_prompt)
        params = SamplingParams(max_tokens=num_output, ignore_eos=True, seed=0)
        self.scheduler.add(
            add_request(rid=rid, reply_to="c", input_ids=np.asarray(ids, np.int32), params=params),
            self.now,
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
        self.check()

    def finish(self) -> None:
        while not self.scheduler.is_idle:
            self.step()
        self.check_done()


@pytest.fixture(params=PIPELINES, ids=lambda p: f"pp{p[0]}+{p[1]}")
def pipeline(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=[True, False], ids=["mixed", "unmixed"])
def mixed(request: pytest.FixtureRequest) -> bool:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("num", [1, 6, 13, 40])
def test_a_burst_is_spread(pipeline: tuple[int, int], mixed: bool, num: int) -> None:
    h = Pipeline(*pipeline, enable_mixed_chunk=mixed)
    rng = random.Random(num)
    lengths = [rng.randrange(1, 150) for _ in range(num)]
    for i, length in enumerate(lengths):
        h.start(i, length)
    # A step computes 64 tokens less its decode rows, cut at a page; one more round moves the last.
    h.steps(sum(lengths) // 32 + num + 2 * h.num)
    assert sum(h.counts) == num
    assert h.spread <= 1, h.counts


def test_a_burst_of_short_prompts_fills_all_stages_at_once(pipeline: tuple[int, int]) -> None:
    """One step could hold them all, and the other micro-batches would have nothing to do."""
    h = Pipeline(*pipeline)
    for i in range(2 * h.num):
        h.add(i, [i, 1, 2], 20)
    while h.launch():
        pass
    assert [len(launch.batch.req_pool_indices) for launch in h.launches] == [2] * h.num
    h.finish()


def test_prompts_of_equal_chunks_do_not_gather(pipeline: tuple[int, int]) -> None:
    """As many chunks as micro-batches: every prompt ends in the same one's step."""
    h = Pipeline(*pipeline, enable_prefix_cache=False)
    for i in range(12):
        h.start(i, 64 * h.num)
        h.steps(2 * h.num)
    assert sum(h.counts) == 12
    assert h.spread <= 1, h.counts


def test_steady_arrivals_stay_balanced(pipeline: tuple[int, int], mixed: bool) -> None:
    h = Pipeline(*pipeline, enable_mixed_chunk=mixed)
    rng = random.Random(7)
    for i in range(150):
        h.start(i, rng.choice([5, 20, 90, 200]), rng.randrange(1, 120))
        h.steps(rng.randrange(1, 8))
    decode_only = [
        max(counts) - min(counts)
        for batch, counts in h.launches[20 * h.num :]
        if batch.forward_mode is ForwardMode.DECODE
    ]
    assert len(decode_only) > 200
    # Nothing moves between ends and arrivals; without moves at arrival it is 9 and more.
    assert sum(spread <= 2 for spread in decode_only) >= 0.88 * len(decode_only)
    assert sum(spread <= 3 for spread in decode_only) >= 0.97 * len(decode_only)


def test_no_micro_batch_exceeds_its_limit(pipeline: tuple[int, int], mixed: bool) -> None:
    most = 3 * sum(pipeline)
    h = Pipeline(
        *pipeline,
        enable_mixed_chunk=mixed,
        max_micro_batch_size=3,
        max_running_requests=most,
    )
    rng = random.Random(8)
    for i in range(40):
        h.add(i, prompt(rng, rng.choice([3, 64, 128, 200])), rng.randrange(1, 40))
    h.finish()
    # A chunk of one token that ends its prompt counts as a decode, too.
    decodes = [int((b.query_lens == 1).sum()) - len(b.new_rows) for b, _ in h.launches]
    assert max(decodes) == 3


def test_a_long_tail_is_spread_out(pipeline: tuple[int, int]) -> None:
    """All but one micro-batch empty: their turns would be lost."""
    h = Pipeline(*pipeline)
    for i in range(8 * h.num):
        h.start(i, 2)
    h.steps(4 * h.num)
    keep = {id(r) for r in h.scheduler.micro_batches[1].running.reqs}
    for key, req in list(h.scheduler.requests.by_key.items()):
        if id(req) not in keep:
            h.aborted.add(key)
            h.scheduler.abort(AbortRequest(rid=key[1], reply_to=key[0]))
    assert sorted(h.counts)[-2:] == [0, 8]
    h.steps(2 * h.num)
    assert h.spread <= 1, h.counts


def test_arrivals_go_to_the_emptiest(pipeline: tuple[int, int], mixed: bool) -> None:
    h = Pipeline(*pipeline, enable_mixed_chunk=mixed)
    for i in range(6 * h.num):
        h.start(i, 6)
    h.steps(6 * h.num)
    # One micro-batch loses a little: not enough to move requests that are decoding.
    for req in h.scheduler.micro_batches[1].running.reqs[:2]:
        h.aborted.add((req.reply_to, req.rid))
        h.scheduler.abort(AbortRequest(rid=req.rid, reply_to=req.reply_to))
    h.steps(2 * h.num)
    assert h.counts[1] == 4 and h.spread == 2
    for i in range(2):
        h.start(1000 + i, 6)
        h.steps(2 * h.num + 1)
    assert h.counts == [6] * h.num


def test_a_prompt_never_waits_for_an_emptier_micro_batch(pipeline: tuple[int, int]) -> None:
    h = Pipeline(*pipeline)
    for i in range(4 * h.num - 1):
        h.start(i, 6)
    h.steps(6 * h.num)
    h.step()
    full = next(i for i in range(h.num) if h.counts[i] == 4)
    while h.launches[-1].batch.micro_batch != (full - 1) % h.num:
        h.step()
    h.start(99, 6)
    h.step()
    assert h.launches[-1].batch.micro_batch == full
    assert h.launches[-1].batch.num_long == 1
    h.steps(2 * h.num)
    assert h.counts == [4] * h.num


def test_retracted_requests_come_back_balanced(pipeline: tuple[int, int], mixed: bool) -> None:
    h = Pipeline(*pipeline, enable_mixed_chunk=mixed)
    for i in range(5 * h.num):
        h.start(i, 10)
    h.steps(8 * h.num)
    for req in list(h.scheduler.micro_batches[0].running.reqs):
        h.scheduler.requests.retract(req)
    h.steps(8 * h.num)
    assert sum(h.counts) == 5 * h.num
    assert h.spread <= 1, h.counts


@pytest.mark.parametrize("num", [1, 2, 5, 9])
def test_every_running_request_gets_a_token_in_every_round(
    pipeline: tuple[int, int], num: int
) -> None:
    h = Pipeline(*pipeline)
    for i in range(num):
        h.add(i, [i, i + 1, 3], 60, ignore_eos=True)
    h.finish()
    # The round in which requests were spread apart: one more turn at most.
    assert max(h.gaps.values()) <= 2 * h.num - 1
    h = Pipeline(*pipeline)
    for i in range(num):
        h.add(i, [i, i + 1, 3], 60, ignore_eos=True)
    h.steps(4 * h.num)
    h.gaps.clear()
    h.steps(30)
    assert max(h.gaps.values()) <= h.num


def test_decode_goes_on_beside_a_stream_of_prompts(pipeline: tuple[int, int]) -> None:
    """Mixed: prompts that never stop coming delay nobody's token by more than one move."""
    h = Pipeline(*pipeline)
    for i in range(h.num + 1):
        h.start(i, 4)
    for i in range(100, 120):
        h.start(i, 300, 2)
        h.steps(3)
    assert max(gap for (_, rid), gap in h.gaps.items() if rid < 100) <= 2 * h.num - 1


def test_chunks_of_one_prompt_fill_the_pipeline(pipeline: tuple[int, int]) -> None:
    h = Pipeline(*pipeline)
    chunks = 3 * h.num
    h.add(1, prompt(random.Random(12), 32 * chunks), 4)
    in_flight = []
    while h.scheduler.requests.interactive.chunked is not None or not in_flight:
        while h.launch():
            pass
        in_flight.append(h.scheduler.num_in_flight)
        h.process()
    assert set(in_flight) == {h.num}
    h.finish()
