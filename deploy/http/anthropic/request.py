"""Bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from deploy.http.body import CONTENT_UNLESS_ASSISTANT, MAX_MESSAGES, FreeObject, Strict, refusal
from deploy.http.engine_client import ModelInfo
from deploy.http.generation.arguments import Arguments, as_text
from deploy.http.generation.plan import check_model, check_text_length
from deploy.http.generation.request import (
    ChatRequest,
    FieldNames,
    NamedConstraint,
    named_error,
)
from deploy.http.generation.tool_use import Function, ToolUse
from engine.constraints import structured
from engine.errors import RequestError
from engine.sampling_params import MAX_STOP_LENGTH, MAX_STOP_STRINGS, MODEL_DEFAULTS, SamplingParams

NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,128}$"
_MAX_INT = 2**31 - 1


class _Part(Strict):
    """Unknown keys are ignored: clients send back what they got, and `cache_control`."""

    model_config = ConfigDict(extra="ignore")


class TextBlock(_Part):
    """A piece of text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(_Part):
    """What an earlier reply thought."""

    type: Literal["thinking"]
    thinking: str = ""


class RedactedBlock(_Part):
    """Reasoning that only Anthropic's servers can read; it is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(_Part):
    """A call in an earlier reply."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Arguments = Field(default_factory=dict)


class ToolResultBlock(_Part):
    """What a called tool gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool = False


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
_KINDS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class Message(_Part):
    """A turn of the conversation."""

    model_config = ConfigDict(json_schema_extra=CONTENT_UNLESS_ASSISTANT)

    role: Literal["user", "assistant", "system"]
    content: str | list[Block] = ""

    @field_validator("content", mode="before")
    @classmethod
    def _refuse_media(cls, value: Any) -> Any:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise refusal("content of a message must be a string or a list of blocks.")
        for block in value:
            kind = block.get("type") if isinstance(block, dict) else None
            if isinstance(kind, str) and kind not in _KINDS:
                raise refusal(f"content of type {kind[:40]} is not supported.")
        return value

    @model_validator(mode="after")
    def _check_blocks(self) -> "Message":
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise refusal(f"A {self.role} message must have content.", "content")
        for block in self.content if isinstance(self.content, list) else ():
            of_user = isinstance(block, ToolResultBlock)
            of_assistant = isinstance(block, ToolUseBlock | ThinkingBlock | RedactedBlock)
            if (of_user and self.role != "user") or (of_assistant and self.role != "assistant"):
                raise refusal(f"A block of type {block.type} can't be the {self.role}'s.")
        return self

    def for_template(self) -> list[dict[str, Any]]:
        """What chat templates read: a tool's result is a message of its own."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results: list[dict[str, Any]] = []
        texts, thoughts = [], []
        calls: list[dict[str, Any]] = []
        for block in self.content:
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ThinkingBlock():
                    thoughts.append(block.thinking)
                case ToolUseBlock():
                    function = {"name": block.name, "arguments": block.input}
                    calls.append({"id": block.id, "type": "function", "function": function})
                case ToolResultBlock():
                    results.append(
                        {
                            "role": "tool",
                            "tool_call_id": block.tool_use_id,
                            "content": _text_of(block.content),
                        }
                    )
        message: dict[str, Any] = {"role": self.role, "content": "\n".join(texts)}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        return [*results, message] if texts or not results else results

    @property
    def num_chars(self) -> int:
        """Characters of all blocks."""
        if isinstance(self.content, str):
            return len(self.content)
        return sum(map(_length_of, self.content))


class ToolDefinition(_Part):
    """A tool. `input_schema` is the JSON schema of its input, an object."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"type": ("custom",)}

    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    input_schema: FreeObject
    strict: bool = False

    @field_validator("input_schema")
    @classmethod
    def _check_schema(cls, value: FreeObject) -> FreeObject:
        if value.get("type", "object") != "object":
            raise refusal("input_schema must be a JSON schema of type object.")
        return value


class ToolChoice(Strict):
    """Whether tools may or must be called: `any` of them, or the `tool` with `name`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise refusal("tool_choice takes a name with type tool, and only then.", "name")
        return self


class OutputFormat(Strict):
    """What the answer must be: JSON after `schema`."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """`effort` is a variable for the chat template (`reasoning_effort`)."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"task_budget": ()}

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Thinking(Strict):
    """Whether the reply has the model's reasoning. There is no budget for it: `budget_tokens` is
    accepted, and `max_tokens` bounds all."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, le=_MAX_INT)
    display: Literal["summarized", "omitted"] | None = None


class CountTokensRequest(Strict):
    """Body of `POST /v1/messages/count_tokens`: what a conversation has before the reply."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mcp_servers": ([],),
        "container": (),
        "context_management": (),
    }

    model: str = ""
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[TextBlock] = ""
    tools: list[ToolDefinition] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig.model_validate({})
    output_format: OutputFormat | None = None
    """The older place of `output_config.format`."""
    cache_control: dict[str, Any] = Field(default_factory=dict)
    """Accepted; prefixes are always cached."""

    @property
    def shows_thinking(self) -> bool:
        """Whether the reply has the reasoning."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @model_validator(mode="after")
    def _check_last(self) -> "CountTokensRequest":
        content = self.messages[-1].content
        ends_with_text = isinstance(content, str) or (content and content[-1].type == "text")
        if self.continues and not ends_with_text:
            raise refusal("An assistant's last message must end with text.", "messages")
        return self

    @property
    def continues(self) -> bool:
        """Whether the reply goes on with the last message."""
        return self.messages[-1].role == "assistant"

    def for_template(self) -> list[dict[str, Any]]:
        """The conversation as chat templates read it."""
        head = [{"role": "system", "content": _text_of(self.system)}] if self.system else []
        return head + [made for message in self.messages for made in message.for_template()]

    def tool_use(self, info: ModelInfo) -> ToolUse:
        """What the tools mean. Raises `RequestError`."""
        functions = [
            Function(tool.name, tool.description, tool.input_schema, tool.strict)
            for tool in self.tools
        ]
        choice = self.tool_choice
        if choice is None:
            return ToolUse(functions, "auto", info)
        word: Literal["none", "auto", "required"] = "required"
        if choice.type == "auto" or choice.type == "none":
            word = choice.type
        parallel = not choice.disable_parallel_tool_use
        return ToolUse(functions, word, info, named=choice.name, parallel=parallel)

    def check(self, info: ModelInfo) -> None:
        """Raise `RequestError` for another model, or for text that can't fit."""
        check_model(self.model, info)
        num_chars = sum(message.num_chars for message in self.messages)
        check_text_length(num_chars + len(_text_of(self.system)), info, "messages")

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template."""
        effort = self.output_config.effort
        given = {} if effort is None else {"reasoning_effort": effort}
        return {"enable_thinking": self.shows_thinking, **given}

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """JSON schema of the answer."""
        given = self.output_config.format or self.output_format
        return None if given is None else given.schema_

    def constraint(self) -> NamedConstraint | None:
        """What the answer must be. Raises `RequestError`."""
        if self.answer_schema is None:
            return None
        old = self.output_config.format is None
        field = "output_format.schema" if old else "output_config.format.schema"
        try:
            return NamedConstraint(structured.json_schema(self.answer_schema), field)
        except RequestError as error:
            raise named_error(error, field) from None


class MessagesRequest(CountTokensRequest):
    """Body of `POST /v1/messages`."""

    max_tokens: int = Field(ge=1, le=_MAX_INT)
    stop_sequences: list[str] = Field(default_factory=list, max_length=MAX_STOP_STRINGS)
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=_MAX_INT)
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Accepted; it labels a request."""
    service_tier: str = ""
    inference_geo: str = ""

    @field_validator("stop_sequences")
    @classmethod
    def _check_stop(cls, value: list[str]) -> list[str]:
        if not all(0 < len(text) <= MAX_STOP_LENGTH for text in value):
            raise refusal(f"stop_sequences must have 1 to {MAX_STOP_LENGTH} characters each.")
        return value

    def translate(self, request_id: str, info: ModelInfo) -> ChatRequest:
        """The request that this stands for. Raises `RequestError`."""
        self.check(info)
        defaults = info.sampling_defaults
        given = {name: getattr(self, name, None) for name in MODEL_DEFAULTS}
        chosen: dict[str, Any] = {
            name: defaults.get(name) if value is None else value for name, value in given.items()
        }
        chosen = {name: value for name, value in chosen.items() if value is not None}
        tools = self.tool_use(info)
        return ChatRequest(
            id=request_id,
            given_id=request_id.removeprefix("msg_"),
            model=self.model,
            params=SamplingParams(**chosen, stop=self.stop_sequences),
            max_tokens=None,  # clients send their usual number: it is reduced to what fits
            default_max_tokens=self.max_tokens,
            names=FieldNames("messages", "max_tokens"),
            stream=self.stream,
            constraint=self.constraint(),
            messages=self.for_template(),
            tools=tools,
            answer_schema=None if tools.format is None else self.answer_schema,
            add_generation_prompt=not self.continues,
            continue_final_message=self.continues,
            template_kwargs=self.template_kwargs,
        )


def _text_of(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _length_of(block: Block) -> int:
    match block:
        case RedactedBlock():
            return 0
        case TextBlock():
            return len(block.text)
        case ThinkingBlock():
            return len(block.thinking)
        case ToolUseBlock():
            return len(as_text(block.input))
        case ToolResultBlock():
            return len(_text_of(block.content))
