"""No configuration can deadlock: what isn't refused at start runs every request to its end."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig, load_config
from engine.errors import ConfigError
from engine.protocol.sequence import KeyLimits
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.worker.auto_config import make_worker_config
from tests.support.scheduler_harness import VOCAB, Harness, TimedWorker, prompt


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, Any]:
    """Mostly acceptable: each size is drawn on the narrow side of what the others allow."""
    page = draw(st.sampled_from([1, 2, 3, 5, 16, 48, 64]))
    longest = draw(st.integers(2, 150) | st.none())
    least_kv = max(2 * page, -(-(longest or 0) // page) * page)
    chunk = draw(st.sampled_from([-1, 0]) | st.integers(page, 100))
    pp = draw(st.integers(1, 4))
    overlap = draw(st.booleans())
    policy = draw(st.sampled_from(["lpm", "fcfs", "priority"]))
    return dict(
        device="cpu",
        page_size=page,
        max_model_len=longest,
        max_total_tokens=draw(st.none() | st.integers(least_kv, least_kv + 150)),
        max_running_requests=draw(st.integers(1, 12)),
        chunked_prefill_size=chunk,
        max_prefill_tokens=draw(st.integers(1, 300)),
        enable_dynamic_chunking=chunk >= 2 * page and draw(st.booleans()),
        enable_mixed_chunk=draw(st.booleans()),
        enable_overlap=overlap,
        enable_prefix_cache=draw(st.booleans()),
        enable_priority_preemption=policy == "priority" and draw(st.booleans()),
        schedule_policy=policy,
        schedule_conservativeness=draw(st.sampled_from([0.001, 0.3, 1.0, 10.0])),
        pp_size=pp,
        pp_async_depth=draw(st.integers(0, 3)) if pp > 1 and overlap else 0,
        pp_max_micro_batch_size=draw(st.integers(1, 4) | st.none()) if pp > 1 else None,
    )


def accepted(values: dict[str, Any]) -> SchedulerConfig | None:
    """What the scheduler is started with, or None if the configuration is refused."""
    try:
        resolved = load_config(EngineConfig, values).resolve()
        worker = make_worker_config(resolved)
        return SchedulerConfig(resolved, worker.num_kv_tokens)
    except ConfigError as error:
        assert str(error).strip()
        return None


def start(config: SchedulerConfig) -> Harness:
    """The configuration over a fake worker that says how long its steps took."""
    resolved = config.resolved
    model = dataclasses.replace(resolved.model, vocab_size=VOCAB, eos_token_ids=())
    config = dataclasses.replace(config, resolved=dataclasses.replace(resolved, model=model))
    h = Harness(config)
    h.worker = TimedWorker(
        config.num_kv_tokens + config.engine.page_size,
        config.max_rows,
        config.max_model_len,
        VOCAB,
        coefficients=(1e-6, 1e-5, 1e-3),
    )
    return h


PREEMPTED_WHILE_IDLE = dict(
    device="cpu",
    page_size=1,
    max_total_tokens=15,
    max_model_len=15,
    max_running_requests=1,
    chunked_prefill_size=5,
    enable_mixed_chunk=False,
    enable_overlap=False,
    enable_priority_preemption=True,
    schedule_policy="priority",
    schedule_conservativeness=0.001,
)
"""No step was in flight when a waiting request pushed out the last running one."""


@example(values=PREEMPTED_WHILE_IDLE, seed=28848, num_keys=1)
@given(values=sizes(), seed=st.integers(0, 2**16), num_keys=st.integers(1, 3))
@settings(
    max_examples=120,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_every_accepted_configuration_makes_progress(
    values: dict[str, Any], seed: int, num_keys: int
) -> None:
    config = accepted(values)
    if config is None:
        return
    h = start(config)
    rng = random.Random(seed)
    longest = min(config.max_model_len, 200)
    budget = 50
    for i in range(12):
        # The first two take all that a request may have.
        length = longest - 1 if i == 0 else 1 if i == 1 else rng.randrange(1, longest)
        outputs = longest if i < 2 else rng.randrange(1, 40)
        key = KeyLimits(str(i % num_keys))
        h.add(i, prompt(rng, length), outputs, priority=rng.randrange(3), key=key)
        # At worst a page of prompt a step, and each request sent back a few times.
        budget += 5 * (length // config.engine.page_size + 1 + outputs)
        if i == 6:
            for _ in range(5):
                h.step()
    for _ in range(budget):
        launched = h.step()
        if h.scheduler.is_idle:
            break
        # Waiting for a result is progress; waiting for nothing is a deadlock.
        assert launched, "nothing runs and nothing is launched"
    assert h.scheduler.is_idle, "too many steps"
    h.check_done()
    assert all(end.reason != "error" for end in h.finished.values())


@pytest.mark.parametrize("dynamic", [False, True])
def test_decode_rows_never_starve_a_prompt(dynamic: bool) -> None:
    """More decode rows than a step has tokens: every step still computes a page of the prompt."""
    h = Harness(
        num_kv_tokens=16384,
        max_model_len=512,
        max_running_requests=32,
        chunked_prefill_size=16,
        enable_dynamic_chunking=dynamic,
    )
    if h.scheduler.sizer is not None:
        for i in range(32):  # four times as long behind a long prefix
            h.scheduler.sizer.observe(16, 16 * i, 1e-3 * (1 + i))
        assert h.scheduler.sizer.size_behind(64) == 4
    for i in range(20):
        h.add(i, [i, 1], 200)
    for _ in range(30):
        h.step()
    h.add(99, prompt(random.Random(1), 100), 1)
    for _ in range(100 // 4 + 1):
        h.step()
    assert list(h.finished) == [("c", 99)]


def test_an_urgent_request_gets_in_when_all_micro_batches_are_full() -> None:
    """Rows beyond what micro-batches hold would look free, and nobody would have to go."""
    config = accepted(
        dict(
            device="cpu",
            pp_size=2,
            pp_max_micro_batch_size=1,
            max_running_requests=8,
            schedule_policy="priority",
            enable_priority_preemption=True,
            max_model_len=100,
            max_total_tokens=4096,
        )
    )
    assert config is not None and config.max_rows == 2
    h = start(config)
    for i in range(4):
        h.add(i, [i, 1, 2], 80, priority=5, ignore_eos=True)
    for _ in range(8):
        h.step()
    h.add(9, [9, 9], 5, priority=0, ignore_eos=True)
    for _ in range(30):
        h.step()
    assert list(h.finished) == [("c", 9)]
    h.run()
