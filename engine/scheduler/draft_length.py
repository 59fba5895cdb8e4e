"""`DraftLength`: how many drafts a step's rows have."""

from __future__ import annotations

from engine.protocol.messages import GenerationBatchResult
from engine.scheduler.micro_batch import LaunchedStep
from engine.speculative.config import SpeculativeConfig


class DraftLength:
    """Chooses the number of drafts."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._most = config.num_speculative_tokens

    def choose(self, num_rows: int) -> int:
        """The most drafts that each of `num_rows` decode rows may have in the next step."""
        return self._most

    def observe(self, step: LaunchedStep, result: GenerationBatchResult) -> None:
        """A step is back."""
