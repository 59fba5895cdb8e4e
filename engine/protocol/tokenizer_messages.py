"""Messages between an ingress and its tokenizer. `call` pairs a reply with its request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.protocol.sampling_params import SamplingParams

PROMPT_TAIL = 64
"""Tokens of a prompt that its output's text may depend on: the last one that is text does. Behind
that one stand a few special tokens, as of the template."""
TopLogprob = tuple[str, int, float, list[int]]
"""Token, id, log-probability, bytes."""


class LogprobEntry(msgspec.Struct, array_like=True):
    """Log-probability of one token, with the likeliest alternatives, best first.

    `bytes` is the token's share of the text in UTF-8 (maybe a part of a character; `token` then
    has U+FFFD). `text_offset`: characters of output (or of prompt) before the token. `rank`: 1 for
    the likeliest token, 0 if it isn't known (output tokens).
    """

    token: str
    token_id: int
    logprob: float
    bytes: list[int]
    top: list[TopLogprob]
    text_offset: int
    rank: int = 0


class TextDelta(msgspec.Struct, array_like=True, gc=False):
    """What is new of one request since its last delta; the last one has a `finish_reason`.

    `finish_reason`: "stop", "length", "abort" or "error". `stop_reason`: the stop string or the
    token id that ended it (None if something else did). `num_output` counts all output tokens so
    far, resumed ones included. `error*` are set for errors. `embedding`: of a request for one,
    float32 [hidden], little-endian. `queue_s`: on the first delta, seconds in the scheduler's queue
    until the first admission.
    """

    rid: int
    text: str
    token_ids: list[int]
    num_output: int
    finish_reason: str | None
    stop_reason: str | int | None
    num_prompt: int
    num_cached: int
    logprobs: list[LogprobEntry] | None = None
    prompt_logprobs: list[LogprobEntry | None] | None = None
    error: str = ""
    error_status: int = 0
    error_param: str | None = None
    embedding: bytes | None = None
    queue_s: float = 0.0
    num_predicted: int = 0
    """On the last delta: output tokens that were drafts from the client's prediction."""


class EncodeRequest(msgspec.Struct, array_like=True):
    """Texts to token ids; answered by `EncodeReply`."""

    call: int
    reply_to: str
    texts: list[str]
    add_special_tokens: bool = True


class Conversation(msgspec.Struct, array_like=True):
    """What a chat template makes a prompt of."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    """Behind the messages comes what begins a reply."""
    continue_final_message: bool = False
    """The last message isn't over; excludes `add_generation_prompt`."""
    chat_template: str | None = None
    """The name of one of the model's templates, or a template; None: the model's own."""
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] | None = None
    """Further variables; those that the template doesn't read have no effect."""
    now: int | None = None
    """Unix time that templates are told, which may write a date; None: the machine's."""


class ChatRequest(msgspec.Struct, array_like=True):
    """A conversation to token ids (one list in `EncodeReply.ids`)."""

    call: int
    reply_to: str
    chat: Conversation


class EncodeReply(msgspec.Struct, array_like=True):
    """Token ids, or, if `error` isn't empty, why there are none; `param` is the field at fault."""

    call: int
    ids: list[list[int]]
    error: str = ""
    param: str | None = None


class DecodeRequest(msgspec.Struct, array_like=True):
    """Token ids to text, special tokens included. `each`: to the text of each token."""

    call: int
    reply_to: str
    token_ids: list[int]
    each: bool = False


class DecodeReply(msgspec.Struct, array_like=True):
    """The text of a `DecodeRequest`; with `each` the `texts`."""

    call: int
    text: str
    texts: list[str] = []


class Register(msgspec.Struct, array_like=True):
    """A request is about to start: detokenize `rid` for `reply_to`; answered by `Registered`."""

    call: int
    reply_to: str
    rid: int
    params: SamplingParams
    num_prompt: int
    """Tokens of the prompt."""
    prompt_ids: list[int]
    """The last `PROMPT_TAIL` of them; all if their log-probabilities are wanted."""
    output_ids: list[int]
    """They were emitted elsewhere."""
    return_token_ids: bool = False
    """Each token makes a delta, even if it brings no text yet."""
    known_ids: list[int] = []
    """They were emitted elsewhere behind `output_ids`, and their reader lacks their deltas."""


class Registered(msgspec.Struct, array_like=True):
    """The tokenizer knows the request, or, if `error` isn't empty, says why it can't."""

    call: int
    error: str = ""
    deltas: list[TextDelta] = []
    """Of `known_ids`."""


class Unregister(msgspec.Struct, array_like=True):
    """Nobody reads `rid` any more."""

    rid: int


class TextOutputs(msgspec.Struct, array_like=True):
    """What a step gave to one ingress: one message for any number of streams."""

    deltas: list[TextDelta]
