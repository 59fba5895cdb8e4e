"""`Generation`: a plan under way, whose deltas an API makes a reply or a stream of."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from deploy.http.engine_client import EngineClient
from deploy.http.errors import ErrorReply
from deploy.http.generation.backlog import Backlog, StreamInterval
from deploy.http.generation.event_numbers import EventNumbers
from deploy.http.generation.event_stream import EventStream
from deploy.http.generation.plan import Plan, until_aborted
from deploy.http.generation.reading import OutputState
from deploy.http.metrics import RequestTracker, Work
from deploy.http.parsers.parts import Part
from deploy.http.records.keeper import Keeper
from deploy.http.records.token_log import AnswerTokens
from engine.errors import RequestError
from engine.protocol.tokenizer_messages import LogprobEntry, TextDelta

if TYPE_CHECKING:  # needs OpenTelemetry's packages, which an install may lack
    from deploy.http.tracing.request_trace import RequestTrace

F = TypeVar("F")
"""The body of a request."""


@dataclass
class Output:
    """What one sequence has given so far. Texts, tokens, log-probabilities and parts are there
    only for replies in one piece, and of chats that are kept.

    `state`: the parts of the text, where it has others than the answer.
    """

    state: OutputState | None = None
    num_output: int = 0
    num_cached: int = 0
    num_predicted: int = 0
    """Output tokens that the request predicted."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    """Those that events were made of."""
    prompt_logprobs: list[LogprobEntry | None] | None = None
    is_dropped: bool = False
    """True if only the prompt was asked for; the one token that comes with it is dropped."""

    def add(self, delta: TextDelta) -> None:
        """Keep what the delta has."""
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs:
            self.logprobs += delta.logprobs


class Generation(ABC, Generic[F]):
    """Runs a plan. Subclasses know the reply and the events of their API."""

    def __init__(
        self, client: EngineClient, fields: F, plan: Plan, tracker: RequestTracker
    ) -> None:
        """`fields`: the body of the request, as the API has it."""
        self.stream = plan.request.delivery.stream
        self._request = fields
        self._client = client
        self._plan = plan
        self._tracker = tracker
        self.trace: RequestTrace | None = None
        """Set before the plan runs: notes how each sequence begins and ends."""
        self.keeper: Keeper | None = None
        """Set before the plan runs: keeps the request in the store, and the reply if `keeps_reply`.
        """
        self.numbers: EventNumbers | None = None
        """Set before the plan runs: numbers the events of a stream that can be read on."""
        self.is_line = False
        """Set before the plan runs: it answers a line of a batch. The reply is a function of the
        line then, so that it tells of no cached tokens."""
        self.tokens: AnswerTokens | None = None
        """Set before the plan runs: takes the tokens of a request that is kept."""
        self.known_ids: Sequence[Sequence[int]] = ()
        """Set before the plan runs: by sequence, the first tokens, if they are known."""
        reading = plan.reading
        self._outputs = [
            Output(None if reading is None else reading.read(partial(plan.new_id, index)))
            for index in range(len(plan.sequences))
        ]

    @property
    def id(self) -> str:
        """The reply's."""
        return self._plan.request.id

    @property
    def num_sequences(self) -> int:
        """Of the plan."""
        return len(self._plan.sequences)

    @property
    def adapter_digest(self) -> str:
        """That of the adapter that it runs with; "" without one."""
        adapter = self._plan.sequences[0].adapter
        return "" if adapter is None else adapter.digest

    @property
    def is_all_tokens(self) -> bool:
        """Whether the answer follows from its tokens, which vectors and log-probabilities don't."""
        return not any(
            sequence.pooling is not None
            or sequence.params.logprobs is not None
            or sequence.params.prompt_logprobs is not None
            for sequence in self._plan.sequences
        )

    @property
    def is_aborted(self) -> bool:
        """Whether somebody ended a sequence before its time."""
        return any(output.finish_reason == "abort" for output in self._outputs)

    @property
    def num_prompt(self) -> int:
        """Tokens of all prompts; copies of a prompt count once."""
        return sum(len(sequence.prompt_ids) for sequence in self._plan.sequences[:: self._plan.n])

    async def result(self) -> bytes:
        """Body of the reply in one piece. Raises what `EngineClient.generate` raises."""

        def read(index: int, deltas: list[TextDelta]) -> None:
            for delta in deltas:
                self._note(index, delta)
                self._read(index, delta)
                self._outputs[index].add(delta)

        await self._keep()
        await self._run(read)
        self._check_ended()
        return self._reply()

    async def send_events(self, stream: EventStream) -> bytes:
        """Send all server-sent events but the last, which is returned. Raises what
        `EngineClient.generate` and `stream` raise. Nothing is sent before the first text, so that
        an early error can still become an HTTP status."""
        await self._keep()
        plan = self._plan
        has_opened = False
        backlogs = [Backlog() for _ in plan.sequences]
        intervals: list[StreamInterval] | None = None
        if plan.request.delivery.interval > 1:
            intervals = [StreamInterval(plan.request.delivery.interval) for _ in plan.sequences]

        def read(index: int, deltas: list[TextDelta]) -> None:
            nonlocal has_opened
            for delta in deltas:
                self._note(index, delta)
            if intervals is not None:
                deltas = intervals[index].due(deltas)
            if stream.catching_up is not None:
                backlogs[index].add(deltas)
            elif events := numbered(index, deltas):
                stream.write(events, catch_up)

        def numbered(index: int, deltas: list[TextDelta]) -> bytes:
            nonlocal has_opened
            events = self._all_events(index, deltas)
            opening = b""
            if events and not has_opened:
                has_opened = True
                opening = self._opening()
            return self._numbered(0, opening) + self._numbered(index, events, len(deltas))

        def catch_up() -> bytes:
            waiting = enumerate(backlogs)
            return b"".join([numbered(i, backlog.take()) for i, backlog in waiting])

        await self._run(read)
        self._check_ended()
        await stream.flush()
        ending = self._ending() if has_opened else self._opening() + self._ending()
        ending = self._numbered(0, ending)
        if self.numbers is not None:
            self.numbers.check_end()
        return ending

    async def _run(self, read: Callable[[int, list[TextDelta]], None]) -> None:
        """Run all sequences; `read` gets their numbers and deltas. The first error ends all."""
        firsts = self._plan.sequences[:: self._plan.n]
        max_tokens = [first.params.max_tokens or 0 for first in firsts if first.pooling is None]
        self._tracker.work = Work(time.perf_counter(), self._plan.n, max_tokens)
        generates = [
            self._generate(index, partial(read, index)) for index in range(len(self._outputs))
        ]
        if len(generates) == 1:  # it needs no task besides the request's
            await generates[0]
            return
        runs = [asyncio.ensure_future(generate) for generate in generates]
        try:
            await asyncio.gather(*runs)
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)

    async def _generate(self, index: int, read: Callable[[list[TextDelta]], None]) -> None:
        """Run a sequence to its end, or until it is aborted."""
        sequence, output = self._plan.sequences[index], self._outputs[index]
        known_ids = self.known_ids[index] if self.known_ids else ()
        generate = self._client.generate(sequence, read, known_ids)
        if await until_aborted(self._plan.aborts[index], generate) and output.finish_reason is None:
            num_prompt, at = len(sequence.prompt_ids), output.num_output
            read([TextDelta(0, "", [], at, "abort", None, num_prompt, output.num_cached)])

    def _note(self, index: int, delta: TextDelta) -> None:
        """Note the progress that a delta reports. Raises `RequestError` if it reports an error."""
        output = self._outputs[index]
        if self.tokens is not None:
            self.tokens.add(index, delta.token_ids)
        if output.is_dropped:
            _drop_output(delta)
        self._tracker.delta(index, delta)
        if self.trace is not None and (not output.num_output or delta.finish_reason is not None):
            self.trace.delta(index, delta)
        output.num_output, output.num_cached = delta.num_output, delta.num_cached
        output.num_predicted = delta.num_predicted
        if delta.prompt_logprobs is not None:
            output.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            if delta.finish_reason == "error" or delta.error:
                raise RequestError(
                    delta.error or "The engine failed the request.",
                    delta.error_param,
                    status=delta.error_status or 500,
                )
            output.finish_reason = delta.finish_reason
            output.stop_reason = delta.stop_reason

    def _read(self, index: int, delta: TextDelta) -> None:
        """Take the delta's text apart, where there are parts."""
        state = self._outputs[index].state
        if state is not None:
            state.add(delta.text, delta.num_output, delta.finish_reason is not None)

    def _all_events(self, index: int, deltas: list[TextDelta]) -> bytes:
        """One by one, so that the events are the same however many deltas come at once."""
        found = []
        for delta in deltas:
            self._read(index, delta)
            found.append(self._events(index, delta))
        return b"".join(found) if len(found) > 1 else found[0] if found else b""

    def _numbered(self, index: int, events: bytes, num_deltas: int = 0) -> bytes:
        """The events as the reader is to get them; `num_deltas`: what they were made of."""
        if self.numbers is None or not events:
            return events
        return self.numbers.of_each(index, events)

    @property
    def is_queued(self) -> bool:
        """Whether the reply is given before the answer is made."""
        return False

    @property
    def keeps_reply(self) -> bool:
        """Whether the reply is kept, too. Then nothing runs before the request is."""
        return False

    async def _keep(self) -> None:
        """Have the request written down, if `keeps_reply`. Raises `RequestError` if it must be kept
        and can't be."""
        keeper = self.keeper
        if not self.keeps_reply or keeper is None:
            return
        if not await keeper.begin(self._first_response()):
            self.keeper = None
            self._note_kept(False)

    def _first_response(self) -> dict[str, Any] | None:
        """The response while it is made; None if there is none before its end."""
        return None

    def response_to_keep(self) -> dict[str, Any] | None:
        """The response as it is when it has ended, or its client has left; None if only the request
        is kept."""
        return None

    def begin_keeping(self) -> asyncio.Task[bool] | None:
        """Have the request written down, beside what is done until there is a first token, unless
        that was done."""
        if self.keeper is None or self.keeps_reply:
            return None
        return self.keeper.begin_beside(self._note_kept)

    def _note_kept(self, is_kept: bool) -> None:
        if not is_kept and self.numbers is not None:
            self.numbers.shown = False  # nobody can read on

    def _check_ended(self) -> None:
        """Raise `RequestError` if a sequence has no finish reason."""
        if any(output.finish_reason is None for output in self._outputs):
            raise RequestError("The engine ended a sequence early.", status=500)

    @property
    def _num_prompt(self) -> int:
        """Prompt tokens; those of a prompt with several copies count once."""
        sequences, n = self._plan.sequences, self._plan.n
        return sum(len(sequence.prompt_ids) for sequence in sequences[::n])

    @property
    def _num_output(self) -> int:
        """Output tokens of all sequences so far."""
        return sum(output.num_output for output in self._outputs)

    @property
    def _num_cached(self) -> int:
        """Prompt tokens that came from the prefix cache, as the first copy of each found them."""
        if self.is_line:
            return 0
        return sum(output.num_cached for output in self._outputs[:: self._plan.n])

    def error_event(self, failure: RequestError, error: ErrorReply) -> bytes:
        """The last events of a stream that has failed. `error`: the failure in the API's words."""
        return error.event

    @abstractmethod
    def _reply(self) -> bytes:
        """The reply in one piece."""

    @abstractmethod
    def _opening(self) -> bytes:
        """Events to send before those of the first delta, which has come."""

    @abstractmethod
    def _events(self, index: int, delta: TextDelta) -> bytes:
        """Events for one delta of a sequence; empty if the client needs none."""

    @abstractmethod
    def _ending(self) -> bytes:
        """The last events, when all sequences have ended."""


def _drop_output(delta: TextDelta) -> None:
    delta.text, delta.token_ids, delta.num_output, delta.logprobs = "", [], 0, None
    if delta.finish_reason == "stop":
        delta.finish_reason, delta.stop_reason = "length", None
