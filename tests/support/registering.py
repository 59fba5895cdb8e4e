"""`Register`s as `DetokenizerManager.add` takes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.protocol.sampling_params import SamplingParams
from engine.protocol.tokenizer_messages import Register


def register(
    rid: int,
    params: SamplingParams,
    prompt_ids: Any,
    output_ids: Iterable[int] = (),
    *,
    return_token_ids: bool = False,
) -> Register:
    """That of a request with its whole prompt."""
    ids = [int(token_id) for token_id in prompt_ids]
    return Register(0, "", rid, params, len(ids), ids, list(output_ids), return_token_ids)
