"""`Progress`: what a sequence has given over all its attempts, and whether it may go on.

A request's tokens depend on nothing but the request (greedy, or noise hashed from seed and
position), so an engine that is given prompt and output continues where another one stopped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
import numpy as np

from engine.errors import EngineDeadError, RequestError
from engine.protocol.messages import AddRequest
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.sequence import TokenSequence
from engine.protocol.tokenizer_messages import PROMPT_TAIL, Register, TextDelta

SUSPECT_LOSSES = 2
"""Engines lost without a new token in between that make a request suspect of ending them."""
MAX_LOSSES_ALONE = 2
"""A request is given up after this number of engines lost on which it was the only request."""
MAX_LOSSES = 4
"""A request is also given up after this number of engines lost in all. It was on trial for two of
them: one trial could be chance if engines end for other reasons soon after their start."""
RETRY_PAUSE_S = 0.3


class Loss(StrEnum):
    """Why an attempt ended before its request had."""

    ENGINE = "engine"
    """An engine was lost while it held the request."""
    TOKENIZER = "tokenizer"
    DRAIN = "drain"
    """An engine gave the request back."""
    BUSY = "busy"
    """An engine's queue was full."""
    NOT_TAKEN = "not_taken"
    """No engine has taken the request."""


RESUMED = (Loss.ENGINE, Loss.TOKENIZER, Loss.DRAIN)
"""Losses of work under way; they count as resumes."""


class AttemptLostError(Exception):
    """The attempt is over; the request may go on with another one.

    `in_company`: the engine held other requests too, any of which may have ended it.
    """

    def __init__(self, loss: Loss, detail: str, *, in_company: bool = False) -> None:
        super().__init__(loss, detail)
        self.loss = loss
        self.in_company = in_company

    def __str__(self) -> str:
        return f"{self.loss} lost: {self.args[1]}"


@dataclass(frozen=True)
class ResumeLimits:
    """`wait_s`: seconds that a request waits for an engine that takes it. `max_resumes`: attempts
    after the first one."""

    wait_s: float = 60.0
    max_resumes: int = 16


@dataclass
class Progress:
    """The progress of one sequence. `resumes` counts resumes by loss, over all sequences."""

    sequence: TokenSequence
    limits: ResumeLimits
    resumes: Counter[str]
    clock: Callable[[], float] = time.monotonic
    output_ids: list[int] = field(default_factory=list)
    """Tokens that the reader has got."""
    known_ids: Sequence[int] = ()
    """The first tokens of the output, as an earlier answer to the request had them. The last one of
    them is made once more: it may have ended the output."""
    _num_cached: int | None = None
    _num_resumes: int = 0
    _num_losses: int = 0
    """Engines lost since the last new token."""
    _num_losses_alone: int = 0
    _output_at_loss: int = 0

    def __post_init__(self) -> None:
        self._waiting_since = self.clock()

    @property
    def is_suspect(self) -> bool:
        """Whether `SUSPECT_LOSSES` engines in a row were lost under the request without a new
        token. Its next attempt is then a trial, during which no other suspect runs."""
        return self._num_losses >= SUSPECT_LOSSES and len(self.output_ids) == self._output_at_loss

    @property
    def wait_left_s(self) -> float:
        """Seconds that the next attempt may wait until an engine takes it."""
        return max(0.0, self._waiting_since + self.limits.wait_s - self.clock())

    @property
    def params(self) -> SamplingParams:
        """Parameters for the next attempt. Prompt log-probabilities aren't asked for again."""
        params = self.sequence.params
        if params.prompt_logprobs is None or self._num_cached is None:
            return params
        return msgspec.structs.replace(params, prompt_logprobs=None)

    def add_request(self, rid: int, reply_to: str) -> AddRequest:
        """The message that gives the next attempt to an engine."""
        sequence = self.sequence
        if self.params is not sequence.params:
            sequence = msgspec.structs.replace(sequence, params=self.params)
        known = self.known_ids[:-1]
        ids = known if len(known) > len(self.output_ids) else self.output_ids
        emitted = np.asarray(ids, np.int32) if ids else None
        return AddRequest(rid=rid, sequence=sequence, reply_to=reply_to, output_ids=emitted)

    def register(self, call: int, reply_to: str, rid: int) -> Register:
        """The message that announces the next attempt to the tokenizer."""
        params, prompt_ids = self.params, self.sequence.prompt_ids
        tail = prompt_ids[-PROMPT_TAIL:] if params.prompt_logprobs is None else prompt_ids
        return Register(
            call,
            reply_to,
            rid,
            params,
            len(prompt_ids),
            tail.tolist(),
            self.output_ids,
            self.sequence.return_token_ids,
            list(self.known_ids[len(self.output_ids) : -1]),
        )

    def take_known(self, delta: TextDelta) -> None:
        """As `take`, of known tokens: no engine has had the request yet."""
        self.output_ids += delta.token_ids

    def take(self, delta: TextDelta) -> None:
        """Note a delta before the reader gets it, and make it fit to what the reader got before.

        Raises `AttemptLostError` if tokens before it never arrived, `RequestError` if the engine
        refused or failed the request.
        """
        if delta.finish_reason == "error":
            self._refuse(delta)
        if delta.num_output != len(self.output_ids) + len(delta.token_ids):
            raise AttemptLostError(Loss.ENGINE, "tokens are missing")
        self.output_ids += delta.token_ids
        if self._num_cached is None:
            self._num_cached = min(delta.num_cached, delta.num_prompt)
        delta.num_cached = self._num_cached

    def _refuse(self, delta: TextDelta) -> None:
        if delta.error_status == 429 and self._num_resumes and self.wait_left_s > 0:
            raise AttemptLostError(Loss.BUSY, delta.error)
        raise RequestError(delta.error, delta.error_param, status=delta.error_status or 500)

    def lost(self, error: AttemptLostError) -> float:
        """Note that an attempt is lost. Returns the seconds until the next attempt; raises the
        reader's error if there is none."""
        loss = error.loss
        if loss not in RESUMED:
            if self.wait_left_s <= 0:
                raise EngineDeadError(f"waited {self.limits.wait_s:g} s: {error}") from error
            return RETRY_PAUSE_S
        if loss is Loss.ENGINE:
            self._blame(error.in_company)
        self._num_resumes += 1
        if self._num_resumes > self.limits.max_resumes:
            raise _repeatedly(f"{self.limits.max_resumes} attempts to resume were lost")
        self.resumes[loss] += 1
        self._waiting_since = self.clock()
        return 0.0

    def _blame(self, in_company: bool) -> None:
        if len(self.output_ids) > self._output_at_loss:
            self._num_losses = self._num_losses_alone = 0
        self._num_losses += 1
        self._num_losses_alone += not in_company
        self._output_at_loss = len(self.output_ids)
        if self._num_losses >= MAX_LOSSES or self._num_losses_alone >= MAX_LOSSES_ALONE:
            count = self._num_losses
            raise _repeatedly(f"{count} engines in a row were lost while they worked on it")


def _repeatedly(what: str) -> RequestError:
    return RequestError(
        f"The request was given up: {what}.", status=500, code="engine_lost_repeatedly"
    )
