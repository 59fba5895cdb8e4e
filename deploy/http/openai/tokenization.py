"""`POST /tokenize` and `POST /detokenize`, as vLLM has them."""

# No `from __future__ import annotations`: pydantic reads the annotations of the requests.
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deploy.http.access.api_key import ApiKey
from deploy.http.body import MAX_MESSAGES, FreeObject, Strict, refusal
from deploy.http.engine_client import EngineClient
from deploy.http.generation.json_route import JsonRoute
from deploy.http.generation.plan import check_text_length
from deploy.http.openai.messages import ChatMessage
from deploy.http.openai.request import TokenIds
from deploy.http.openai.tools import Tool, tool_use
from engine.protocol.sampling_params import check_token_ids
from engine.protocol.tokenizer_messages import Conversation


class TokenizeRequest(Strict):
    """Body of `POST /tokenize`: a text (`prompt`) or a conversation (`messages`)."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
    )

    model: str = ""
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Let the tokenizer add its special tokens (bos). Default: true for a text."""
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
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


class TokenizeRoute(JsonRoute):
    """Counts as generating does: the ids are those of the prompt that a request would have."""

    paths = ("/tokenize",)
    description = "As vLLM's `POST /tokenize`."
    body = TokenizeRequest
    reply = Tokenized

    async def _answer(
        self, client: EngineClient, request: TokenizeRequest, key: ApiKey | None
    ) -> dict[str, Any]:
        info = client.model_info
        if request.messages is not None:
            num_chars = sum(len(message.text) for message in request.messages)
            check_text_length(num_chars, info, "messages")
            adds = request.add_generation_prompt
            chat = Conversation(
                [message.as_template_input() for message in request.messages],
                add_generation_prompt=not request.continue_final_message if adds is None else adds,
                continue_final_message=request.continue_final_message,
                tools=tool_use(request.tools, "none", True, info).for_template,
                template_kwargs=request.chat_template_kwargs or None,
            )
            ids = await client.render_chat(chat)
        else:
            assert request.prompt is not None
            check_text_length(len(request.prompt), info, "prompt")
            (ids,) = await client.encode([request.prompt], request.add_special_tokens is not False)
        texts = await client.decode_each(ids) if request.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": info.resolved.max_model_len,
            "tokens": ids,
            "token_strs": texts,
        }


class DetokenizeRoute(JsonRoute):
    """The text has the names of special tokens."""

    paths = ("/detokenize",)
    description = "As vLLM's `POST /detokenize`."
    body = DetokenizeRequest
    reply = Detokenized

    async def _answer(
        self, client: EngineClient, request: DetokenizeRequest, key: ApiKey | None
    ) -> dict[str, Any]:
        info = client.model_info
        check_token_ids("tokens", request.tokens, info.resolved.model.vocab_size)
        return {"prompt": await client.decode(request.tokens)}
