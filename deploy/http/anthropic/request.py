"""Bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec.structs import replace
from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from deploy.http.anthropic.blocks import (
    OF_ASSISTANT,
    Block,
    Part,
    TextBlock,
    ToolResultBlock,
    length_of,
    messages_of,
    refuse_media,
    text_of,
)
from deploy.http.anthropic.context_edits import ContextManagement, Messages, edit_conversation
from deploy.http.body import (
    CONTENT_UNLESS_ASSISTANT,
    MAX_MESSAGES,
    Effort,
    FreeObject,
    Strict,
    check_content,
    refusal,
    type_of,
)
from deploy.http.engine_client import EngineClient, ModelInfo
from deploy.http.generation.plan import check_text_length, sampling_params
from deploy.http.generation.request import (
    ChatRequest,
    Delivery,
    FieldNames,
    NamedConstraint,
    named_error,
)
from deploy.http.generation.tool_use import Function, ToolUse
from engine.constraints import structured
from engine.errors import RequestError
from engine.protocol.sampling_params import MAX_STOP_LENGTH, MAX_STOP_STRINGS, SamplingParams
from engine.protocol.tokenizer_messages import Conversation

NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,128}$"
_MAX_INT = 2**31 - 1


class Message(Part):
    """A turn of the conversation."""

    model_config = ConfigDict(json_schema_extra=CONTENT_UNLESS_ASSISTANT)

    role: Literal["user", "assistant", "system"]
    content: str | list[Block] = ""

    _refuse_media = field_validator("content", mode="before")(refuse_media)

    @model_validator(mode="after")
    def _check_blocks(self) -> "Message":
        check_content(self, self.role)
        for block in self.content if isinstance(self.content, list) else ():
            if isinstance(block, ToolResultBlock):
                is_right = self.role == "user"
            else:
                is_right = self.role == "assistant" or not isinstance(block, OF_ASSISTANT)
            if not is_right:
                raise refusal(f"A block of type {block.type} can't be the {self.role}'s.")
        return self

    def for_template(self) -> list[dict[str, Any]]:
        """What chat templates read: a tool's result is a message of its own."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        return messages_of(self.role, self.content)

    @property
    def num_chars(self) -> int:
        """Characters of all blocks."""
        if isinstance(self.content, str):
            return len(self.content)
        return sum(map(length_of, self.content))


class ToolDefinition(Part):
    """A tool. `input_schema` is the JSON schema of its input, an object."""

    type: Literal["custom"] = "custom"
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


class HostedTool(Part):
    """A tool of Anthropic's own (`web_search_20250305`, ...). The model doesn't see it."""

    type: str = Field(min_length=1, max_length=64)


def _kind_of_tool(tool: Any) -> str:
    return "custom" if type_of(tool) in (None, "custom") else "hosted"


Tool = Annotated[
    Annotated[ToolDefinition, Tag("custom")] | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_kind_of_tool),
]


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

    ignored: ClassVar[frozenset[str]] = frozenset({"task_budget"})

    format: OutputFormat | None = None
    effort: Effort | None = None


class Thinking(Strict):
    """Whether the reply has the model's reasoning. There is no budget for it: `budget_tokens` is
    accepted, and `max_tokens` bounds all."""

    ignored: ClassVar[frozenset[str]] = frozenset({"budget_tokens"})

    type: Literal["enabled", "disabled", "adaptive"]
    display: Annotated[str, Field(max_length=64)] | None = None
    """`omitted`: the blocks of the reasoning come without its text. Else it is as it was written:
    nothing sums it up."""


class CountTokensRequest(Strict):
    """Body of `POST /v1/messages/count_tokens`: what a conversation has before the reply."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            *("anthropic_beta", "anthropic_version", "betas", "billing_policy", "cache_control"),
            *("diagnostics", "fallback_credit_token", "fallbacks", "inference_geo", "metadata"),
            *("service_tier", "speed", "user_profile_id", "workspace_id"),
        }
    )
    """They label, bill or route a request. Prefixes are always cached."""
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mcp_servers": ([],),
        "container": (),
        "compaction": (),
    }

    model: str = ""
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[TextBlock] = ""
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig.model_validate({})
    output_format: OutputFormat | None = None
    """The older place of `output_config.format`."""
    context_management: ContextManagement | None = None

    @property
    def shows_thinking(self) -> bool:
        """Whether the reply has the reasoning."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def omits_thinking(self) -> bool:
        """Whether what it shows of the reasoning is that there was some."""
        return self.thinking is not None and self.thinking.display == "omitted"

    @model_validator(mode="before")
    @classmethod
    def _refuse_threads(cls, data: Any) -> Any:
        """In words by which Anthropic's client knows to send the whole conversation."""
        if isinstance(data, dict) and data.get("thread") is not None:
            details = {"error_code": "thread_unsupported_request"}
            raise refusal("thread is not supported: nothing is stored.", "thread", details=details)
        return data

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
        head = [{"role": "system", "content": text_of(self.system)}] if self.system else []
        return head + [made for message in self.messages for made in message.for_template()]

    def tool_use(self, info: ModelInfo) -> ToolUse:
        """What the tools mean. Raises `RequestError`."""
        functions = [
            Function(tool.name, tool.description, tool.input_schema, tool.strict)
            for tool in self.tools
            if isinstance(tool, ToolDefinition)
        ]
        hosted = [tool.type for tool in self.tools if isinstance(tool, HostedTool)]
        choice = self.tool_choice
        if choice is None:
            return ToolUse(functions, "auto", info, hosted=hosted)
        word: Literal["none", "auto", "required"] = "required"
        if choice.type == "auto" or choice.type == "none":
            word = choice.type
        parallel = not choice.disable_parallel_tool_use
        return ToolUse(functions, word, info, named=choice.name, parallel=parallel, hosted=hosted)

    def translate(self, request_id: str, info: ModelInfo) -> ChatRequest:
        """The request that this stands for. Raises `RequestError`."""
        num_chars = sum(message.num_chars for message in self.messages)
        check_text_length(num_chars + len(text_of(self.system)), info, "messages")
        tools, management = self.tool_use(info), self.context_management
        return ChatRequest(
            id=request_id,
            model=self.model,
            given_id=request_id.removeprefix("msg_"),
            params=SamplingParams(),
            max_tokens=None,  # clients send their usual number: it is reduced to what fits
            names=FieldNames("messages", "max_tokens"),
            delivery=Delivery(stream=False),
            constraint=self.constraint(),
            chat=Conversation(
                self.for_template(),
                add_generation_prompt=not self.continues,
                continue_final_message=self.continues,
                tools=tools.for_template,
                template_kwargs=self.template_kwargs or None,
            ),
            tools=tools,
            answer_schema=None if tools.format is None else self.answer_schema,
            compact_above=None if management is None else management.compact_above,
        )

    async def edit(self, client: EngineClient, request: ChatRequest) -> list[dict[str, Any]] | None:
        """Make the edits of `context_management` in the request's conversation. Returns those that
        applied; None if none were asked for. Raises `RequestError`."""
        management = self.context_management
        if management is None:
            return None

        async def count(messages: Messages) -> int:
            return len(await client.render_chat(replace(request.chat, messages=messages)))

        request.chat.messages, applied = await edit_conversation(
            request.chat.messages, management.edits, count
        )
        return applied

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

    @field_validator("stop_sequences")
    @classmethod
    def _check_stop(cls, value: list[str]) -> list[str]:
        if not all(0 < len(text) <= MAX_STOP_LENGTH for text in value):
            raise refusal(f"stop_sequences must have 1 to {MAX_STOP_LENGTH} characters each.")
        return value

    def translate(self, request_id: str, info: ModelInfo) -> ChatRequest:
        request = super().translate(request_id, info)
        request.params = sampling_params(self, info.sampling_defaults, stop=self.stop_sequences)
        request.default_max_tokens = self.max_tokens
        request.delivery = Delivery(self.stream)
        return request
