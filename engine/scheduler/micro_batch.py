"""`MicroBatch`: the unit that the loop cycles through, and the steps it has in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.protocol.step import ForcedRun, Int64Array, IntArray
from engine.scheduler.flex_pace import StepWork
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
    work: StepWork | None = None
    """What it computes, if there are flex requests."""
    began: float | None = None
    """When it became the first one in flight, if that was noted; seconds."""


@dataclass(slots=True)
class MicroBatch:
    """Normal and overlap modes have one; pipeline parallelism has several in flight at once."""

    index: int
    running: RunningBatch = field(default_factory=RunningBatch)
    paused: RunningBatch = field(default_factory=RunningBatch)
    """Flex requests that sit out the next step. They keep their rows and KV memory."""
    in_flight: deque[LaunchedStep] = field(default_factory=deque)

    @property
    def reqs(self) -> list[Req]:
        """All that decode, paused ones included."""
        return self.running.reqs + self.paused.reqs if len(self.paused) else self.running.reqs

    def remove(self, reqs: Sequence[Req]) -> None:
        """Take out requests that ended or are retracted; requests that aren't here are ignored."""
        self.running.remove(reqs)
        if len(self.paused):
            self.paused.remove(reqs)

    def sync_lens(self) -> None:
        """Write the launched lengths back to the requests."""
        self.running.sync_lens()
        self.paused.sync_lens()
