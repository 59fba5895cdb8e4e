"""`POST /v1/chat/completions`."""

# No `from __future__ import annotations`: pydantic reads the annotations of the request.
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from deploy.http.engine_client import EngineClient
from deploy.http.metrics import RequestTracker
from deploy.http.openai.endpoint import Endpoint
from deploy.http.openai.generation import (
    Fields,
    Generation,
    Output,
    Plan,
    Prompt,
    check_model,
    check_text_length,
    make_plan,
    resolve_max_tokens,
    truncate_prompt,
)
from deploy.http.openai.logprobs import LogprobStyle, chat_logprobs, prompt_logprobs
from deploy.http.openai.messages import ChatMessage
from deploy.http.openai.output_limits import output_limits
from deploy.http.openai.reading import OutputReading, find_thinking
from deploy.http.openai.request import (
    UNSUPPORTED,
    GenerationRequest,
    parse_request,
)
from deploy.http.openai.sse import ChunkEncoder, encode_json
from deploy.http.openai.strict import FreeObject, refusal
from deploy.http.openai.tools import Tool, ToolChoice, ToolUse
from engine.errors import RequestError
from engine.protocol.tokenizer_messages import TextDelta
from engine.sampling_params import MAX_LOGPROBS, check_prompt


class ChatCompletionRequest(GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **UNSUPPORTED,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "audio": (),
        "modalities": (["text"],),
        "prediction": (),
        "moderation": (),
        "thinking_token_budget": (),
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
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """For templates that read it; `none` switches reasoning off where templates can."""
    include_reasoning: bool = True
    """False: the reply leaves the reasoning out."""

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
    def template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template."""
        effort = self.reasoning_effort
        given: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            given["enable_thinking"] = False
        return given | self.chat_template_kwargs

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
        tools = ToolUse(request.tools, request.tool_choice, request.parallel_tool_calls, info)
        messages = [message.as_template_input() for message in request.messages]
        check_text_length("".join(message.text for message in request.messages), info, "messages")
        ids = await client.render_chat(
            messages,
            add_generation_prompt=request.adds_generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template=request.chat_template,
            tools=tools.for_template,
            template_kwargs=request.template_kwargs or None,
        )
        check_prompt(ids, info.vocab_size, "messages")
        by_new_name = request.max_completion_tokens is not None
        fields = Fields("messages", "max_completion_tokens" if by_new_name else "max_tokens")
        asked = request.max_completion_tokens if by_new_name else request.max_tokens
        ids = truncate_prompt(ids, request, asked, info)
        prompt = Prompt(ids, resolve_max_tokens(len(ids), asked, None, info, fields))
        request_id = f"chatcmpl-{request.request_id or request_id}"
        top = request.top_logprobs if request.logprobs else None
        reading = OutputReading(tools, await find_thinking(client, info, ids))
        calls = tools.constraint(request.response_format)
        limits = None
        if request.limits_output or calls is not None:
            limits = await output_limits(client, request, calls, reading.thinking)
        plan = make_plan(request, request_id, info, [prompt], top, request.prompt_logprobs, limits)
        if reading.parses:
            # Some models write the marks of calls and reasoning as special tokens.
            for sequence in plan.sequences:
                sequence.params.skip_special_tokens = False
        return ChatGeneration(client, request, plan, tracker, reading)


class ChatGeneration(Generation):
    """Shapes of chat completions and their chunks."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    payload = "delta"
    _request: ChatCompletionRequest

    def __init__(
        self,
        client: EngineClient,
        request: ChatCompletionRequest,
        plan: Plan,
        tracker: RequestTracker,
        reading: OutputReading,
    ) -> None:
        super().__init__(client, request, plan, tracker)
        self._states = [reading.read() for _ in plan.sequences] if reading.parses else None
        """By sequence; None if outputs are text alone."""

    def _note(self, index: int, delta: TextDelta) -> None:
        super()._note(index, delta)
        if self._states is not None:
            has_ended = delta.finish_reason is not None
            self._states[index].add(delta.text, delta.num_output, has_ended)

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        request = self._request
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [],
            "reasoning": None,
            "reasoning_content": None,
        }
        if self._states is None:
            message["content"] = "".join(output.texts)
        else:
            message |= self._states[index].message(request.include_reasoning)
        if request.echoed:
            message["content"] = request.echoed + (message["content"] or "")
        style = self._logprob_style
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(output.logprobs, style) if request.logprobs else None,
            "finish_reason": self._finish_reason(index, output.finish_reason),
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids if request.return_token_ids else None,
        }

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        if self._states is None or reason is None:
            return reason
        return self._states[index].finish_reason(reason)

    def _usage(self) -> dict[str, Any]:
        usage = super()._usage()
        if self._states is not None:
            tokens = sum(state.num_reasoning for state in self._states)
            usage["completion_tokens_details"] = {"reasoning_tokens": tokens}
        return usage

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
        payloads: list[bytes] = []
        if self._states is not None:
            payloads = self._states[index].payloads(request.include_reasoning)
        elif delta.text:
            payloads = [b'{"content":%s}' % encode_json(delta.text)]
        if not payloads and (logprobs or token_ids):
            payloads = [b'{"content":""}']
        data = b""
        for payload in payloads:
            if not logprobs and usage is None:
                data += encoder.chunk(index, payload, token_ids)
            else:
                data += encoder.full_chunk(
                    index,
                    payload,
                    logprobs=chat_logprobs(logprobs, self._logprob_style) if logprobs else None,
                    finish_reason=None,
                    stop_reason=None,
                    token_ids=token_ids,
                    usage=usage,
                )
            # They belong to the delta, and stand in the first chunk of it.
            logprobs, token_ids = None, None
        if delta.finish_reason is not None:
            data += encoder.full_chunk(
                index,
                b"{}",
                logprobs=None,
                finish_reason=self._finish_reason(index, delta.finish_reason),
                stop_reason=delta.stop_reason,
                usage=usage,
            )
        return data
