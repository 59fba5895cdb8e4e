"""What is to be generated, whatever API it was asked by. Each API translates its bodies to this."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from deploy.http.access.api_key import ApiKey
from deploy.http.generation.tool_use import ToolUse
from deploy.http.metrics import RequestTracker
from engine.constraints import ConstraintSpec
from engine.errors import RequestError
from engine.protocol.pooling import Pooling
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.tokenizer_messages import Conversation


class Incoming(NamedTuple):
    """A request as it came. `id`: its `X-Request-Id`; `key`: None if the server has no keys;
    `is_flex`: it ranks below all others, whatever its body says.

    The answer is a function of the body, `seed` (0 to 2^128 - 1) and `created` (Unix time): the
    first gives what is drawn at random, the other what is said about when.
    """

    id: str
    tracker: RequestTracker
    seed: int
    created: int
    key: ApiKey | None = None
    is_flex: bool = False


class FieldNames(NamedTuple):
    """Names of the fields of a body that a complaint about length points to."""

    prompt: str
    max_tokens: str


class Truncation(NamedTuple):
    """How much of a prompt is kept. `num_tokens` -1: what leaves room for the output."""

    num_tokens: int
    side: Literal["left", "right"]


class Delivery(NamedTuple):
    """How the reply is sent. `interval`: tokens of a stream's event at least, but for the first and
    the last one. `token_ids`: it has the tokens' ids, each as soon as there is one."""

    stream: bool
    interval: int = 1
    token_ids: bool = False


class NamedConstraint(NamedTuple):
    """What the output must be, and the field of the body that says so."""

    spec: ConstraintSpec
    field: str


def named_error(error: RequestError, field: str) -> RequestError:
    """The error of a constraint with the name that the client gave it."""
    param = field if error.status == 400 else None
    message = error.message[:1].upper() + error.message[1:]
    if not message.endswith((".", "...")):
        message += "."
    return RequestError(message, param, status=error.status, code=error.code)


class Wanted(NamedTuple):
    """What is wanted of one prompt. `params` are those of its first copy, but for `max_tokens`;
    `max_tokens` is the number asked for, None for the default."""

    params: SamplingParams
    max_tokens: int | None
    constraint: NamedConstraint | None
    id: str
    """The prompt's own id."""


@dataclass(kw_only=True)
class GenerationRequest:
    """What all requests have. `params`, `max_tokens` and `constraint`: see `Wanted`."""

    id: str
    """The reply's id."""
    model: str = ""
    """As the client names it: the served model, one of its adapters, or "" for the former."""
    given_id: str = ""
    """The id that the client knows the request by, where it has another one."""
    params: SamplingParams
    max_tokens: int | None
    default_max_tokens: int | None = None
    """Where none were asked for, or what fits if that is less; None for all that fits."""
    names: FieldNames
    delivery: Delivery
    truncation: Truncation | None = None
    bad_words: list[str] = field(default_factory=list)
    constraint: NamedConstraint | None = None
    priority: int = 0
    cache_salt: str = ""
    is_flex: bool = False
    """It ranks below all others, and runs in what they leave."""
    prediction: str = ""
    """The output that the client expects."""
    pooling: Pooling | None = None
    """Set: the prompts are embedded. `max_tokens` is 0 then, and `params` don't matter."""


@dataclass(kw_only=True)
class ChatRequest(GenerationRequest):
    """A conversation to go on with."""

    chat: Conversation
    tools: ToolUse
    answer_schema: dict[str, Any] | None = None
    """JSON schema of an answer instead of calls, for requests with tools."""
    compact_above: int | None = None
    """Tokens above which `context_management` asks to sum up the conversation."""


@dataclass(kw_only=True)
class TextRequest(GenerationRequest):
    """Prompts to continue, texts or token ids."""

    prompts: list[str] | list[list[int]]
    add_special_tokens: bool = True
    each: list[Wanted] = field(default_factory=list)
    """By prompt, all with the same `n`; empty if they all want the same."""
