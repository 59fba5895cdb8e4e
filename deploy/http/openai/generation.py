"""What completions and chat completions have in common: errors, replies, streams."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from deploy.http.body import encode_json
from deploy.http.generation.generation import Generation, Output
from deploy.http.openai.request import FLEX, GenerationFields
from deploy.http.openai.sse import DONE, ChunkEncoder
from engine.protocol.tokenizer_messages import TextDelta

F = TypeVar("F", bound=GenerationFields)


class OpenAIGeneration(Generation[F]):
    """Replies with `choices`. Subclasses know the shape of a choice."""

    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]
    payload: ClassVar[str]

    @cached_property
    def _encoder(self) -> ChunkEncoder:
        with_usage = self._request.stream_options.usage_at_end
        head = self._head(self.chunk_object_name)
        if self._plan.request.is_flex:
            head["service_tier"] = FLEX
        return ChunkEncoder(head, self.payload, len(self._plan.sequences), with_usage)

    def _head(self, object_name: str) -> dict[str, Any]:
        """What a reply and every chunk begin with."""
        plan = self._plan
        return {
            "id": plan.request.id,
            "object": object_name,
            "created": plan.created,
            "model": plan.model,
        }

    def _reply(self) -> bytes:
        return encode_json(self._body())

    def _body(self) -> dict[str, Any]:
        """The reply in one piece."""
        body = {
            **self._head(self.object_name),
            "service_tier": FLEX if self._plan.request.is_flex else None,
            "system_fingerprint": None,
            "kv_transfer_params": None,
            "choices": [self._choice(i, output) for i, output in enumerate(self._outputs)],
            "usage": self._usage(),
        }
        return body | self._reply_extra()

    def _opening(self) -> bytes:
        return b""

    def _events(self, index: int, delta: TextDelta) -> bytes:
        return self._chunk(self._encoder, index, delta)

    def _ending(self) -> bytes:
        if self._request.stream_options.usage_at_end:
            return self._encoder.usage_chunk(self._usage()) + DONE
        return DONE

    def _usage(self) -> dict[str, Any]:
        """The usage of the whole request."""
        return usage(self._num_prompt, self._num_output, self._num_cached)

    def _chunk_usage(self, index: int, num_output: int) -> dict[str, Any] | None:
        """Usage of one choice so far, if asked for in every chunk (as vLLM counts it).

        `num_output`: output tokens so far.
        """
        if not self._request.stream_options.usage_always:
            return None
        output = self._outputs[index]
        num_prompt = len(self._plan.sequences[index].prompt_ids)
        return usage(num_prompt, num_output, output.num_cached)

    def _reply_extra(self) -> dict[str, Any]:
        """Further fields of the reply."""
        return {}

    @abstractmethod
    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        """`choices[index]` of a reply in one piece."""

    @abstractmethod
    def _chunk(self, encoder: ChunkEncoder, index: int, delta: TextDelta) -> bytes:
        """Events for one delta; empty if the client needs none."""


def usage(num_prompt: int, num_output: int, num_cached: int) -> dict[str, Any]:
    """The `usage` object of a reply; the arguments are numbers of tokens."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
