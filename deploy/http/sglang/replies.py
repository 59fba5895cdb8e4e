"""The shapes of replies, for the OpenAPI document. Replies are encoded without them."""

# No `from __future__ import annotations`: pydantic reads the annotations.
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, RootModel


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class SGLangErrorBody(_Shape):
    """What went wrong."""

    message: str


class SGLangError(_Shape):
    """Reply of every request that failed."""

    error: SGLangErrorBody


class StopEnd(_Shape):
    """The output ended by itself. `matched`: the stop string, or the token id (eos, too)."""

    type: Literal["stop"]
    matched: str | int | None


class LengthEnd(_Shape):
    """The output has as many tokens as it may have."""

    type: Literal["length"]
    length: int


class AbortEnd(_Shape):
    """Somebody aborted the request."""

    type: Literal["abort"]
    message: str
    status_code: int | None
    err_type: str | None


TokenLogprob = tuple[float | None, int, str | None]
"""Log-probability, token id, text."""


class MetaInfo(_Shape):
    """About one sequence."""

    id: str
    finish_reason: StopEnd | LengthEnd | AbortEnd | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    e2e_latency: float | None = None
    """Seconds since the request came."""
    input_token_logprobs: list[TokenLogprob] | None = None
    output_token_logprobs: list[TokenLogprob] | None = None
    input_top_logprobs: list[list[TokenLogprob] | None] | None = None
    output_top_logprobs: list[list[TokenLogprob]] | None = None
    input_token_ids_logprobs: list[list[TokenLogprob] | None] | None = None
    output_token_ids_logprobs: list[list[TokenLogprob]] | None = None


class Generated(_Shape):
    """One sequence."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class GenerateReply(RootModel[Generated | list[Generated]]):
    """Reply of `POST /generate`: a list if the prompts were one, or with `n` above 1."""


class GeneratedChunk(Generated):
    """`data` of an event of `POST /generate`: a sequence so far, with its number among several."""

    index: int | None = None


class HealthReply(_Shape):
    """Reply of a check that found nothing wrong."""

    status: Literal["ok"]


class Aborted(_Shape):
    """Reply of `POST /abort_request`: every process has been told."""

    success: Literal[True]


class SGLangModelInfo(_Shape):
    """Reply of `GET /model_info`."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: Literal[True]
    max_model_len: int
    vocab_size: int
    preferred_sampling_params: None
    weight_version: str
    has_image_understanding: Literal[False]
    has_audio_understanding: Literal[False]


class SGLangServerInfo(BaseModel):
    """Reply of `GET /server_info`: the configuration in effect, and the state of each engine."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    version: str
    model_path: str
    served_model_name: str
    max_total_num_tokens: int
    internal_states: list[dict[str, Any]]
