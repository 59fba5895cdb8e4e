"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from typing import Any

from deploy.http.engine_client import EngineClient, GenerateRequest
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
from deploy.http.openai.logprobs import chat_logprobs, prompt_logprobs
from deploy.http.openai.protocol import ChatCompletionRequest
from deploy.http.openai.sse import ChunkEncoder, encode_json
from engine.errors import RequestError
from engine.protocol.tokenizer_messages import TextDelta


class ChatEndpoint(Endpoint):
    """Renders the conversation with the model's chat template and generates the reply."""

    name = "chat_completions"

    def __init__(self, allow_request_templates: bool) -> None:
        self._allow_request_templates = allow_request_templates

    async def prepare(
        self, client: EngineClient, body: bytes, request_id: str, tracker: RequestTracker
    ) -> Generation:
        request = parse_request(body, ChatCompletionRequest)
        info = client.model_info
        check_model(request.model, info)
        if request.chat_template is not None and not self._allow_request_templates:
            raise RequestError(
                "chat_template in requests is switched off on this server: templates are "
                "programs; use the model's own.",
                "chat_template",
            )
        messages = [message.as_template_input() for message in request.messages]
        check_text_length("".join(m["content"] for m in messages), info, "messages")
        add_generation_prompt = request.add_generation_prompt
        if add_generation_prompt is None:
            add_generation_prompt = not request.continue_final_message
        seeds = request_seeds(request.seed, request.n)
        prompt_ids = await client.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template=request.chat_template,
            template_kwargs=request.chat_template_kwargs or None,
        )
        check_token_ids(prompt_ids, info, "messages")
        by_new_name = request.max_completion_tokens is not None
        fields = Fields("messages", "max_completion_tokens" if by_new_name else "max_tokens")
        asked = request.max_completion_tokens if by_new_name else request.max_tokens
        max_tokens = resolve_max_tokens(len(prompt_ids), asked, None, info, fields)

        request_id = f"chatcmpl-{request.request_id or request_id}"
        sequences = []
        for copy, seed in enumerate(seeds):
            params = request.sampling_params(
                max_tokens,
                seed,
                request.top_logprobs if request.logprobs else None,
                request.prompt_logprobs,
            )
            if copy == 0:
                params.verify(info.vocab_size)
            sequences.append(
                GenerateRequest(
                    request_id=f"{request_id}-{copy}" if request.n > 1 else request_id,
                    prompt_ids=prompt_ids,
                    params=params,
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                    return_token_ids=request.return_token_ids,
                )
            )
        plan = Plan(request_id, int(time.time()), info.name, request.n, sequences)
        return ChatGeneration(client, request, plan, tracker)


class ChatGeneration(Generation):
    """Shapes of chat completions and their chunks."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    payload = "delta"
    _request: ChatCompletionRequest

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        request = self._request
        message = {"role": "assistant", "content": "".join(output.texts), "refusal": None}
        choice = {
            "index": index,
            "message": message,
            "logprobs": (
                chat_logprobs(output.logprobs, request.top_logprobs) if request.logprobs else None
            ),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if request.return_token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def _reply_extra(self) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if self._request.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs(self._outputs[0].prompt_logprobs or [])
        if self._request.return_token_ids:
            extra["prompt_token_ids"] = self._plan.sequences[0].prompt_ids
        return extra

    def _opening(self, encoder: ChunkEncoder) -> bytes:
        role = encode_json({"role": "assistant", "content": ""})
        if not self._request.return_token_ids:
            return b"".join(encoder.chunk(index, role) for index in range(len(self._outputs)))
        extra = {"prompt_token_ids": self._plan.sequences[0].prompt_ids}
        return b"".join(
            encoder.full_chunk(
                index,
                role,
                logprobs=None,
                finish_reason=None,
                stop_reason=None,
                chunk_extra=extra if index == 0 else None,
            )
            for index in range(len(self._outputs))
        )

    def _chunk(self, encoder: ChunkEncoder, index: int, delta: TextDelta) -> bytes:
        request = self._request
        logprobs = delta.logprobs if request.logprobs else None
        token_ids = delta.token_ids if request.return_token_ids else None
        usage = self._chunk_usage(index, delta)
        data = b""
        if delta.text or logprobs or token_ids:
            payload = b'{"content":%s}' % encode_json(delta.text)
            if not logprobs and usage is None:
                data = encoder.chunk(index, payload, token_ids)
            else:
                data = encoder.full_chunk(
                    index,
                    payload,
                    logprobs=chat_logprobs(logprobs, request.top_logprobs) if logprobs else None,
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
