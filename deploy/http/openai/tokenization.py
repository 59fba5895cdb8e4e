"""`POST /tokenize` and `POST /detokenize`, as vLLM has them."""

# No `from __future__ import annotations`: pydantic reads the annotations of the requests.
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import ClientDisconnect

from deploy.http.engine_client import EngineClient
from deploy.http.openai.endpoint import CLIENT_GONE, check_content_type, read_body
from deploy.http.openai.generation import check_model, check_text_length
from deploy.http.openai.messages import ChatMessage
from deploy.http.openai.request import TokenIds, parse_request
from deploy.http.openai.sse import encode_json
from deploy.http.openai.strict import FreeObject, Strict, refusal
from deploy.http.openai.tools import Tool, ToolUse
from deploy.http.settings import ApiSettings
from engine.sampling_params import check_token_ids


class TokenizeRequest(Strict):
    """Body of `POST /tokenize`: a text (`prompt`) or a conversation (`messages`)."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
    )

    model: str = ""
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Let the tokenizer add its special tokens (bos). Default: true for a text."""
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: list[Tool] = Field(default_factory=list)
    chat_template_kwargs: FreeObject = Field(default_factory=dict)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_kind(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise refusal("Give either prompt or messages.", "prompt")
        given = self.model_fields_set
        if self.messages is None:
            for name in ("add_generation_prompt", "continue_final_message", "tools"):
                if name in given:
                    raise refusal(f"{name} is only allowed with messages.", name)
        elif self.add_special_tokens:
            raise refusal("A chat template adds the special tokens.", "add_special_tokens")
        if self.add_generation_prompt and self.continue_final_message:
            raise refusal(
                "add_generation_prompt and continue_final_message exclude each other.",
                "continue_final_message",
            )
        return self


class DetokenizeRequest(Strict):
    """Body of `POST /detokenize`."""

    model: str = ""
    tokens: TokenIds


class Tokenized(BaseModel):
    """Reply of `POST /tokenize`. `token_strs`: the text of each token."""

    model_config = ConfigDict(extra="forbid")

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """Reply of `POST /detokenize`."""

    model_config = ConfigDict(extra="forbid")

    prompt: str


class JsonRoute(ABC):
    """A route that answers a JSON body without generating. Ray Serve ships it to each ingress."""

    body: ClassVar[type[BaseModel]]
    reply: ClassVar[type[BaseModel]]

    def __init__(self, client_provider: Callable[[], EngineClient], settings: ApiSettings) -> None:
        self._client_provider = client_provider
        self._settings = settings

    async def handle(self, request: Request) -> Response:
        """The HTTP handler. Raises `RequestError`, which the application answers."""
        check_content_type(request.headers)
        try:
            body = await read_body(request, self._settings.max_body_bytes)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        answer = await self._answer(self._client_provider(), body)
        return Response(encode_json(answer), media_type="application/json")

    @abstractmethod
    async def _answer(self, client: EngineClient, body: bytes) -> dict[str, Any]:
        """The reply. Raises `RequestError`."""


class TokenizeRoute(JsonRoute):
    """Counts as generating does: the ids are those of the prompt that a request would have."""

    body = TokenizeRequest
    reply = Tokenized

    async def _answer(self, client: EngineClient, body: bytes) -> dict[str, Any]:
        request = parse_request(body, TokenizeRequest)
        info = client.model_info
        check_model(request.model, info)
        if request.messages is not None:
            text = "".join(message.text for message in request.messages)
            check_text_length(text, info, "messages")
            adds = request.add_generation_prompt
            ids = await client.render_chat(
                [message.as_template_input() for message in request.messages],
                add_generation_prompt=not request.continue_final_message if adds is None else adds,
                continue_final_message=request.continue_final_message,
                tools=ToolUse(request.tools, "none", True, info).for_template,
                template_kwargs=request.chat_template_kwargs or None,
            )
        else:
            assert request.prompt is not None
            check_text_length(request.prompt, info, "prompt")
            (ids,) = await client.encode([request.prompt], request.add_special_tokens is not False)
        texts = await client.decode_each(ids) if request.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": info.max_model_len,
            "tokens": ids,
            "token_strs": texts,
        }


class DetokenizeRoute(JsonRoute):
    """The text has the names of special tokens."""

    body = DetokenizeRequest
    reply = Detokenized

    async def _answer(self, client: EngineClient, body: bytes) -> dict[str, Any]:
        request = parse_request(body, DetokenizeRequest)
        info = client.model_info
        check_model(request.model, info)
        check_token_ids("tokens", request.tokens, info.vocab_size)
        return {"prompt": await client.decode(request.tokens)}
