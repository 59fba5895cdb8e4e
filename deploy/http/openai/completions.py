"""`POST /v1/completions`."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from deploy.http.engine_client import EngineClient, GenerateRequest, ModelInfo
from deploy.http.metrics import RequestTracker
from deploy.http.openai.body import parse_request
from deploy.http.openai.endpoint import Endpoint
from deploy.http.openai.generation import Generation, Output, Plan
from deploy.http.openai.limits import (
    Fields,
    check_model,
    check_text_length,
    check_token_ids,
    request_seeds,
    resolve_max_tokens,
)
from deploy.http.openai.logprobs import completion_logprobs, echoed_logprobs, prompt_logprobs
from deploy.http.openai.protocol import COMPLETION_MAX_TOKENS, CompletionRequest
from deploy.http.openai.sse import ChunkEncoder, encode_json
from engine.protocol.tokenizer_messages import LogprobEntry, TextDelta

_FIELDS = Fields("prompt", "max_tokens")


class CompletionEndpoint(Endpoint):
    """Goes on from texts or token ids."""

    name = "completions"

    async def prepare(
        self, client: EngineClient, body: bytes, request_id: str, tracker: RequestTracker
    ) -> Generation:
        request = parse_request(body, CompletionRequest)
        info = client.model_info
        check_model(request.model, info)
        seeds = request_seeds(request.seed, request.n)
        prompts = await _encode(client, request, info)
        request_id = f"cmpl-{request.request_id or request_id}"
        # A sequence always makes a token; one that nobody asked for is dropped again.
        asked = 1 if request.max_tokens == 0 else request.max_tokens
        prompt_top = request.prompt_logprobs
        if request.echo and request.logprobs is not None:
            prompt_top = max(request.logprobs, -1 if prompt_top is None else prompt_top)
        sequences: list[GenerateRequest] = []
        for prompt_ids in prompts:
            max_tokens = resolve_max_tokens(
                len(prompt_ids), asked, COMPLETION_MAX_TOKENS, info, _FIELDS
            )
            if request.seed is None and sequences:
                seeds = request_seeds(None, request.n)
            for seed in seeds:
                params = request.sampling_params(max_tokens, seed, request.logprobs, prompt_top)
                if not sequences or params.max_tokens != sequences[-1].params.max_tokens:
                    params.verify(info.vocab_size)
                sequences.append(
                    GenerateRequest(
                        request_id=request_id,
                        prompt_ids=prompt_ids,
                        params=params,
                        priority=request.priority,
                        cache_salt=request.cache_salt,
                        return_token_ids=request.return_token_ids,
                    )
                )
        if len(sequences) > 1:
            for index, sequence in enumerate(sequences):
                sequence.request_id = f"{request_id}-{index}"
        echoes = await _echoes(client, request, prompts) if request.echo else []
        plan = Plan(request_id, int(time.time()), info.name, request.n, sequences)
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
        check_token_ids(ids, info, "prompt")
    return prompts


class Echo(NamedTuple):
    """A prompt as it is put before its completions; `first_token` only for log-probabilities."""

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
        """Chunks but the first and the last have nothing but text, and tokens if asked for."""

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
