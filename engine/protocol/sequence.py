"""`TokenSequence`: one request as every role holds it, from the API's plan to the scheduler."""

from __future__ import annotations

import msgspec
import numpy as np

from engine.protocol.adapters import AdapterRef
from engine.protocol.pooling import Pooling
from engine.protocol.sampling_params import SamplingParams


class KeyLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """The API key that a request came with, and what an engine allows to it. None: no limit.

    The limits of the latest request of a key hold for all of its requests.
    """

    name: str
    max_running: int | None = None
    """Sequences that run at once; others wait, though there is room."""
    max_queued_tokens: int | None = None
    """Prompt tokens that wait at once; a request beyond that is refused (429)."""


class TokenSequence(msgspec.Struct, omit_defaults=True):
    """A prompt, and what is to be made of it: one output or one embedding.

    Whoever plans it makes it; the others hold it, and change nothing.
    """

    prompt_ids: np.ndarray
    """int32 [n], never empty."""
    params: SamplingParams
    request_id: str = ""
    """For logs."""
    priority: int = 0
    namespace: str = ""
    """Of the prefix cache: what its adapter, its API key and `cache_salt` say."""
    key: KeyLimits | None = None
    """None if the server has no keys."""
    pooling: Pooling | None = None
    """Set if an embedding of the prompt is wanted and no tokens; `params` don't matter then."""
    prediction_ids: np.ndarray | None = None
    """int32 [n]: the output that the client expects, as drafts."""
    adapter: AdapterRef | None = None
    """None: the model as it is."""
    return_token_ids: bool = False
    """Every token's delta is needed at once, even if it adds no text."""
    is_flex: bool = False
    """It ranks below all others, and runs in what they leave."""
