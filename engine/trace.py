"""What every step did and when: rings of spans in each role, merged into a Chrome trace.

Always on: a ring entry costs about a microsecond a step, and the last `CAPACITY` steps are there
when somebody asks (`GET /debug/trace`, `engine.LLM.trace`). https://ui.perfetto.dev opens the
result. Format: Chrome's "Trace Event Format". Rings hold sizes and times, never tokens.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Generic, NamedTuple, TypeVar

S = TypeVar("S")

CAPACITY = 8192


class StepSpan(NamedTuple):
    """A step as the scheduler's loop saw it; monotonic seconds of its process."""

    step: int
    micro_batch: int
    mode: str
    num_rows: int
    num_tokens: int
    composed_at: float
    """When composing began."""
    sent_at: float
    received_at: float
    processed_at: float


class StageSpan(NamedTuple):
    """A step on one pipeline stage, while its device computed; monotonic seconds of its process."""

    step: int
    micro_batch: int
    started_at: float
    ended_at: float


class TraceRing(Generic[S]):
    """The last spans of one role. One thread adds, any thread takes snapshots."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._spans: deque[S] = deque(maxlen=capacity)

    def add(self, span: S) -> None:
        """Append a span; the oldest falls out of a full ring."""
        self._spans.append(span)

    def snapshot(self, last: int | None = None) -> list[S]:
        """The `last` spans (None: all), oldest first."""
        spans = list(self._spans.copy())  # copying a deque holds the GIL: no torn view
        return spans if last is None else spans[max(0, len(spans) - last) :]


class RoleTrace(NamedTuple):
    """The spans of one role, and what turns its clock into wall-clock time."""

    role: str
    """"scheduler" or "stage <pp_rank>.<tp_rank>"."""
    wall_offset_s: float
    """Wall-clock time minus monotonic time in that process."""
    steps: list[StepSpan]
    stages: list[StageSpan]


def scheduler_trace(ring: TraceRing[StepSpan], last: int | None = None) -> RoleTrace:
    """The `last` steps of this process's scheduler."""
    return RoleTrace("scheduler", _wall_offset(), ring.snapshot(last), [])


def stage_trace(
    pp_rank: int, tp_rank: int, ring: TraceRing[StageSpan], last: int | None = None
) -> RoleTrace:
    """The `last` steps of this process's worker."""
    return RoleTrace(f"stage {pp_rank}.{tp_rank}", _wall_offset(), [], ring.snapshot(last))


def _wall_offset() -> float:
    return time.time() - time.monotonic()


def chrome_trace(engines: dict[str, list[RoleTrace]]) -> dict[str, Any]:
    """Trace events of several engines, by engine name.

    Per engine one process, with a track for the scheduler's work, one for each micro-batch (from
    sent to received: where the step was), and one for each stage. Flow arrows follow a step from
    the scheduler through the stages and back. Times are microseconds since the first event, which
    was at the wall-clock time `otherData.first_event_us`.
    """
    events: list[dict[str, Any]] = []
    for pid, (name, roles) in enumerate(sorted(engines.items()), start=1):
        events.append(_meta("process_name", pid, 0, name))
        for role in roles:
            if role.role == "scheduler":
                _add_scheduler(events, pid, role)
            else:
                _add_stage(events, pid, role)
    times = [e["ts"] for e in events if "ts" in e]
    start = min(times, default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - start, 3)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"first_event_us": start},
    }


_SCHEDULER_TRACK = 1
_MICRO_BATCH_TRACK = 10
_STAGE_TRACK = 100


def _add_scheduler(events: list[dict[str, Any]], pid: int, role: RoleTrace) -> None:
    events.append(_meta("thread_name", pid, _SCHEDULER_TRACK, "scheduler"))
    for micro_batch in sorted({s.micro_batch for s in role.steps}):
        track = _MICRO_BATCH_TRACK + micro_batch
        events.append(_meta("thread_name", pid, track, f"micro-batch {micro_batch}: in flight"))
    offset = role.wall_offset_s
    for s in role.steps:
        args = {
            "step": s.step,
            "micro_batch": s.micro_batch,
            "rows": s.num_rows,
            "tokens": s.num_tokens,
        }
        compose = _span("schedule", pid, _SCHEDULER_TRACK, s.composed_at, s.sent_at, offset, args)
        process = _span(
            "process", pid, _SCHEDULER_TRACK, s.received_at, s.processed_at, offset, args
        )
        flight = _span(
            f"{s.mode} {s.step}",
            pid,
            _MICRO_BATCH_TRACK + s.micro_batch,
            s.sent_at,
            s.received_at,
            offset,
            args,
        )
        events += [compose, process, flight]
        events.append(_flow("s", pid, _SCHEDULER_TRACK, s.step, s.composed_at, offset))
        events.append(_flow("f", pid, _SCHEDULER_TRACK, s.step, s.processed_at, offset))


def _add_stage(events: list[dict[str, Any]], pid: int, role: RoleTrace) -> None:
    pp_rank, tp_rank = (int(part) for part in role.role.removeprefix("stage ").split("."))
    track = _STAGE_TRACK + 64 * pp_rank + tp_rank
    events.append(_meta("thread_name", pid, track, f"stage {pp_rank}, tensor rank {tp_rank}"))
    for s in role.stages:
        args = {"step": s.step, "micro_batch": s.micro_batch}
        name = f"step {s.step}"
        events.append(_span(name, pid, track, s.started_at, s.ended_at, role.wall_offset_s, args))
        events.append(_flow("t", pid, track, s.step, s.started_at, role.wall_offset_s))


def _span(
    name: str, pid: int, tid: int, start: float, end: float, offset: float, args: dict[str, int]
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": "step",
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": (start + offset) * 1e6,
        "dur": round(max(end - start, 0.0) * 1e6, 3),
        "args": args,
    }


def _flow(phase: str, pid: int, tid: int, step: int, at: float, offset: float) -> dict[str, Any]:
    event = {
        "name": "step",
        "cat": "flow",
        "ph": phase,
        "id": pid * 10**9 + step,
        "pid": pid,
        "tid": tid,
        "ts": (at + offset) * 1e6,
    }
    if phase == "f":
        event["bp"] = "e"
    return event


def _meta(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
