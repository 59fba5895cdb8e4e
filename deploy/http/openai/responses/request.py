"""The body of `POST /v1/responses`."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from deploy.http.body import FreeObject, Strict, refusal
from deploy.http.engine_client import ModelInfo
from deploy.http.generation.plan import check_model, check_text_length
from deploy.http.generation.request import (
    ChatRequest,
    FieldNames,
    NamedConstraint,
    named_error,
)
from deploy.http.generation.tool_use import Function, ToolUse
from deploy.http.openai.request import Stop, documented
from deploy.http.openai.responses.items import Input, for_template, num_chars
from deploy.http.openai.tools import FunctionDefinition
from engine.constraints import ConstraintSpec, structured
from engine.errors import RequestError
from engine.sampling_params import MAX_LOGPROBS, MODEL_DEFAULTS, SamplingParams

LOGPROBS = "message.output_text.logprobs"
_MAX_INT = 2**31 - 1


class FunctionTool(FunctionDefinition):
    """A function that the model may call. `strict` is false if it is left out."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "output_schema": (),
    }

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise refusal(f"Tools of type {kind[:40]} are not supported; use functions.")
        return value


class FunctionChoice(Strict):
    """A function by its name."""

    type: Literal["function"]
    name: str


class AllowedChoice(Strict):
    """Some of the tools, of which the model may (`auto`) or must (`required`) call one."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice] = Field(min_length=1)


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[FunctionChoice | AllowedChoice, Field(discriminator="type")]
)


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

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mode": ("standard",),
        "context": ("auto",),
    }

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(Strict):
    """`include_obfuscation` is accepted; nothing is added."""

    include_obfuscation: bool = False


class ResponsesRequest(Strict):
    """Body of `POST /v1/responses`. Nothing is stored, so that a request holds the whole
    conversation."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_options": (),
        "store": (False,),
        "truncation": ("disabled",),
    }

    model: str = ""
    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=_MAX_INT)
    max_tool_calls: int | None = Field(None, ge=1, le=_MAX_INT)
    """Accepted; it counts calls of tools that run in the server, of which there are none."""
    temperature: float | None = documented(None, minimum=0, maximum=100)
    top_p: float | None = documented(None, exclusiveMinimum=0, maximum=1)
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        default_factory=list
    )
    """There is no encrypted content: the reasoning is returned as it is."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True

    # Accepted: they label a request.
    metadata: dict[str, str] = Field(default_factory=dict)
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
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
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options is only allowed with stream: true.", "stream_options")
        if self.top_logprobs and not self.wants_logprobs:
            raise refusal(
                f"top_logprobs is only allowed with include: [{LOGPROBS!r}].", "top_logprobs"
            )
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return LOGPROBS in self.include

    def translate(self, request_id: str, info: ModelInfo) -> ChatRequest:
        """The request that this stands for. Raises `RequestError`."""
        check_model(self.model, info)
        check_text_length(num_chars(self.input) + len(self.instructions or ""), info, "input")
        head = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools = self._tool_use(info)
        spec = self._constraint()
        return ChatRequest(
            id=request_id,
            given_id=request_id.removeprefix("resp_"),
            model=self.model,
            params=self._sampling_params(info),
            max_tokens=self.max_output_tokens,
            names=FieldNames("input", "max_output_tokens"),
            stream=self.stream,
            constraint=None if spec is None else NamedConstraint(spec, "text.format"),
            priority=self.priority,
            cache_salt=self.cache_salt,
            messages=head + for_template(self.input),
            tools=tools,
            answer_schema=None if tools.format is None else self._answer_schema,
            template_kwargs=self._template_kwargs,
        )

    def _tool_use(self, info: ModelInfo) -> ToolUse:
        functions = [
            Function(tool.name, tool.description, tool.parameters, tool.strict)
            for tool in self.tools
        ]
        choice, parallel = self.tool_choice, self.parallel_tool_calls
        match choice:
            case FunctionChoice():
                return ToolUse(functions, "required", info, named=choice.name, parallel=parallel)
            case AllowedChoice():
                allowed = [tool.name for tool in choice.tools]
                return ToolUse(functions, choice.mode, info, allowed=allowed, parallel=parallel)
            case _:
                return ToolUse(functions, choice, info, parallel=parallel)

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
        chosen: dict[str, Any] = {}
        for name in MODEL_DEFAULTS:
            value = getattr(self, name)
            value = info.sampling_defaults.get(name) if value is None else value
            if value is not None:
                chosen[name] = value
        return SamplingParams(
            **chosen,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            logprobs=self.top_logprobs if self.wants_logprobs else None,
        )

    @property
    def _template_kwargs(self) -> dict[str, Any]:
        effort = self.reasoning.effort
        given: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            given["enable_thinking"] = False
        if self.text.verbosity is not None:
            given["verbosity"] = self.text.verbosity
        return given | self.chat_template_kwargs
