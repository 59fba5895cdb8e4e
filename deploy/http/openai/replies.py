"""The shapes of replies, for the OpenAPI document. Replies are encoded without them."""

# No `from __future__ import annotations`: pydantic reads the annotations.
from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorBody(_Shape):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(_Shape):
    """Reply of every request that failed."""

    error: ErrorBody


class CachedTokens(_Shape):
    """Prompt tokens that came from the prefix cache."""

    cached_tokens: int


class CompletionTokens(_Shape):
    """What tokens of the output were: thoughts of the model, or predicted by the request."""

    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None
    """Predicted tokens that did not come."""


class Usage(_Shape):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens | None = None


class PromptLogprob(_Shape):
    """One token at one position of the prompt; `rank` 1 is the likeliest."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
FinishReason = Literal["stop", "length", "abort"]
ChatFinishReason = Literal["stop", "length", "abort", "tool_calls"]


class CompletionLogprobs(_Shape):
    """By position; the lists are equally long."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(_Shape):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    matched_stop: str | int | None
    """The same by SGLang's name."""
    token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


class _Reply(_Shape):
    id: str
    created: int
    model: str
    service_tier: Literal["flex"] | None
    system_fingerprint: None
    kv_transfer_params: None
    usage: Usage


class Completion(_Reply):
    """Reply of `POST /v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class _Chunk(_Shape):
    id: str
    created: int
    model: str
    usage: Usage | None = None


class CompletionDelta(_Shape):
    """What is new of one continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    matched_stop: str | int | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChunk(_Chunk):
    """`data` of an event of `POST /v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionDelta]


class TopLogprob(_Shape):
    """An alternative to a token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """One token of the reply."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Shape):
    """By token of the reply."""

    content: list[TokenLogprob]
    refusal: None


class CalledFunction(_Shape):
    """Which function is called; `arguments` are JSON as the model wrote it."""

    name: str
    arguments: str


class CalledTool(_Shape):
    """Which custom tool is called, and its input, a text."""

    name: str
    input: str


class FunctionCall(_Shape):
    """One call of a function."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class CustomCall(_Shape):
    """One call of a custom tool."""

    id: str
    type: Literal["custom"]
    custom: CalledTool


ToolCall = FunctionCall | CustomCall


class Message(_Shape):
    """The assistant's turn. `reasoning` and `reasoning_content` are the same."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: None
    audio: None
    function_call: None
    tool_calls: list[ToolCall] | None = None
    """Only where there are any."""
    reasoning: str | None
    reasoning_content: str | None


class ChatChoice(_Shape):
    """One reply."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None
    matched_stop: str | int | None
    """The same by SGLang's name."""
    token_ids: list[int] | None


class ChatCompletion(_Reply):
    """Reply of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    ignored_tools: list[str] | None = None
    """Kinds of tools that the model didn't see; only where there are any."""
    metadata: dict[str, str] | None = None
    """Only of completions that are stored."""


class _List(_Shape):
    """A page of a list; `last_id` is the `after` of the next one."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ChatCompletions(_List):
    """Reply of `GET /v1/chat/completions`."""

    data: list[ChatCompletion]


class ContentPart(_Shape):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class StoredMessage(_Shape):
    """A message that a completion was asked with; `content` is null if it came in parts."""

    id: str
    role: str
    content: str | None
    content_parts: list[ContentPart] | None
    name: str | None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class StoredMessages(_List):
    """Reply of `GET /v1/chat/completions/{record_id}/messages`."""

    data: list[StoredMessage]


class FunctionDelta(_Shape):
    """What is new of a called function."""

    name: str | None = None
    arguments: str


class CustomDelta(_Shape):
    """What is new of the input of a custom tool."""

    name: str | None = None
    input: str


class ToolCallDelta(_Shape):
    """What is new of a call; `id`, `type` and the name come once."""

    index: int
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: FunctionDelta | None = None
    custom: CustomDelta | None = None


class MessageDelta(_Shape):
    """What is new of the assistant's turn."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatDelta(_Shape):
    """What is new of one reply."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None
    matched_stop: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(_Chunk):
    """`data` of an event of `POST /v1/chat/completions`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatDelta]
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    ignored_tools: list[str] | None = None


class Model(_Shape):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    type: Literal["model"]
    """This and what follows is for Anthropic's clients."""
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int


class Models(_Shape):
    """Reply of `GET /v1/models`."""

    object: Literal["list"]
    data: list[Model]
    first_id: str
    """This and what follows is for Anthropic's clients: there are no further pages."""
    last_id: str
    has_more: Literal[False]


class Health(_Shape):
    """Whether requests can be served now."""

    status: Literal["ok", "unavailable"]
    detail: str | None = None
    models: dict[str, str] | None = None
    """Of several: "ok", or what is wrong."""


class Version(_Shape):
    """Manta's version."""

    version: str


class Embedding(_Shape):
    """The vector of one prompt: numbers, or with `encoding_format` base64 the bytes of
    little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(_Shape):
    """Reply of `POST /v1/embeddings`."""

    object: Literal["list"]
    data: list[Embedding]
    id: str
    created: int
    model: str
    usage: Usage


class Score(_Shape):
    """The cosine of two texts' embeddings."""

    index: int
    object: Literal["score"]
    score: float


class Scores(_Shape):
    """Reply of `POST /v1/score`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: Usage
