"""`sampling_params`: from a request's fields, in any dialect, to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from engine.sampling_params import MODEL_DEFAULTS, SamplingParams

_SAME_NAME = (
    "n", "min_tokens", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "stop",
    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "allowed_token_ids",
)  # fmt: skip
"""Fields that dialects have under the engine's name, if they have them. Of the others,
`max_tokens` follows from the prompt's length, and the rest from more than one field."""


def sampling_params(
    body: BaseModel, defaults: Mapping[str, float], **translated: Any
) -> SamplingParams:
    """Parameters of the `n` copies of one prompt.

    `defaults` are the model's, by field, for fields that the request leaves out or sets to null.
    `translated` are fields that the dialect has in another form; they count.
    """
    known, given = type(body).model_fields, body.model_fields_set
    chosen: dict[str, Any] = {}
    for name in MODEL_DEFAULTS:
        value = getattr(body, name, None)
        if name in defaults and (value is None or name not in given):
            value = defaults[name]
        if value is not None:
            chosen[name] = value
    chosen |= {name: getattr(body, name) for name in _SAME_NAME if name in known}
    return SamplingParams(**chosen | translated)
