"""What `engine.LLM` returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.pooling import FloatArray
from engine.protocol.tokenizer_messages import LogprobEntry


@dataclass
class CompletionOutput:
    """One finished sequence. `token_ids` include the eos or stop token that ended it."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[LogprobEntry] = field(default_factory=list)


@dataclass
class RequestOutput:
    """A prompt and the `n` sequences generated for it.

    `num_cached_tokens` tokens of the prompt came from the prefix cache (for the first sequence).
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[LogprobEntry | None] | None = None


@dataclass
class EmbeddingOutput:
    """A prompt and its `embedding`, float32 [dimensions, or hidden size].

    `num_cached_tokens` tokens of the prompt came from the prefix cache.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    embedding: FloatArray
    num_cached_tokens: int = 0
