"""`POST /v1/chat/completions`."""

# No `from __future__ import annotations`: pydantic reads the annotations of the request.
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from deploy.http.engine_client import EngineClient
from deploy.http.metrics import RequestTracker
from deploy.http.openai.endpoint import Endpoint
from deploy.http.openai.generation import (
    Fields,
    Generation,
    Output,
    Prompt,
    check_model,
    check_text_length,
    make_plan,
    resolve_max_tokens,
    truncate_prompt,
)
from deploy.http.openai.logprobs import LogprobStyle, chat_logprobs, prompt_logprobs
from deploy.http.openai.output_limits import output_limits
from deploy.http.openai.request import (
    UNSUPPORTED,
    GenerationRequest,
    parse_request,
)
from deploy.http.openai.sse import ChunkEncoder, encode_json
from deploy.http.openai.strict import FreeObject, Strict, refusal
from engine.errors import RequestError
from engine.protocol.tokenizer_messages import TextDelta
from engine.sampling_params import MAX_LOGPROBS, check_prompt


class _PartOfMessage(Strict):
    """Unknown keys are ignored, as in vLLM: clients decorate what they send back."""

    model_config = ConfigDict(extra="ignore")


class TextPart(_PartOfMessage):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(_PartOfMessage):
    """The function that an earlier reply called; `arguments` are JSON."""

    name: str
    arguments: str | FreeObject = "{}"


class ToolCall(_PartOfMessage):
    """A call in an earlier reply."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(_PartOfMessage):
    """One message of the conversation, as given or as an earlier reply was returned."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"role": {"const": "assistant"}}},
                {"required": ["content"]},
            ]
        }
    )
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "function_call": (),
        "audio": (),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] = ""
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None

    @field_validator("role", mode="before")
    @classmethod
    def _refuse_function_role(cls, value: Any) -> Any:
        if value == "function":
            raise refusal("messages of role function are not supported; use role tool.")
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

    @property
    def text(self) -> str:
        """The content, its parts joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)

    def as_template_input(self) -> dict[str, Any]:
        """The message as the tokenizer takes it; the tokenizer joins the parts."""
        parts = self.content
        content = parts if isinstance(parts, str) else [part.model_dump() for part in parts]
        # Templates know "system"; "developer" is OpenAI's newer word for it.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump(exclude_none=True) for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


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
        "add_special_tokens": (False,),
    }

    messages: list[ChatMessage] = Field(json_schema_extra={"minItems": 1})
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    """None: true unless the final message is to be continued."""
    continue_final_message: bool = False
    echo: bool = False
    """Put the last message before the reply, if the reply has its role."""
    chat_template: str | None = None
    chat_template_kwargs: FreeObject = Field(default_factory=dict)

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs

    @property
    def adds_generation_prompt(self) -> bool:
        """Whether the template begins the assistant's turn."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    @property
    def echoed(self) -> str:
        """The text to put before the reply."""
        last = self.messages[-1]
        role = "assistant" if self.adds_generation_prompt else last.role
        return last.text if self.echo and last.role == role else ""

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
        return self


class ChatEndpoint(Endpoint):
    """Renders the conversation with the model's chat template and generates the reply."""

    name = "chat_completions"
    body = ChatCompletionRequest

    async def prepare(
        self, client: EngineClient, body: bytes, request_id: str, tracker: RequestTracker
    ) -> Generation:
        request = parse_request(body, ChatCompletionRequest)
        info = client.model_info
        check_model(request.model, info)
        if request.chat_template is not None and not self.settings.allow_request_chat_templates:
            raise RequestError(
                "chat_template in requests is switched off on this server: templates are "
                "programs; use the model's own.",
                "chat_template",
            )
        limits = await output_limits(client, request) if request.limits_output else None
        messages = [message.as_template_input() for message in request.messages]
        check_text_length("".join(message.text for message in request.messages), info, "messages")
        ids = await client.render_chat(
            messages,
            add_generation_prompt=request.adds_generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template=request.chat_template,
            template_kwargs=request.chat_template_kwargs or None,
        )
        check_prompt(ids, info.vocab_size, "messages")
        by_new_name = request.max_completion_tokens is not None
        fields = Fields("messages", "max_completion_tokens" if by_new_name else "max_tokens")
        asked = request.max_completion_tokens if by_new_name else request.max_tokens
        ids = truncate_prompt(ids, request, asked, info)
        prompt = Prompt(ids, resolve_max_tokens(len(ids), asked, None, info, fields))
        request_id = f"chatcmpl-{request.request_id or request_id}"
        top = request.top_logprobs if request.logprobs else None
        plan = make_plan(request, request_id, info, [prompt], top, request.prompt_logprobs, limits)
        return ChatGeneration(client, request, plan, tracker)


class ChatGeneration(Generation):
    """Shapes of chat completions and their chunks."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    payload = "delta"
    _request: ChatCompletionRequest

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        request = self._request
        message = {
            "role": "assistant",
            "content": request.echoed + "".join(output.texts),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [],
            "reasoning": None,
        }
        style = self._logprob_style
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(output.logprobs, style) if request.logprobs else None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids if request.return_token_ids else None,
        }

    @cached_property
    def _logprob_style(self) -> LogprobStyle:
        return self._request.logprob_style(self._request.top_logprobs)

    def _reply_extra(self) -> dict[str, Any]:
        request = self._request
        found = self._outputs[0].prompt_logprobs or []
        ids = self._plan.sequences[0].prompt_ids
        return {
            "prompt_logprobs": (
                None if request.prompt_logprobs is None else prompt_logprobs(found)
            ),
            "prompt_token_ids": ids if request.return_token_ids else None,
        }

    def _opening(self, encoder: ChunkEncoder) -> bytes:
        role = encode_json({"role": "assistant", "content": ""})
        given = {key: value for key, value in self._reply_extra().items() if value is not None}
        opening = b"".join(
            encoder.full_chunk(
                index,
                role,
                logprobs=None,
                finish_reason=None,
                stop_reason=None,
                chunk_extra=given if index == 0 else None,
                usage=self._chunk_usage(index, 0),
            )
            for index in range(len(self._outputs))
        )
        if not (echoed := self._request.echoed):
            return opening
        payload = b'{"content":%s}' % encode_json(echoed)
        return opening + b"".join(
            encoder.chunk(index, payload) for index in range(len(self._outputs))
        )

    def _chunk(self, encoder: ChunkEncoder, index: int, delta: TextDelta) -> bytes:
        request = self._request
        logprobs = delta.logprobs if request.logprobs else None
        token_ids = delta.token_ids if request.return_token_ids else None
        usage = self._chunk_usage(index)
        data = b""
        if delta.text or logprobs or token_ids:
            payload = b'{"content":%s}' % encode_json(delta.text)
            if not logprobs and usage is None:
                data = encoder.chunk(index, payload, token_ids)
            else:
                data = encoder.full_chunk(
                    index,
                    payload,
                    logprobs=chat_logprobs(logprobs, self._logprob_style) if logprobs else None,
                    finish_reason=None,
                    stop_reason=None,
                    token_ids=token_ids,
                    usage=usage,
                )
        if delta.finish_reason is not None:
            data += encoder.full_chunk(
                index,
                b"{}",
                logprobs=None,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
                usage=usage,
            )
        return data
