"""The steady decode that scheduler_cost.py gives to both schedulers, and its measurements.

This imports only numpy, because the peer's environment imports it too.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

PROMPT_LEN = 256
PROMPT_SPREAD = 16
MAX_TOKENS = 512
"""Output tokens of a request: more than there are steps."""
CACHE_BYTES = 64 << 20


@dataclass(frozen=True)
class DecodeLoad:
    """Requests that all decode; none ends. Prompts have 256 to 271 tokens, and no two are alike.

    Lengths are spread, so that with pages of 16 tokens 1/16 of the requests need one every step.
    """

    num_requests: int
    page_size: int
    cold: bool
    """Evict the CPU's caches before each part of a step."""
    tokens: tuple[int, int]
    """Range of ids for prompts and outputs; none of them ends a request."""
    warmup: int
    """Steps before the measured ones."""
    steps: int
    seed: int = 0

    @property
    def prompt_lens(self) -> list[int]:
        """Tokens of each prompt."""
        return [PROMPT_LEN + i % PROMPT_SPREAD for i in range(self.num_requests)]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts. This is the budget of a step, so that all start together."""
        return sum(self.prompt_lens)

    @property
    def kv_tokens(self) -> int:
        """KV slots for every request up to its last token, in whole pages of any size used here."""
        return self.num_requests * (PROMPT_LEN + PROMPT_SPREAD + MAX_TOKENS)

    def prompts(self) -> list[NDArray[np.int32]]:
        """Random token ids of each prompt, int32 [length]."""
        rng = self.rng()
        return [rng.integers(*self.tokens, n, dtype=np.int32) for n in self.prompt_lens]

    def rng(self) -> np.random.Generator:
        """A new generator with the load's seed."""
        return np.random.default_rng(self.seed)


@dataclass
class Measured:
    """One measurement, in us of thread CPU time. A step has two halves."""

    launch_us: list[float] = field(default_factory=list)
    """Time to compose each measured step."""
    result_us: list[float] = field(default_factory=list)
    """Time to process the result of each measured step."""
    context_len: list[float] = field(default_factory=list)
    """Mean tokens of a request before the first and after the last measured step."""
    sound: bool = True
    """Whether every request got a token in every step."""

    @property
    def step_us(self) -> float:
        """Time of the median step, in us."""
        return statistics.median(map(sum, zip(self.launch_us, self.result_us, strict=True)))

    def figures(self) -> dict[str, object]:
        """The figures as plain values for the JSON."""
        return {
            "step_us": self.step_us,
            "launch_us": statistics.median(self.launch_us),
            "result_us": statistics.median(self.result_us),
            "mean_step_us": statistics.fmean(self.launch_us) + statistics.fmean(self.result_us),
            "context_len": self.context_len,
            "sound": self.sound,
        }


class CacheThrash:
    """Evicts all other data from the CPU's caches by reading an array larger than the caches."""

    def __init__(self) -> None:
        self._array = np.ones(CACHE_BYTES // 8)

    def run(self) -> None:
        self._array.sum()
