"""Rings of spans and the Chrome trace made of them."""

from __future__ import annotations

import json

import pytest

from engine.trace import (
    SPANS_PER_PIECE,
    StageSpan,
    StepSpan,
    TraceRing,
    chrome_trace,
    chrome_trace_json,
    pack,
    scheduler_trace,
    stage_trace,
    unpack,
)


def _step(i: int, micro_batch: int = 0) -> StepSpan:
    at = 100.0 + i
    return StepSpan(i, micro_batch, "decode", 4, 4, at, at + 0.1, at + 0.8, at + 0.9)


def test_ring_keeps_the_last_spans() -> None:
    ring: TraceRing[StepSpan] = TraceRing(capacity=3)
    for i in range(5):
        ring.add(_step(i))
    assert [s.step for s in ring.snapshot()] == [2, 3, 4]
    assert [s.step for s in ring.snapshot(2)] == [3, 4]
    assert [s.step for s in ring.snapshot(9)] == [2, 3, 4]


def test_chrome_trace_follows_a_step_through_the_stages() -> None:
    steps: TraceRing[StepSpan] = TraceRing()
    first: TraceRing[StageSpan] = TraceRing()
    second: TraceRing[StageSpan] = TraceRing()
    for i in range(2):
        steps.add(_step(i, micro_batch=i))
        first.add(StageSpan(i, i, 100.2 + i, 100.4 + i))
        second.add(StageSpan(i, i, 100.4 + i, 100.7 + i))
    roles = [scheduler_trace(steps), stage_trace(0, 0, first), stage_trace(1, 0, second)]
    events = chrome_trace({"b": roles, "a": roles[:1]})["traceEvents"]

    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["a", "b"]
    pid = next(p for p, name in names.items() if name == "b")
    own = [e for e in events if e["pid"] == pid]
    tracks = {e["tid"]: e["args"]["name"] for e in own if e["name"] == "thread_name"}
    assert set(tracks.values()) == {
        "scheduler",
        "micro-batch 0: in flight",
        "micro-batch 1: in flight",
        "stage 0, tensor rank 0",
        "stage 1, tensor rank 0",
    }
    spans = [e for e in own if e["ph"] == "X" and e["args"]["step"] == 1]
    by_track = {(tracks[e["tid"]], e["name"]): e for e in spans}
    assert len(by_track) == 5
    begin = by_track["scheduler", "schedule"]
    assert begin["args"] == {"step": 1, "micro_batch": 1, "rows": 4, "tokens": 4}
    # The same clock for all roles: everything in its order, in microseconds.
    stage = by_track["stage 1, tensor rank 0", "step 1"]
    assert abs(stage["ts"] - begin["ts"] - 0.4e6) < 1e3 and abs(stage["dur"] - 0.3e6) < 1
    # A float has a quarter of a microsecond of wall-clock time.
    assert abs(min(e["ts"] for e in events if "ts" in e)) < 1
    flow = [e["ph"] for e in own if e.get("cat") == "flow" and e["id"] == pid * 10**9 + 1]
    assert sorted(flow) == ["f", "s", "t", "t"]


def test_empty_trace() -> None:
    assert chrome_trace({})["traceEvents"] == []
    assert json.loads(b"".join(chrome_trace_json({}))) == chrome_trace({})


@pytest.mark.parametrize("count", [1, SPANS_PER_PIECE, 3 * SPANS_PER_PIECE + 1])
def test_json_in_pieces_is_the_same_trace(count: int) -> None:
    steps: TraceRing[StepSpan] = TraceRing()
    stages: TraceRing[StageSpan] = TraceRing()
    for i in range(count):
        steps.add(_step(i))
        stages.add(StageSpan(i, 0, 100.2 + i, 100.4 + i))
    roles = [scheduler_trace(steps), stage_trace(0, 0, stages)]
    assert [unpack(pack(role)) for role in roles] == roles
    pieces = list(chrome_trace_json({"a": roles, "b": roles[:1]}))
    assert json.loads(b"".join(pieces)) == chrome_trace({"a": roles, "b": roles[:1]})
    per_span = 5 * 200  # events of a step, and bytes of one
    assert max(map(len, pieces)) < SPANS_PER_PIECE * per_span
