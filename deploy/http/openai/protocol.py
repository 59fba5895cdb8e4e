"""Requests of `/v1/completions` and `/v1/chat/completions`."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, WithJsonSchema, field_validator, model_validator

from deploy.http.openai.fields import UNSUPPORTED, GenerationRequest, Strict, refusal
from engine.sampling_params import MAX_LOGPROBS

MAX_PROMPTS = 2048
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions; chats may use the rest of the context."""


def _check_prompt(value: Any) -> list[str] | list[list[int]]:
    """A prompt or a list of prompts, as texts or token ids, to a list of prompts."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise refusal(
            "prompt must be a string, a list of strings, a list of token ids, or a list of lists "
            "of token ids."
        )
    kinds = set(map(type, value))
    if kinds == {int}:
        return [value]
    if len(value) > MAX_PROMPTS:
        raise refusal(f"prompt takes at most {MAX_PROMPTS} prompts.")
    if not value or (kinds <= {str, list} and not all(value)):
        raise refusal("prompt must not be empty.")
    if kinds == {str} or (kinds == {list} and all(set(map(type, ids)) == {int} for ids in value)):
        return value
    raise refusal("prompt must hold either strings or whole-number token ids.")


Prompts = Annotated[
    list[str] | list[list[int]],
    PlainValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **UNSUPPORTED,
        "suffix": ("",),
        "prompt_embeds": (),
    }

    prompt: Prompts
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_completion(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != self.n:
            raise refusal("best_of other than n is not supported yet.", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise refusal("max_tokens must be at least 1 (0 only with echo).", "max_tokens")
        if self.n * len(self.prompt) > MAX_PROMPTS:
            raise refusal(f"n times prompts must not exceed {MAX_PROMPTS}.", "n")
        return self


class TextPart(Strict):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """One message of the conversation, as given or as an earlier reply was returned."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tool_calls": ([],),
        "tool_call_id": (),
        "function_call": (),
        "audio": (),
        "refusal": ("",),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] = ""
    name: str | None = None
    reasoning_content: str | None = None
    annotations: list[Any] = Field(default_factory=list)
    """Of an earlier reply; templates don't know it."""

    @field_validator("role", mode="before")
    @classmethod
    def _refuse_tool_roles(cls, value: Any) -> Any:
        if value in ("tool", "function"):
            raise refusal(f"messages of role {value} are not supported yet.")
        return value

    @field_validator("content", mode="before")
    @classmethod
    def _refuse_media(cls, value: Any) -> Any:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise refusal("content of a message must be a string or a list of text parts.")
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise refusal(f"content of type {kind[:40]} is not supported yet.")
        return value

    @model_validator(mode="after")
    def _check_content(self) -> "ChatMessage":
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise refusal(f"A {self.role} message must have content.", "content")
        return self

    def as_template_input(self) -> dict[str, Any]:
        """What chat templates read. Parts are joined by newlines, as vLLM does."""
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        # Templates know "system"; "developer" is OpenAI's newer word for it.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        return message


RESERVED_TEMPLATE_KEYS = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "chat_template",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "return_tensors",
        "return_dict",
        "padding",
        "truncation",
        "max_length",
    }
)


class ChatCompletionRequest(GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **UNSUPPORTED,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "audio": (),
        "modalities": (["text"],),
        "prediction": (),
        "moderation": (),
        "reasoning_effort": ("none",),
        "thinking_token_budget": (),
        "include_reasoning": (True,),
        "verbosity": ("medium",),
        "web_search_options": (),
        "documents": ([],),
        "mm_processor_kwargs": (),
        "echo": (False,),
        "add_special_tokens": (False,),
    }

    messages: list[ChatMessage]
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    """Default: unless the final message is to be continued."""
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatCompletionRequest":
        if not self.messages:
            raise refusal("messages must not be empty.", "messages")
        if self.top_logprobs and not self.logprobs:
            raise refusal("top_logprobs is only allowed with logprobs: true.", "top_logprobs")
        if self.add_generation_prompt and self.continue_final_message:
            raise refusal(
                "add_generation_prompt and continue_final_message exclude each other.",
                "continue_final_message",
            )
        for key in self.chat_template_kwargs:
            if key in RESERVED_TEMPLATE_KEYS or not key.isidentifier():
                raise refusal(
                    f"chat_template_kwargs must not set {key[:40]!r}.", "chat_template_kwargs"
                )
        return self
