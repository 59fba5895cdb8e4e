"""The shapes of replies, for the OpenAPI document. Replies are encoded without them."""

# No `from __future__ import annotations`: pydantic reads the annotations.
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, RootModel

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TopLogprob(_Shape):
    """A token that might have come."""

    token: str
    logprob: float
    bytes: list[int]


class TextLogprob(TopLogprob):
    """The token that came, and the likeliest."""

    top_logprobs: list[TopLogprob]


class OutputText(_Shape):
    """The text of a message. `logprobs` only if they were asked for."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TextLogprob] | None = None


class ReasoningContent(_Shape):
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(_Shape):
    """An answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]
    status: ItemStatus


class OutputReasoning(_Shape):
    """Reasoning. There is no summary."""

    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningContent]
    status: ItemStatus


class OutputCall(_Shape):
    """A call; `arguments` are JSON."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    status: ItemStatus


class OutputCustomCall(_Shape):
    """A call of a tool that takes a text."""

    id: str
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str
    status: ItemStatus


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class InputDetails(_Shape):
    """Tokens of the prompt that the prefix cache had. Writing to it isn't counted."""

    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputDetails(_Shape):
    """Tokens of reasoning."""

    reasoning_tokens: int


class ResponseUsage(_Shape):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(_Shape):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseError(_Shape):
    """Why a response failed."""

    code: str
    message: str


class Response(_Shape):
    """Reply of `POST /v1/responses`. Many fields repeat the request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled", "auto"]
    usage: ResponseUsage | None
    user: str | None
    ignored_tools: list[str] | None = None
    """Kinds of tools that the model didn't see; only where there are any."""


class DeletedResponse(_Shape):
    """Reply of `DELETE /v1/responses/{response_id}`."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(_Shape):
    """Reply of `GET /v1/responses/{response_id}/input_items`."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(_Shape):
    """Reply of `POST /v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class _Event(_Shape):
    sequence_number: int


class Lifecycle(_Event):
    """The response begins or has ended."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: Response


class ItemEvent(_Event):
    """An item begins or has ended."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _OfItem(_Event):
    item_id: str
    output_index: int


class PartEvent(_OfItem):
    """The content of an item begins or has ended."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: OutputText | ReasoningContent


class TextDeltaEvent(_OfItem):
    """More of a text."""

    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[TextLogprob]


class TextDoneEvent(_OfItem):
    """A whole text."""

    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[TextLogprob]


class ReasoningDeltaEvent(_OfItem):
    """More reasoning."""

    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ReasoningDoneEvent(_OfItem):
    """The whole reasoning."""

    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class ArgumentsDeltaEvent(_OfItem):
    """More of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(_OfItem):
    """A call's arguments."""

    type: Literal["response.function_call_arguments.done"]
    arguments: str


class InputDeltaEvent(_OfItem):
    """More of the input of a tool that takes a text."""

    type: Literal["response.custom_tool_call_input.delta"]
    delta: str


class InputDoneEvent(_OfItem):
    """The input of a tool that takes a text."""

    type: Literal["response.custom_tool_call_input.done"]
    input: str


class ErrorEvent(_Event):
    """What went wrong; `response.failed` follows."""

    type: Literal["error"]
    code: str
    message: str
    param: str | None


class ResponseEvent(
    RootModel[
        Lifecycle
        | ItemEvent
        | PartEvent
        | TextDeltaEvent
        | TextDoneEvent
        | ReasoningDeltaEvent
        | ReasoningDoneEvent
        | ArgumentsDeltaEvent
        | InputDeltaEvent
        | InputDoneEvent
        | ArgumentsDoneEvent
        | ErrorEvent
    ]
):
    """`data` of an event of `POST /v1/responses`."""
