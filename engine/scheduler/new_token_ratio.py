"""How much of its allowed output a running request is expected to still need.

SGLang's rule: start careful, decay while decoding goes well, jump up after a retraction.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.scheduler.req import Req

INIT_RATIO = 0.7
MIN_FACTOR = 0.14
DECAY_STEPS = 600
RETRACT_LOOKAHEAD = 20
CLIP_MAX_NEW_TOKENS = 4096


class NewTokenRatio:
    """`value` in (0, 1]: share of the remaining allowed output to reserve at admission."""

    def __init__(self, conservativeness: float) -> None:
        self.initial = min(INIT_RATIO * conservativeness, 1.0)
        self.minimum = self.initial * MIN_FACTOR
        self.decay = (self.initial - self.minimum) / DECAY_STEPS
        self.value = self.initial

    def on_decode(self) -> None:
        """Lower `value`: a decode step went through without retraction."""
        self.value = max(self.value - self.decay, self.minimum)

    def on_retract(self, running: Sequence[Req]) -> None:
        """Raise `value`: requests were retracted, and `running` are those left."""
        decoded = sum(len(r.output_ids) for r in running) + RETRACT_LOOKAHEAD * len(running)
        allowed = sum(r.max_new_tokens for r in running) + 1
        self.value = min(1.0, max(decoded / allowed, self.value))

    def reset(self) -> None:
        """Go back to the initial value, when the engine is idle."""
        self.value = self.initial

    def reserve(self, req: Req) -> int:
        """Tokens to keep free for a running request's future output."""
        remaining = min(req.max_new_tokens - len(req.output_ids), CLIP_MAX_NEW_TOKENS)
        return remaining if req.params.ignore_eos else int(remaining * self.value)
