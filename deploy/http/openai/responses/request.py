"""The body of `POST /v1/responses`."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from deploy.http.body import Effort, FreeObject, Strict, refusal
from deploy.http.engine_client import ModelInfo
from deploy.http.generation.plan import check_text_length, sampling_params
from deploy.http.generation.request import (
    ChatRequest,
    Delivery,
    FieldNames,
    NamedConstraint,
    named_error,
)
from deploy.http.generation.tool_use import ToolUse
from deploy.http.openai.request import FLEX, Metadata, Stop, documented
from deploy.http.openai.responses.items import (
    Input,
    for_template,
    forget_thoughts,
    num_chars,
    tools_of,
)
from deploy.http.openai.responses.tools import (
    AllowedChoice,
    AnyTool,
    NamedTool,
    OtherTool,
    ToolChoice,
)
from engine.constraints import ConstraintSpec, structured
from engine.errors import RequestError
from engine.protocol.sampling_params import MAX_LOGPROBS, SamplingParams
from engine.protocol.tokenizer_messages import Conversation

LOGPROBS = "message.output_text.logprobs"
_MAX_INT = 2**31 - 1


_INPUT: TypeAdapter[Any] = TypeAdapter(Input)


class TextFormat(Strict):
    """What the answer must be, by `type`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(None, min_length=1, max_length=256)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    """The answer follows the schema whether strict or not."""

    @model_validator(mode="after")
    def _check_schema(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise refusal("schema is for type json_schema, which needs it.", "schema")
        return self


class TextOptions(Strict):
    """Options of the answer."""

    format: TextFormat = TextFormat.model_validate({})
    verbosity: Literal["low", "medium", "high"] | None = None
    """For templates that read it."""


class Reasoning(Strict):
    """How much the model is to reason. There are no summaries: the reasoning itself is returned."""

    ignored: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary"})
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"mode": ("standard",)}

    effort: Effort | None = None
    context: Literal["auto", "current_turn", "all_turns"] = "auto"
    """`current_turn`: reasoning from before the last user's message is left out. Otherwise the
    chat template decides."""


class CompactionTrigger(Strict):
    """Where OpenAI's servers would compact the conversation. Here a prompt of more tokens is
    refused."""

    type: Literal["compaction"]
    compact_threshold: int | None = Field(None, ge=1, le=_MAX_INT)


class ResponsesRequest(Strict):
    """Body of `POST /v1/responses`."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            *("access_programs", "client_metadata", "image", "prompt_cache_options"),
            "stream_options",
        }
    )
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "conversation": (),
        "moderation": (),
        "prompt": (),
    }

    model: str = ""
    input: Input
    previous_response_id: str | None = Field(None, min_length=1, max_length=256)
    """The response that this one goes on from: what was asked and answered before needn't be sent
    again. Its `instructions` aren't taken over."""
    background: bool = False
    """Answer with an id at once. The response is made though no client waits for it, by another
    process if this one is lost."""
    store: bool | None = None
    """Whether the response is kept. Not given: as the server does by default (`request_store`)."""
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=_MAX_INT)
    max_tool_calls: int | None = Field(None, ge=1, le=_MAX_INT)
    """Accepted; it counts calls of tools that run in the server, of which there are none."""
    temperature: float | None = documented(None, minimum=0, maximum=100)
    top_p: float | None = documented(None, exclusiveMinimum=0, maximum=1)
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    include: list[str] = Field(default_factory=list)
    """`message.output_text.logprobs`. The others are for what there isn't: encrypted content, and
    the results of hosted tools."""
    stream: bool = False
    truncation: Literal["disabled", "auto"] = "disabled"
    """Accepted; a conversation that doesn't fit is refused with either."""
    context_management: list[CompactionTrigger] = Field(default_factory=list)
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    tools: list[AnyTool] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True

    service_tier: str | None = None
    """As in chat completions."""

    # Accepted: they label a request.
    metadata: Metadata = Field(default_factory=dict)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    # As in vLLM.
    top_k: int | None = documented(None, minimum=-1, maximum=_MAX_INT)
    min_p: float | None = documented(None, minimum=0, maximum=1)
    repetition_penalty: float | None = documented(None, minimum=0.01, maximum=100)
    presence_penalty: float = documented(0.0, minimum=-2, maximum=2)
    frequency_penalty: float = documented(0.0, minimum=-2, maximum=2)
    seed: int | None = documented(None, minimum=-(2**63), maximum=2**63 - 1)
    stop: Stop = Field(default_factory=list)
    ignore_eos: bool = False
    priority: int = Field(0, ge=-_MAX_INT, le=_MAX_INT)
    cache_salt: str = Field("", min_length=1, max_length=1024)
    chat_template_kwargs: FreeObject = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> "ResponsesRequest":
        if not self.input:
            raise refusal("input must not be empty.", "input")
        if self.background and self.store is False:
            raise refusal("background needs store: true.", "background")
        if self.top_logprobs and not self.wants_logprobs:
            raise refusal(
                f"top_logprobs is only allowed with include: [{LOGPROBS!r}].", "top_logprobs"
            )
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return LOGPROBS in self.include

    def behind(self, items: list[dict[str, Any]]) -> "ResponsesRequest":
        """This request with the items of an earlier conversation before its own. Raises
        `RequestError`."""
        try:
            history = _INPUT.validate_python([*items, *self.input])
        except ValidationError as error:
            raise RequestError(
                f"The earlier responses and the input are no conversation together: "
                f"{error.errors()[0]['msg']}",
                "previous_response_id",
            ) from None
        return self.model_copy(update={"input": history})

    def translate(self, request_id: str, info: ModelInfo, given_id: str = "") -> ChatRequest:
        """The request that this stands for. `given_id`: that of the HTTP request. Raises
        `RequestError`."""
        check_text_length(num_chars(self.input) + len(self.instructions or ""), info, "input")
        head = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools = self._tool_use(info)
        spec = self._constraint()
        messages = for_template(self.input)
        if self.reasoning.context == "current_turn":
            forget_thoughts(messages)
        return ChatRequest(
            id=request_id,
            model=self.model,
            given_id=given_id,
            params=self._sampling_params(info),
            max_tokens=self.max_output_tokens,
            names=FieldNames("input", "max_output_tokens"),
            delivery=Delivery(self.stream),
            constraint=None if spec is None else NamedConstraint(spec, "text.format"),
            priority=self.priority,
            cache_salt=self.cache_salt,
            is_flex=self.service_tier == FLEX,
            chat=Conversation(
                head + messages,
                tools=tools.for_template,
                template_kwargs=self._template_kwargs or None,
            ),
            tools=tools,
            answer_schema=None if tools.format is None else self._answer_schema,
            compact_above=min(
                (
                    trigger.compact_threshold
                    for trigger in self.context_management
                    if trigger.compact_threshold is not None
                ),
                default=None,
            ),
        )

    def _tool_use(self, info: ModelInfo) -> ToolUse:
        given = [*self.tools, *tools_of(self.input)]
        functions = [function for tool in given for function in tool.functions()]
        hosted = [tool.type for tool in given if isinstance(tool, OtherTool)]
        named, allowed = None, None
        word: Literal["none", "auto", "required"]
        match choice := self.tool_choice:
            case NamedTool():
                word, named = "required", choice.full_name
            case AllowedChoice():
                word, allowed = choice.mode, [tool.full_name for tool in choice.tools]
            case _:
                word = choice
        return ToolUse(
            functions,
            word,
            info,
            named=named,
            allowed=allowed,
            parallel=self.parallel_tool_calls,
            hosted=hosted,
        )

    @property
    def _answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer."""
        given = self.text.format
        return {"type": "object"} if given.type == "json_object" else given.schema_

    def _constraint(self) -> ConstraintSpec | None:
        given = self.text.format
        if given.type == "json_object":
            return structured.json_object()
        if given.schema_ is None:
            return None
        try:
            return structured.json_schema(given.schema_)
        except RequestError as error:
            raise named_error(error, "text.format") from None

    def _sampling_params(self, info: ModelInfo) -> SamplingParams:
        logprobs = self.top_logprobs if self.wants_logprobs else None
        return sampling_params(self, info.sampling_defaults, logprobs=logprobs)

    @property
    def _template_kwargs(self) -> dict[str, Any]:
        effort = self.reasoning.effort
        given: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            given["enable_thinking"] = False
        if self.text.verbosity is not None:
            given["verbosity"] = self.text.verbosity
        return given | self.chat_template_kwargs
