"""`POST /v1/chat/completions`."""

# No `from __future__ import annotations`: pydantic reads the annotations of the request.
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from deploy.http.body import MAX_MESSAGES, Effort, FreeObject, Strict, encode_json, refusal
from deploy.http.engine_client import EngineClient, ModelInfo
from deploy.http.generation.endpoint import Endpoint
from deploy.http.generation.generation import Generation, Output
from deploy.http.generation.plan import check_text_length, plan_chat
from deploy.http.generation.request import ChatRequest, FieldNames, Incoming
from deploy.http.openai.generation import OpenAIGeneration
from deploy.http.openai.logprobs import LogprobStyle, chat_logprobs, prompt_logprobs
from deploy.http.openai.messages import ChatMessage, TextPart
from deploy.http.openai.parts import delta_payloads, finish_reason, message_fields
from deploy.http.openai.replies import ChatCompletion, ChatCompletionChunk, Error
from deploy.http.openai.request import UNSUPPORTED, GenerationFields, Metadata
from deploy.http.openai.sse import ChunkEncoder
from deploy.http.openai.tools import AnyTool, ToolChoice, schema_of_answer, tool_use
from deploy.http.records.keeper import Keeper
from deploy.http.records.store import Record
from engine.errors import RequestError
from engine.protocol.sampling_params import MAX_LOGPROBS
from engine.protocol.tokenizer_messages import Conversation, TextDelta


class Prediction(Strict):
    """OpenAI's predicted output: a text, or text parts that are joined."""

    type: Literal["content"] = "content"
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The expected text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatCompletionRequest(GenerationFields):
    """Body of `POST /v1/chat/completions`."""

    ignored: ClassVar[frozenset[str]] = GenerationFields.ignored - {"metadata"}
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **UNSUPPORTED,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "audio": (),
        "modalities": (["text"],),
        "moderation": (),
        "thinking_token_budget": (),
        "documents": ([],),
        "add_special_tokens": (False,),
    }

    messages: list[ChatMessage] = Field(max_length=MAX_MESSAGES, json_schema_extra={"minItems": 1})
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
    tools: list[AnyTool] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    """For templates that read it; `none` switches reasoning off where templates can."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """For templates that read it."""
    include_reasoning: bool = True
    """False: the reply leaves the reasoning out."""
    web_search_options: dict[str, Any] | None = None
    """Asks for a tool that other servers run: the reply's `ignored_tools` has it."""
    prediction: Prediction | None = None
    """The answer that is expected: tokens of the reply that equal it may come several at once."""
    metadata: Metadata = Field(default_factory=dict)
    """Of a completion that is stored."""

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
        if self.verbosity is not None:
            given["verbosity"] = self.verbosity
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
    paths = ("/v1/chat/completions",)
    description = "As OpenAI's `POST /v1/chat/completions`, with the fields below."
    body = ChatCompletionRequest
    reply = ChatCompletion
    events = (ChatCompletionChunk, Error)
    done = "[DONE]"

    async def prepare(
        self,
        client: EngineClient,
        fields: ChatCompletionRequest,
        incoming: Incoming,
    ) -> Generation[Any]:
        request = translate(
            fields, f"chatcmpl-{fields.request_id or incoming.id}", client.model_info
        )
        plan = await plan_chat(client, self.settings.server, request, incoming)
        return ChatGeneration(client, fields, plan, incoming.tracker)

    def keeps(self, given: ChatCompletionRequest, generation: Generation[Any]) -> bool:
        if not given.store or self.store is None:
            return super().keeps(given, generation)
        if "/" in generation.id:  # such a path leads elsewhere
            raise RequestError("With store: true the request_id must have no '/'.", "request_id")
        return True

    def keeper(self, given: ChatCompletionRequest, record: Record) -> Keeper:
        assert self.store is not None
        age_s = self.settings.server.request_store_stream_age_s
        return Keeper(self.store, record, must=given.store is True, stream_age_s=age_s)


def translate(given: ChatCompletionRequest, request_id: str, info: ModelInfo) -> ChatRequest:
    """The request that a body stands for. Raises `RequestError`."""
    check_text_length(sum(len(m.text) for m in given.messages), info, "messages")
    prediction = "" if given.prediction is None else given.prediction.text
    check_text_length(len(prediction), info, "prediction")
    searches = [] if given.web_search_options is None else ["web_search"]
    tools = tool_use(given.tools, given.tool_choice, given.parallel_tool_calls, info, searches)
    by_new_name = given.max_completion_tokens is not None
    top = given.top_logprobs if given.logprobs else None
    return ChatRequest(
        **given.common(request_id, top, given.prompt_logprobs, info),
        max_tokens=given.max_completion_tokens if by_new_name else given.max_tokens,
        names=FieldNames("messages", "max_completion_tokens" if by_new_name else "max_tokens"),
        chat=Conversation(
            [message.as_template_input() for message in given.messages],
            given.adds_generation_prompt,
            given.continue_final_message,
            given.chat_template,
            tools.for_template,
            given.template_kwargs or None,
        ),
        tools=tools,
        answer_schema=None if tools.format is None else schema_of_answer(given.response_format),
        prediction=prediction,
    )


class ChatGeneration(OpenAIGeneration[ChatCompletionRequest]):
    """Shapes of chat completions and their chunks."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    payload = "delta"
    _final: dict[str, Any] | None = None
    """The reply of a completion that is stored, once it has ended."""

    @property
    def keeps_reply(self) -> bool:
        return self._request.store is True and self.keeper is not None

    def response_to_keep(self) -> dict[str, Any] | None:
        return None if self.is_aborted else self._final

    def _body(self) -> dict[str, Any]:
        body = super()._body()
        if self.keeps_reply:
            self._final = body = body | {"metadata": self._request.metadata}
        return body

    def _events(self, index: int, delta: TextDelta) -> bytes:
        if self.keeps_reply:
            self._outputs[index].add(delta)
        return super()._events(index, delta)

    def _ending(self) -> bytes:
        if self.keeps_reply:
            self._body()
        return super()._ending()

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        request = self._request
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
            "reasoning_content": None,
        }
        if output.state is None:
            message["content"] = "".join(output.texts)
        else:
            parts = [*output.parts, *output.state.take()]
            message |= message_fields(output.state, parts, request.include_reasoning)
        if request.echoed:
            message["content"] = request.echoed + (message["content"] or "")
        style = self._logprob_style
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(output.logprobs, style) if request.logprobs else None,
            "finish_reason": self._finish_reason(index, output.finish_reason),
            "stop_reason": output.stop_reason,
            "matched_stop": output.stop_reason,
            "token_ids": output.token_ids if request.return_token_ids else None,
        }

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        state = self._outputs[index].state
        return reason if state is None or reason is None else finish_reason(state, reason)

    def _usage(self) -> dict[str, Any]:
        usage = super()._usage()
        details: dict[str, int] = {}
        if self._plan.reading is not None:
            tokens = sum(o.state.num_reasoning for o in self._outputs if o.state is not None)
            details["reasoning_tokens"] = tokens
        if self._request.prediction is not None:
            predictions = [s.prediction_ids for s in self._plan.sequences]
            expected = sum(len(ids) for ids in predictions if ids is not None)
            accepted = sum(output.num_predicted for output in self._outputs)
            details["accepted_prediction_tokens"] = accepted
            details["rejected_prediction_tokens"] = max(expected - accepted, 0)
        if details:
            usage["completion_tokens_details"] = details
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
            "prompt_token_ids": ids.tolist() if request.return_token_ids else None,
            **({"ignored_tools": ignored} if (ignored := self._plan.ignored_tools) else {}),
        }

    def _opening(self) -> bytes:
        encoder = self._encoder
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
        usage = self._chunk_usage(index, delta.num_output)
        payloads: list[bytes] = []
        state = self._outputs[index].state
        if state is not None:
            parts = state.take()
            if self.keeps_reply:
                self._outputs[index].parts += parts
            payloads = delta_payloads(state, parts, request.include_reasoning)
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
