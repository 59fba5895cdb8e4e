"""One API request under way: its sequences, and how their deltas become a reply or a stream."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

from deploy.http.engine_client import EngineClient, GenerateRequest, ModelInfo
from deploy.http.metrics import RequestTracker
from deploy.http.openai.backlog import Backlog, StreamInterval
from deploy.http.openai.event_stream import EventStream
from deploy.http.openai.output_limits import OutputLimits
from deploy.http.openai.request import GenerationRequest
from deploy.http.openai.sse import DONE, ChunkEncoder, encode_json
from engine.errors import RequestError
from engine.protocol.tokenizer_messages import LogprobEntry, TextDelta

MAX_TOKEN_CHARS = 256
"""No vocabulary known has longer tokens (Llama 3 and GPT-4 reach 128 spaces)."""


class Fields(NamedTuple):
    """Names of the request fields that a complaint about length points to."""

    prompt: str
    max_tokens: str


def check_model(name: str, info: ModelInfo) -> None:
    """Raise `RequestError` (404) unless `name` is the served model's or left out."""
    if name and name != info.name:
        raise RequestError(
            f"The model `{name[:200]}` does not exist; this server has `{info.name}`.",
            "model",
            status=404,
            code="model_not_found",
        )


def check_text_length(text: str, info: ModelInfo, field: str) -> None:
    """Refuse text that is too long even if all its tokens are the longest, before tokenizing it."""
    if len(text) > info.max_model_len * MAX_TOKEN_CHARS:
        raise RequestError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, your "
            f"{field} has {len(text)} characters. Please reduce the length of the {field}.",
            field,
            code="context_length_exceeded",
        )


def truncate_prompt(
    ids: list[int], request: GenerationRequest, asked: int | None, info: ModelInfo
) -> list[int]:
    """The part of a prompt that `truncate_prompt_tokens` keeps.

    -1 keeps what leaves room for `asked` tokens of output, or for one. Raises `RequestError` if
    more is to be kept than that.
    """
    keep = request.truncate_prompt_tokens
    if keep is None:
        return ids
    room = info.max_model_len - (asked or 1)
    if keep > room:
        raise RequestError(
            f"truncate_prompt_tokens ({keep}) must not exceed {room}: the context length "
            f"({info.max_model_len}) less the output.",
            "truncate_prompt_tokens",
        )
    if keep < 0:
        keep = max(room, 1)
    return ids[:keep] if request.truncation_side == "right" else ids[-keep:]


def resolve_max_tokens(
    num_prompt: int, asked: int | None, default: int | None, info: ModelInfo, fields: Fields
) -> int:
    """Output limit of a sequence in tokens: `asked`; if that is None, `default` or what fits,
    whichever is less (`default` None: what fits).

    Raises `RequestError` with code context_length_exceeded if the prompt leaves no room, or not
    enough for `asked` tokens.
    """
    room = info.max_model_len - num_prompt
    if room < 1:
        raise RequestError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, your "
            f"{fields.prompt} has {num_prompt} tokens, which leaves no room for a completion. "
            f"Please reduce the length of the {fields.prompt}.",
            fields.prompt,
            code="context_length_exceeded",
        )
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise RequestError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, you "
            f"requested {num_prompt + asked} tokens ({num_prompt} in the {fields.prompt}, {asked} "
            f"in the completion). Please reduce the length of the {fields.prompt} or "
            f"{fields.max_tokens}.",
            fields.max_tokens,
            code="context_length_exceeded",
        )
    return asked


@dataclass
class Output:
    """What one choice has given so far; texts and tokens are kept only for replies in one piece."""

    num_output: int = 0
    num_cached: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)
    prompt_logprobs: list[LogprobEntry | None] | None = None


@dataclass
class Plan:
    """The sequences of a request: `n` copies of each prompt, prompt by prompt."""

    request_id: str
    created: int
    model: str
    n: int
    sequences: list[GenerateRequest]


class Prompt(NamedTuple):
    """Token ids of one prompt, and how many tokens each of its completions may have."""

    ids: list[int]
    max_tokens: int


def make_plan(
    request: GenerationRequest,
    request_id: str,
    info: ModelInfo,
    prompts: Iterable[Prompt],
    logprobs: int | None,
    prompt_logprobs: int | None,
    limits: OutputLimits | None = None,
) -> Plan:
    """Checked sampling parameters for every sequence. Raises `RequestError`.

    Each sequence gets a seed, a random one if the request has none, so that it can be resumed
    elsewhere with the same noise.
    """
    sequences: list[GenerateRequest] = []
    max_tokens = None
    for prompt in prompts:
        params = request.sampling_params(
            prompt.max_tokens, logprobs, prompt_logprobs, info.sampling_defaults
        )
        if limits is not None:
            params.bad_words_ids = limits.bad_words_ids
            params.constraint = limits.constraint
        if prompt.max_tokens != max_tokens:
            max_tokens = prompt.max_tokens
            params.verify(info.vocab_size)
        sequences += [
            GenerateRequest(
                request_id,
                prompt.ids,
                copy,
                request.priority,
                request.cache_salt,
                request.return_token_ids,
            )
            for copy in params.copies(lambda: secrets.randbits(63))
        ]
    if len(sequences) > 1:
        for index, sequence in enumerate(sequences):
            sequence.request_id = f"{request_id}-{index}"
    return Plan(request_id, int(time.time()), info.name, request.n, sequences)


class Generation(ABC):
    """Runs a plan. Subclasses know the reply and the chunks of their endpoint."""

    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]
    payload: ClassVar[str]

    def __init__(
        self, client: EngineClient, request: GenerationRequest, plan: Plan, tracker: RequestTracker
    ) -> None:
        self.stream = request.stream
        self._client = client
        self._request = request
        self._plan = plan
        self._tracker = tracker
        self._outputs = [Output() for _ in plan.sequences]
        self._drop_output = False
        """True if only the prompt was asked for; the one token that comes with it is dropped."""

    async def result(self) -> bytes:
        """Body of the reply in one piece. Raises what `EngineClient.generate` raises."""

        def read(index: int, deltas: list[TextDelta]) -> None:
            output = self._outputs[index]
            for delta in deltas:
                self._note(index, delta)
                output.texts.append(delta.text)
                output.token_ids += delta.token_ids
                if delta.logprobs:
                    output.logprobs += delta.logprobs

        await self._run(read)
        self._check_ended()
        plan = self._plan
        body = {
            "id": plan.request_id,
            "object": self.object_name,
            "created": plan.created,
            "model": plan.model,
            "service_tier": None,
            "system_fingerprint": None,
            "kv_transfer_params": None,
            "choices": [self._choice(i, output) for i, output in enumerate(self._outputs)],
            "usage": self._usage(),
        }
        return encode_json(body | self._reply_extra())

    async def send_events(self, stream: EventStream) -> bytes:
        """Send all server-sent events but the last, which is returned. Raises what
        `EngineClient.generate` and `stream` raise. Nothing is sent before the first text, so that
        an early error can still become an HTTP status."""
        plan = self._plan
        options = self._request.stream_options
        encoder = ChunkEncoder(
            plan.request_id,
            self.chunk_object_name,
            plan.created,
            plan.model,
            self.payload,
            len(plan.sequences),
            options.usage_at_end,
        )
        has_opened = False
        backlogs = [Backlog() for _ in plan.sequences]
        intervals: list[StreamInterval] | None = None
        if self._request.stream_interval > 1:
            intervals = [StreamInterval(self._request.stream_interval) for _ in plan.sequences]

        def read(index: int, deltas: list[TextDelta]) -> None:
            nonlocal has_opened
            for delta in deltas:
                self._note(index, delta)
            if intervals is not None:
                deltas = intervals[index].due(deltas)
            if stream.catching_up is not None:
                backlogs[index].add(deltas)
            elif events := self._chunks(encoder, index, deltas):
                if not has_opened:
                    has_opened = True
                    events = self._opening(encoder) + events
                stream.write(events, catch_up)

        def catch_up() -> bytes:
            waiting = enumerate(backlogs)
            return b"".join([self._chunks(encoder, i, backlog.take()) for i, backlog in waiting])

        await self._run(read)
        self._check_ended()
        if options.usage_at_end:
            return encoder.usage_chunk(self._usage()) + DONE
        return DONE

    async def _run(self, read: Callable[[int, list[TextDelta]], None]) -> None:
        """Run all sequences; `read` gets their numbers and deltas. The first error ends all."""
        generates = [
            self._client.generate(sequence, partial(read, index))
            for index, sequence in enumerate(self._plan.sequences)
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

    def _note(self, index: int, delta: TextDelta) -> None:
        """Note the progress that a delta reports. Raises `RequestError` if it reports an error."""
        output = self._outputs[index]
        if self._drop_output:
            _drop_output(delta)
        self._tracker.delta(index, delta)
        output.num_output, output.num_cached = delta.num_output, delta.num_cached
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

    def _chunks(self, encoder: ChunkEncoder, index: int, deltas: list[TextDelta]) -> bytes:
        if len(deltas) == 1:  # as long as the path keeps up
            return self._chunk(encoder, index, deltas[0])
        return b"".join([self._chunk(encoder, index, delta) for delta in deltas])

    def _check_ended(self) -> None:
        """Raise `RequestError` if a sequence has no finish reason."""
        if any(output.finish_reason is None for output in self._outputs):
            raise RequestError("The engine ended a sequence early.", status=500)

    def _usage(self) -> dict[str, Any]:
        """The usage. Prompt tokens count once per prompt, cached ones as its first copy found
        them."""
        plan = self._plan
        firsts = range(0, len(plan.sequences), plan.n)
        return usage(
            sum(len(plan.sequences[i].prompt_ids) for i in firsts),
            sum(output.num_output for output in self._outputs),
            sum(self._outputs[i].num_cached for i in firsts),
        )

    def _chunk_usage(self, index: int, num_output: int | None = None) -> dict[str, Any] | None:
        """Usage of one choice so far, if asked for in every chunk (as vLLM counts it).

        `num_output`: output tokens so far; None for all that have come.
        """
        if not self._request.stream_options.usage_always:
            return None
        output = self._outputs[index]
        num_prompt = len(self._plan.sequences[index].prompt_ids)
        return usage(
            num_prompt, output.num_output if num_output is None else num_output, output.num_cached
        )

    def _reply_extra(self) -> dict[str, Any]:
        """Further fields of the reply."""
        return {}

    def _opening(self, encoder: ChunkEncoder) -> bytes:
        """Chunks to send before those of the first delta, which has come."""
        return b""

    @abstractmethod
    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        """`choices[index]` of a reply in one piece."""

    @abstractmethod
    def _chunk(self, encoder: ChunkEncoder, index: int, delta: TextDelta) -> bytes:
        """Events for one delta; empty if the client needs none."""


def _drop_output(delta: TextDelta) -> None:
    delta.text, delta.token_ids, delta.num_output, delta.logprobs = "", [], 0, None
    if delta.finish_reason == "stop":
        delta.finish_reason, delta.stop_reason = "length", None


def usage(num_prompt: int, num_output: int, num_cached: int) -> dict[str, Any]:
    """The `usage` object of a reply; the arguments are numbers of tokens."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
