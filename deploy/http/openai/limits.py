"""Checks that need the model: its name, its vocabulary, its context length."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from deploy.http.engine_client import ModelInfo
from engine.errors import RequestError
from engine.sampling_params import copy_seeds

MAX_TOKEN_CHARS = 256
"""No vocabulary known has longer tokens (Llama 3 and GPT-4 reach 128 spaces)."""


class Fields(NamedTuple):
    """Names of the request fields that a complaint about length points to."""

    prompt: str
    max_tokens: str


def check_model(name: str, info: ModelInfo) -> None:
    """Raise `RequestError` (404) unless `name` is the served model's or left out."""
    if name and name != info.name:
        raise RequestError(
            f"The model `{name[:200]}` does not exist; this server has `{info.name}`.",
            "model",
            status=404,
            code="model_not_found",
        )


def check_text_length(text: str, info: ModelInfo, field: str) -> None:
    """Refuse text that can't fit whatever its tokens are, before time is spent on tokenizing."""
    if len(text) > info.max_model_len * MAX_TOKEN_CHARS:
        raise RequestError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, your "
            f"{field} has {len(text)} characters. Please reduce the length of the {field}.",
            field,
            code="context_length_exceeded",
        )


def check_token_ids(ids: list[int], info: ModelInfo, field: str) -> None:
    """Raise `RequestError` for an empty prompt or ids outside the vocabulary."""
    if not ids:
        raise RequestError(f"{field} must not be empty", field)
    low, high = min(ids), max(ids)
    if low < 0 or high >= info.vocab_size:
        bad = low if low < 0 else high
        shown = bad if abs(bad) < 2**63 else "of more than 64 bits"
        raise RequestError(
            f"{field}: token id {shown} is outside the vocabulary (0 to {info.vocab_size - 1})",
            field,
        )


def resolve_max_tokens(
    num_prompt: int, asked: int | None, default: int | None, info: ModelInfo, fields: Fields
) -> int:
    """Output limit of a sequence: `asked`, or as much of `default` (None: all) as fits.

    Raises `RequestError` with code context_length_exceeded if the prompt leaves no room, or not
    `asked` tokens of it.
    """
    room = info.max_model_len - num_prompt
    if room < 1:
        raise RequestError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, your "
            f"{fields.prompt} has {num_prompt} tokens, which leaves no room for a completion. "
            f"Please reduce the length of the {fields.prompt}.",
            fields.prompt,
            code="context_length_exceeded",
        )
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise RequestError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, you "
            f"requested {num_prompt + asked} tokens ({num_prompt} in the {fields.prompt}, {asked} "
            f"in the completion). Please reduce the length of the {fields.prompt} or "
            f"{fields.max_tokens}.",
            fields.max_tokens,
            code="context_length_exceeded",
        )
    return asked


def request_seeds(seed: int | None, n: int) -> list[int]:
    """Seeds of `n` copies: counted up from `seed`, else random.

    Every sequence gets one here, so that it can be resumed elsewhere with the same noise.
    """
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise RequestError("seed must be a 64-bit integer", "seed")
    return copy_seeds(seed, n, lambda: secrets.randbits(63))
