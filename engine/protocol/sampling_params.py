"""Per-request sampling parameters, as they travel in messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from engine.constraints import ConstraintSpec, verify_constraint
from engine.constraints.grammar_payload import Thinking
from engine.errors import RequestError

MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields whose default a model may set, as in vLLM."""
MAX_LISTED_TOKENS = 128
MAX_TOKEN_IDS = 1024
"""Entries of `stop_token_ids` and of `logit_bias`."""
MAX_BAD_WORD_TOKENS = 4096
"""Tokens of all bad words together."""


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """How to choose the next tokens of one request.

    `n` sequences per prompt: copy i samples with `seed` + i. The engine runs single sequences;
    `engine.LLM` and the ingress make the copies.
    Units: `max_tokens`/`min_tokens` in output tokens. `max_tokens=None` means up to the context
    limit. `top_k` <= 0 and `top_p`=1, `min_p`=0 switch the filter off. `temperature`=0 is greedy.
    `seed` keys the noise (engine/sampling): equal seed and position give equal noise anywhere.
    `logprobs`/`prompt_logprobs`: number of alternatives to report beside the token's own
    log-probability (0 = only its own, None = none). Log-probabilities are of the model's raw
    distribution, before penalties, bias, temperature and filters. `logprob_token_ids`: report these
    tokens, before the likeliest ones (needs `logprobs`).
    `allowed_token_ids`: no other token may be sampled, eos included. `bad_words_ids`: sequences of
    token ids that the output must not hold.
    `constraint`: what the output may be (engine/constraints). An output that is complete ends where
    other fields (`min_tokens`, `allowed_token_ids`, `bad_words_ids`) leave it no token. One that
    isn't ends the request with an error of status 400.
    `thinking`: how the output may begin to think. Then `stop` and `stop_token_ids` are looked for
    in the answer alone, where the text is made; eos ends the thought, too.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    stop: list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words_ids: list[list[int]] = msgspec.field(default_factory=list)
    constraint: ConstraintSpec | None = None
    thinking: Thinking | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]

    def copies(self, fallback_seed: Callable[[], int]) -> list[SamplingParams]:
        """The `n` single-sequence parameters; seeds are drawn where none is given."""
        seeds = copy_seeds(self.seed, self.n, fallback_seed)
        return [msgspec.structs.replace(self, n=1, seed=seed) for seed in seeds]

    @property
    def has_penalties(self) -> bool:
        """Whether the sampler must know which tokens came before."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def verify(self, vocab_size: int) -> None:
        """Raise `RequestError` naming the first field out of range."""
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        # Below 0.01 logits leave float32's range.
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_int("n", self.n, 1, MAX_N)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                "min_tokens",
            )
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings", "stop")
        for text in self.stop:
            if not text or len(text) > MAX_STOP_LENGTH:
                raise RequestError(
                    f"each stop string must have 1 to {MAX_STOP_LENGTH} characters", "stop"
                )
        for name, entries in (
            ("stop_token_ids", len(self.stop_token_ids)),
            ("logit_bias", len(self.logit_bias or ())),
        ):
            if entries > MAX_TOKEN_IDS:
                raise RequestError(f"{name} takes at most {MAX_TOKEN_IDS} token ids", name)
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        if self.logit_bias:
            check_token_ids("logit_bias", list(self.logit_bias), vocab_size)
            for bias in self.logit_bias.values():
                _check_number("logit_bias", bias, -100.0, 100.0)
        self._verify_token_lists(vocab_size)
        if self.constraint is not None:
            verify_constraint(self.constraint, vocab_size)

    def _verify_token_lists(self, vocab_size: int) -> None:
        if self.logprob_token_ids is not None:
            name = "logprob_token_ids"
            if self.logprobs is None:
                raise RequestError(f"{name} needs logprobs", name)
            if not 1 <= len(self.logprob_token_ids) <= MAX_LISTED_TOKENS:
                raise RequestError(f"{name} takes 1 to {MAX_LISTED_TOKENS} token ids", name)
            check_token_ids(name, self.logprob_token_ids, vocab_size)
        if self.allowed_token_ids is not None:
            name = "allowed_token_ids"
            if not self.allowed_token_ids:
                raise RequestError(f"{name} must not be empty", name)
            if len(self.allowed_token_ids) > vocab_size:
                raise RequestError(f"{name} has more entries than the vocabulary", name)
            check_token_ids(name, self.allowed_token_ids, vocab_size)
        if self.bad_words_ids:
            if sum(map(len, self.bad_words_ids)) > MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"bad_words have more than {MAX_BAD_WORD_TOKENS} tokens together", "bad_words"
                )
            for ids in self.bad_words_ids:
                check_prompt(ids, vocab_size, "bad_words")


def copy_seeds(seed: int | None, n: int, draw: Callable[[], int]) -> list[int]:
    """Seeds of `n` copies: `seed`, `seed` + 1, ..., wrapping at 64 bits; drawn if it is None."""
    if seed is None:
        return [draw() for _ in range(n)]
    return [(seed + copy + 2**63) % 2**64 - 2**63 for copy in range(n)]


def _check_number(
    name: str, value: float, low: float, high: float, *, low_open: bool = False
) -> None:
    ok = math.isfinite(value) and value <= high and (value > low if low_open else value >= low)
    if not ok:
        bound = "greater than" if low_open else "at least"
        raise RequestError(
            f"{name} must be a finite number {bound} {low:g} and at most {high:g}, not {value}",
            name,
        )


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        shown = value if _is_short(value) else "one of more than 64 bits"
        raise RequestError(f"{name} must be between {low} and {high}, not {shown}", name)


def _is_short(number: int) -> bool:
    """Whether a message may show the number: clients may send thousands of digits."""
    return abs(number) < 2**64


def check_prompt(ids: Sequence[int] | np.ndarray, vocab_size: int, field: str) -> None:
    """Raise `RequestError` naming `field` for an empty prompt or ids outside the vocabulary."""
    if len(ids) == 0:
        raise RequestError(f"{field} must not be empty", field)
    check_token_ids(field, ids, vocab_size)


def check_token_ids(name: str, ids: Sequence[int] | np.ndarray, vocab_size: int) -> None:
    """Raise `RequestError` naming the field `name` for ids outside the vocabulary."""
    if len(ids) == 0:
        return
    if isinstance(ids, np.ndarray):
        low, high = int(ids.min()), int(ids.max())
    else:
        low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        shown = bad if _is_short(bad) else "of more than 64 bits"
        raise RequestError(
            f"{name}: token id {shown} is outside the vocabulary (0 to {vocab_size - 1})", name
        )
