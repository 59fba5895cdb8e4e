"""`Drafter`: guesses the next tokens of requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from engine.errors import ConfigError
from engine.protocol.step import IntArray, ModelWorkerBatch, RowParams
from engine.registry import DRAFTERS, find
from engine.speculative.config import SpeculativeConfig


class Drafter(ABC):
    """Drafts for the requests of a worker, by row.

    Tensor parallel ranks each have one, and see the same calls in the same order. So drafts may
    depend on these alone: no clock, no randomness without a fixed seed. A drafter with a model of
    its own loads it in `attach` and computes in `prefill` and `propose`
    (`engine.worker.draft_model`; EAGLE and MTP heads would, and would read the target's hidden
    states in `prefill`).
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config

    def attach(self, target: Any) -> None:  # noqa: B027 -- most drafters need none
        """The worker whose steps it drafts for is ready; `target` (`DraftTarget`) is what a model
        can share with it. Called once, before all else. Raises `ConfigError`."""

    @abstractmethod
    def install(self, params: RowParams) -> None:
        """A request took a row, in place of the one before. `params.token_ids` are its prompt and
        output so far."""

    @abstractmethod
    def observe(self, row: int, tokens: Sequence[int]) -> None:
        """The request in `row` got these output tokens."""

    @abstractmethod
    def propose(self, rows: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        """At most `counts[i]` guesses of what follows the tokens of each row, in order."""

    def reserve(  # noqa: B027 -- most drafters have no KV cache
        self, rows: IntArray, starts: IntArray, counts: IntArray, slots: IntArray
    ) -> None:
        """KV slots int32 [sum(counts)] of the positions from `starts` [n] on of `rows` [n], which
        the step to be drafted for may use. For drafters with keys and values of their own."""

    def prefill(  # noqa: B027
        self, batch: ModelWorkerBatch, forward: Any
    ) -> None:
        """The target has run a step; `forward` (`ForwardBatch`) are its inputs on the device."""


def make_drafter(config: SpeculativeConfig) -> Drafter:
    """The drafter of `config.method`. Raises `ConfigError` if it isn't there."""
    method = config.method
    if method in DRAFTERS:
        drafter = DRAFTERS[method](config)
    else:
        try:
            drafter = find(method)(config)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"speculative_config.method {method!r} can't be loaded ({error}); it must be "
                f"module:Class, or one of {', '.join(DRAFTERS)}."
            ) from error
    if not isinstance(drafter, Drafter):
        raise ConfigError(
            f"speculative_config.method {method!r} is no engine.speculative.drafter.Drafter."
        )
    return drafter
