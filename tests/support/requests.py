"""Messages with requests."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.protocol.messages import AddRequest
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.sequence import TokenSequence

_OWN = ("reply_to", "owner", "output_ids", "page_hashes")


def add_request(rid: int, input_ids: Any, params: SamplingParams, **fields: Any) -> AddRequest:
    """`fields` are those of `AddRequest` and of `TokenSequence`."""
    own = {name: fields.pop(name) for name in _OWN if name in fields}
    sequence = TokenSequence(np.asarray(input_ids, np.int32), params, **fields)
    return AddRequest(rid=rid, sequence=sequence, **own)
