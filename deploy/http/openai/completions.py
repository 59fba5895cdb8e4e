"""`POST /v1/completions`."""

# No `from __future__ import annotations`: pydantic reads the annotations of the request.
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from pydantic import model_validator

from deploy.http.body import encode_json, refusal
from deploy.http.engine_client import EngineClient, ModelInfo
from deploy.http.generation.endpoint import Endpoint
from deploy.http.generation.generation import Generation, Output
from deploy.http.generation.plan import Plan, plan_texts
from deploy.http.generation.read_on import ForgetRoute, ReadOnRoute
from deploy.http.generation.request import FieldNames, Incoming, TextRequest
from deploy.http.metrics import RequestTracker
from deploy.http.openai.generation import OpenAIGeneration
from deploy.http.openai.logprobs import completion_logprobs, echoed_logprobs, prompt_logprobs
from deploy.http.openai.replies import Completion, CompletionChunk, Error
from deploy.http.openai.request import (
    MAX_PROMPTS,
    UNSUPPORTED,
    GenerationFields,
    Prompts,
    documented,
)
from deploy.http.openai.sse import ChunkEncoder
from engine.protocol.sampling_params import MAX_LOGPROBS
from engine.protocol.tokenizer_messages import LogprobEntry, TextDelta

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions; chats may use the rest of the context."""


class CompletionRequest(GenerationFields):
    """Body of `POST /v1/completions`."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **UNSUPPORTED,
        "suffix": ("",),
        "prompt_embeds": (),
    }

    prompt: Prompts
    echo: bool = False
    logprobs: int | None = documented(None, minimum=0, maximum=MAX_LOGPROBS)
    best_of: int | None = None
    add_special_tokens: bool = True

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @model_validator(mode="after")
    def _check_completion(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != self.n:
            raise refusal("best_of other than n is not supported yet.", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise refusal("max_tokens must be at least 1 (0 only with echo).", "max_tokens")
        if self.n * len(self.prompt) > MAX_PROMPTS:
            raise refusal(f"n times prompts must not exceed {MAX_PROMPTS}.", "n")
        return self


class CompletionEndpoint(Endpoint):
    """Continues prompts, which are texts or token ids."""

    name = "completions"
    paths = ("/v1/completions",)
    description = "As OpenAI's `POST /v1/completions`, with the fields below."
    body = CompletionRequest
    reply = Completion
    events = (CompletionChunk, Error)
    done = "[DONE]"

    async def prepare(
        self,
        client: EngineClient,
        fields: CompletionRequest,
        incoming: Incoming,
    ) -> Generation[Any]:
        request_id = f"cmpl-{fields.request_id or incoming.id}"
        request = translate(fields, request_id, client.model_info)
        plan = await plan_texts(client, self.settings.server, request, incoming)
        echoes = await _echoes(client, fields, plan) if fields.echo else []
        return CompletionGeneration(client, fields, plan, incoming.tracker, echoes)


class ReadCompletionRoute(ReadOnRoute):
    """`GET /v1/completions/{record_id}`."""

    endpoint = CompletionEndpoint


class ForgetCompletionRoute(ForgetRoute):
    """`DELETE /v1/completions/{record_id}`."""

    endpoint = CompletionEndpoint
    object_name = "text_completion"


def translate(given: CompletionRequest, request_id: str, info: ModelInfo) -> TextRequest:
    """The request that a body stands for. Raises `RequestError`."""
    prompt_top = given.prompt_logprobs
    if given.echo and given.logprobs is not None:
        prompt_top = max(given.logprobs, -1 if prompt_top is None else prompt_top)
    return TextRequest(
        **given.common(request_id, given.logprobs, prompt_top, info),
        # A sequence always makes a token; with `max_tokens` 0 it is dropped again.
        max_tokens=1 if given.max_tokens == 0 else given.max_tokens,
        default_max_tokens=COMPLETION_MAX_TOKENS,
        names=FieldNames("prompt", "max_tokens"),
        prompts=given.prompt,
        add_special_tokens=given.add_special_tokens,
    )


class Echo(NamedTuple):
    """A prompt as its completions repeat it. The others are set only for log-probabilities:
    `num_added` characters are those of special tokens before `text`, which isn't the whole prompt
    then."""

    text: str
    first_token: str = ""
    num_added: int = 0


async def _echoes(client: EngineClient, request: CompletionRequest, plan: Plan) -> list[Echo]:
    echoes = []
    for given, sequence in zip(request.prompt, plan.sequences[:: plan.n], strict=True):
        ids = sequence.prompt_ids.tolist()
        is_given = isinstance(given, str) and request.truncate_prompt_tokens is None
        if is_given and request.logprobs is None:
            echoes.append(Echo(given))
            continue
        decoded = await client.decode(ids)
        text = given if is_given else decoded
        if request.logprobs is None:
            echoes.append(Echo(text))
            continue
        first = request.logprob_style(0).name(await client.decode(ids[:1]), ids[0])
        echoes.append(Echo(text, first, len(decoded) - len(text)))
    return echoes


class CompletionGeneration(OpenAIGeneration[CompletionRequest]):
    """Shapes of completions and their chunks."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"
    payload = "text"

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
        for output in self._outputs:
            output.is_dropped = request.max_tokens == 0
        self._style = request.logprob_style(request.logprobs or 0)
        self._is_plain = request.logprobs is None and not request.stream_options.usage_always
        """All chunks between the first and the last hold only text, and tokens if asked for."""

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        request = self._request
        return {
            "index": index,
            "text": self._echo_text(index) + "".join(output.texts),
            "logprobs": self._logprobs(index, output.logprobs, True),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "matched_stop": output.stop_reason,
            "token_ids": output.token_ids if request.return_token_ids else None,
            **self._prompt_fields(index),
        }

    def _prompt_fields(self, index: int) -> dict[str, Any]:
        """What the request wants to know of its prompt; null if it doesn't."""
        request = self._request
        found = self._outputs[index].prompt_logprobs or []
        ids = self._plan.sequences[index].prompt_ids
        return {
            "prompt_logprobs": (
                None if request.prompt_logprobs is None else prompt_logprobs(found)
            ),
            "prompt_token_ids": ids.tolist() if request.return_token_ids else None,
        }

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
        prompt_fields: dict[str, Any] = {}
        if opens:
            found = self._prompt_fields(index)
            prompt_fields = {key: value for key, value in found.items() if value is not None}
        if self._is_plain and finish_reason is None and not prompt_fields:
            return encoder.chunk(index, payload, token_ids)
        return encoder.full_chunk(
            index,
            payload,
            logprobs=self._logprobs(index, delta.logprobs or [], opens),
            finish_reason=finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=token_ids,
            choice_extra=prompt_fields,
            usage=self._chunk_usage(index, delta.num_output),
        )

    def _echo_text(self, index: int) -> str:
        return self._echoes[index].text if self._echoes else ""

    def _logprobs(
        self,
        index: int,
        entries: list[LogprobEntry],
        with_echo: bool,
    ) -> dict[str, list[Any]] | None:
        if self._request.logprobs is None:
            return None
        begin = len(self._echo_text(index))
        offsets = [begin + entry.text_offset for entry in entries]
        logprobs = completion_logprobs(entries, offsets, self._style)
        if not self._echoes or not with_echo:
            return logprobs
        echo = self._echoes[index]
        prompt_entries = self._outputs[index].prompt_logprobs or []
        echoed = echoed_logprobs(
            echo.first_token, prompt_entries, echo.text, echo.num_added, self._style
        )
        return {key: echoed[key] + logprobs[key] for key in logprobs}
