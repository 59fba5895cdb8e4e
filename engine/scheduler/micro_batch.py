"""`MicroBatch`: the unit that the loop cycles through, and the steps it has in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.protocol.step import ForcedRun, Int64Array, IntArray
from engine.scheduler.req import Req
from engine.scheduler.running_batch import RunningBatch


class ConstrainedLine(NamedTuple):
    """A sampled line whose request has a `Constraint`."""

    line: int
    """Index into the step's sampled rows."""
    req: Req
    number: int
    """Steps of the request whose sampling was delayed before this one."""
    num_drafts: int
    """The most drafts that the line may have."""
    forced: ForcedRun | None
    """Where they come from."""


@dataclass(slots=True)
class LaunchedStep:
    """A step that was sent and whose result is still to come. What it keeps never changes."""

    step: int
    reqs: Sequence[Req]
    """All rows."""
    sampled: Sequence[Req]
    """Rows that sample, in the order of the result's tokens."""
    rids: Int64Array
    readers: IntArray
    """`Req.reader_no` of the sampled rows."""
    num_landed: int = 0
    """The step completes the prompts of the first `num_landed` requests of `sampled`."""
    chunk: tuple[int, int] | None = None
    """(tokens, prefix length) of the only row, if it is a prompt chunk."""
    embedded: Sequence[Req] = ()
    """Rows whose embedding the step completes, in the order of the result's embeddings."""
    constrained: Sequence[ConstrainedLine] = ()
    """Sampled rows that need a mask; the step's sampling is delayed if there are any."""
    drafts: tuple[IntArray, IntArray] | None = None
    """Rows of `ReqToTokenPool` and planned drafts of the decodes, which are the last of
    `sampled`; None if the step checks no drafts."""
    forced: Mapping[int, ForcedRun] = field(default_factory=dict)
    """By number among the decodes: drafts of a constrained row."""


@dataclass(slots=True)
class MicroBatch:
    """Normal and overlap modes have one; pipeline parallelism has several in flight at once."""

    index: int
    running: RunningBatch = field(default_factory=RunningBatch)
    in_flight: deque[LaunchedStep] = field(default_factory=deque)
