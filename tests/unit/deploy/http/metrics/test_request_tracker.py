"""What a request leaves in the metrics."""

from __future__ import annotations

import asyncio
import re
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.http.metrics import RequestTracker, ServerMetrics, Work
from deploy.http.metrics.vllm_names import HISTOGRAMS
from deploy.http.served_models import ServedModels
from engine.protocol.tokenizer_messages import TextDelta
from tests.support.fake_client import FakeEngineClient
from tests.support.metrics_text import values


def rendered(metrics: ServerMetrics) -> dict[str, float]:
    client = FakeEngineClient()
    return values(asyncio.run(metrics.render(lambda: ServedModels(client))).decode())


def delta(num_output: int, finish: str | None = None, queue_s: float = 0.0) -> TextDelta:
    return TextDelta(1, "t", [], num_output, finish, None, 5, 2, queue_s=queue_s)


SEQUENCES = st.lists(
    st.lists(st.integers(1, 4), min_size=1, max_size=6), min_size=1, max_size=4
)  # by sequence: the tokens of each delta


@settings(max_examples=50)
@given(st.lists(SEQUENCES, max_size=4), st.sampled_from(["", "alice"]))
def test_counters_add_up(requests: list[list[list[int]]], key: str) -> None:
    metrics = ServerMetrics("vllm")
    for sequences in requests:
        tracker = RequestTracker(metrics.unnamed, "completions", key)
        tracker.work = Work(time.perf_counter(), len(sequences), [9])
        for index, steps in enumerate(sequences):
            so_far = 0
            for step in steps[:-1]:
                so_far += step
                tracker.delta(index, delta(so_far, queue_s=0.5))
            tracker.delta(index, delta(so_far + steps[-1], "length", queue_s=0.5))
        assert tracker.num_output == sum(map(sum, sequences))
        tracker.end(200)
    found = rendered(metrics)
    num = sum(map(len, requests))
    generated = sum(sum(map(sum, sequences)) for sequences in requests)
    assert found["manta_generation_tokens_total"] == generated
    assert found["manta_prompt_tokens_total"] == 5 * num
    assert found["manta_cached_prompt_tokens_total"] == 2 * num
    assert found["manta_queue_time_seconds_count"] == num
    assert found["manta_queue_time_seconds_sum"] == 0.5 * num
    for name in ("prefill_time_seconds", "decode_time_seconds", "inference_time_seconds"):
        assert found[f"manta_{name}_count"] == num
    assert found["manta_sequence_prompt_tokens_sum"] == 5 * num
    assert found["manta_sequence_generation_tokens_sum"] == generated
    assert found["manta_time_per_output_token_seconds_count"] == sum(
        len(steps) > 1 for sequences in requests for steps in sequences
    )
    assert found["manta_params_n_sum"] == num
    assert found["manta_params_n_count"] == len(requests)
    assert found["manta_params_max_tokens_sum"] == 9 * len(requests)
    longest = sum(max(map(sum, sequences)) for sequences in requests)
    assert found["manta_max_generation_tokens_sum"] == longest
    assert found['vllm:request_success_total{finished_reason="length"}'] == num
    if key and requests:
        assert found['manta_key_requests_total{key="alice",status="200"}'] == len(requests)
        assert found['manta_key_prompt_tokens_total{key="alice"}'] == 5 * num
        assert found['manta_key_generation_tokens_total{key="alice"}'] == generated
    else:
        assert not any(name.startswith("manta_key_") for name in found)
    for ours, theirs in HISTOGRAMS.items():
        if ours not in ("manta_time_to_first_token_seconds", "manta_inter_token_latency_seconds"):
            continue
        for end in ("_count", "_sum"):
            endpoint = f'{ours}{end}{{endpoint="completions"}}'
            assert found[theirs + end] == found.get(endpoint, 0.0)


def test_what_no_engine_admitted_has_no_queue_time() -> None:
    metrics = ServerMetrics()
    tracker = RequestTracker(metrics.unnamed, "completions")
    tracker.work = Work(time.perf_counter(), 1, [9])
    tracker.delta(0, delta(0, "abort"))
    tracker.end(200)
    failed = RequestTracker(metrics.unnamed, "completions")
    failed.delta(0, delta(3))
    failed.delta(0, delta(3, "error"))
    failed.end(500)
    found = rendered(metrics)
    assert found["manta_queue_time_seconds_count"] == 1
    assert found["manta_decode_time_seconds_count"] == 0
    assert found['manta_sequences_total{endpoint="completions",finish_reason="abort"}'] == 1
    assert found["manta_params_n_count"] == 1


def test_refusals_are_counted_by_reason() -> None:
    metrics = ServerMetrics()
    metrics.refused("unauthorized")
    metrics.refused("unauthorized")
    found = rendered(metrics)
    reasons = {
        match[1]: value
        for name, value in found.items()
        if (match := re.fullmatch(r'manta_refusals_total\{reason="(\w+)"\}', name))
    }
    assert reasons == {"unauthorized": 2, "forbidden": 0, "misdirected": 0}


def test_an_embedding_has_a_queue_time_alone() -> None:
    metrics = ServerMetrics()
    tracker = RequestTracker(metrics.unnamed, "embeddings")
    tracker.work = Work(time.perf_counter(), 1, [])
    done = delta(0, "stop", queue_s=0.5)
    done.embedding = b"\0\0\0\0"
    tracker.delta(0, done)
    tracker.end(200)
    found = rendered(metrics)
    assert found["manta_queue_time_seconds_sum"] == 0.5
    assert found["manta_prefill_time_seconds_count"] == 0
    assert found["manta_params_n_count"] == 0
