"""`POST /v1/completions`."""

# No `from __future__ import annotations`: pydantic reads the annotations of the request.
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import PlainValidator, WithJsonSchema, model_validator

from deploy.http.engine_client import EngineClient, ModelInfo
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
)
from deploy.http.openai.logprobs import completion_logprobs, echoed_logprobs, prompt_logprobs
from deploy.http.openai.request import UNSUPPORTED, GenerationRequest, parse_request, refusal
from deploy.http.openai.sse import ChunkEncoder, encode_json
from engine.protocol.tokenizer_messages import LogprobEntry, TextDelta
from engine.sampling_params import check_prompt

MAX_PROMPTS = 2048
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions; chats may use the rest of the context."""


def _check_prompt(value: Any) -> list[str] | list[list[int]]:
    """Turn a prompt or a list of prompts, as text or token ids, into a list of prompts."""
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


_FIELDS = Fields("prompt", "max_tokens")


class CompletionEndpoint(Endpoint):
    """Continues prompts, which are texts or token ids."""

    name = "completions"
    body = CompletionRequest

    async def prepare(
        self, client: EngineClient, body: bytes, request_id: str, tracker: RequestTracker
    ) -> Generation:
        request = parse_request(body, CompletionRequest)
        info = client.model_info
        check_model(request.model, info)
        ids = await _encode(client, request, info)
        # A sequence always makes a token; with `max_tokens` 0 it is dropped again.
        asked = 1 if request.max_tokens == 0 else request.max_tokens
        default = COMPLETION_MAX_TOKENS
        prompts = [
            Prompt(i, resolve_max_tokens(len(i), asked, default, info, _FIELDS)) for i in ids
        ]
        prompt_top = request.prompt_logprobs
        if request.echo and request.logprobs is not None:
            prompt_top = max(request.logprobs, -1 if prompt_top is None else prompt_top)
        request_id = f"cmpl-{request.request_id or request_id}"
        plan = make_plan(request, request_id, info, prompts, request.logprobs, prompt_top)
        echoes = await _echoes(client, request, ids) if request.echo else []
        return CompletionGeneration(client, request, plan, tracker, echoes)


async def _encode(
    client: EngineClient, request: CompletionRequest, info: ModelInfo
) -> list[list[int]]:
    """Checked token ids of every prompt."""
    texts = [prompt for prompt in request.prompt if isinstance(prompt, str)]
    prompts = [prompt for prompt in request.prompt if isinstance(prompt, list)]
    if texts:
        for text in texts:
            check_text_length(text, info, "prompt")
        prompts = await client.encode(texts, request.add_special_tokens)
    for ids in prompts:
        check_prompt(ids, info.vocab_size, "prompt")
    return prompts


class Echo(NamedTuple):
    """A prompt as its completions repeat it; `first_token` is set only for log-probabilities."""

    text: str
    first_token: str


async def _echoes(
    client: EngineClient, request: CompletionRequest, prompts: list[list[int]]
) -> list[Echo]:
    echoes = []
    for given, ids in zip(request.prompt, prompts, strict=True):
        text = given if isinstance(given, str) else await client.decode(ids)
        first = await client.decode(ids[:1]) if request.logprobs is not None else ""
        echoes.append(Echo(text, first))
    return echoes


class CompletionGeneration(Generation):
    """Shapes of completions and their chunks."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"
    payload = "text"
    _request: CompletionRequest

    def __init__(
        self,
        client: EngineClient,
        request: CompletionRequest,
        plan: Plan,
        tracker: RequestTracker,
        echoes: list[Echo],
    ) -> None:
        super().__init__(client, request, plan, tracker)
        self._echoes = [echo for echo in echoes for _ in range(plan.n)]
        self._opened: set[int] = set()
        """Choices of a stream that have had their first chunk."""
        self._drop_output = request.max_tokens == 0
        chunk_usage = request.stream_options.continuous_usage_stats
        self._is_plain = request.logprobs is None and not chunk_usage
        """All chunks between the first and the last hold only text, and tokens if asked for."""

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        request = self._request
        choice = {
            "index": index,
            "text": self._echo_text(index) + "".join(output.texts),
            "logprobs": self._logprobs(index, output.logprobs, output.prompt_logprobs, True),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if request.return_token_ids:
            choice["token_ids"] = output.token_ids
            choice["prompt_token_ids"] = self._plan.sequences[index].prompt_ids
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
        return choice

    def _chunk(self, encoder: ChunkEncoder, index: int, delta: TextDelta) -> bytes:
        request = self._request
        text, finish_reason = delta.text, delta.finish_reason
        token_ids = delta.token_ids if request.return_token_ids else None
        opens = index not in self._opened
        if opens and self._echoes:
            text = self._echo_text(index) + text
        if not (text or finish_reason or token_ids or delta.logprobs):
            return b""
        self._opened.add(index)
        payload = encode_json(text)
        gives_prompt = request.return_token_ids and opens
        if self._is_plain and finish_reason is None and not gives_prompt:
            return encoder.chunk(index, payload, token_ids)
        extra: dict[str, Any] = {}
        if gives_prompt:
            extra["prompt_token_ids"] = self._plan.sequences[index].prompt_ids
        return encoder.full_chunk(
            index,
            payload,
            logprobs=self._logprobs(index, delta.logprobs or [], delta.prompt_logprobs, opens),
            finish_reason=finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=token_ids,
            choice_extra=extra,
            usage=self._chunk_usage(index, delta),
        )

    def _echo_text(self, index: int) -> str:
        return self._echoes[index].text if self._echoes else ""

    def _logprobs(
        self,
        index: int,
        entries: list[LogprobEntry],
        prompt_entries: list[LogprobEntry | None] | None,
        with_echo: bool,
    ) -> dict[str, list[Any]] | None:
        top_n = self._request.logprobs
        if top_n is None:
            return None
        begin = len(self._echo_text(index))
        offsets = [begin + entry.text_offset for entry in entries]
        logprobs = completion_logprobs(entries, offsets, top_n)
        if not self._echoes or not with_echo:
            return logprobs
        echo = self._echoes[index]
        echoed = echoed_logprobs(echo.first_token, prompt_entries or [], echo.text, top_n)
        return {key: echoed[key] + logprobs[key] for key in logprobs}
