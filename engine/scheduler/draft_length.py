"""`DraftLength`: how many drafts a step's lines have.

On a CPU a step of 8 tokens takes little longer than one of 1, and one of 256 tokens twice as long
as one of 128. So the number that gives the most tokens per second depends on the step's size, and
on how many drafts are found and accepted.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate

from engine.protocol.step import GenerationBatchResult
from engine.scheduler.micro_batch import LaunchedStep
from engine.speculative.config import SpeculativeConfig

MAX_TRIALS = 16.0
"""Drafts that acceptance is known from; older ones count less and less."""
SHARE_MEMORY = 0.95
"""Weight of what was known of how many drafts are found, after each step that asked for some."""
MIN_SHARE = 0.02
"""If fewer of the drafts asked for are found, none are asked for: to ask takes time, too."""
TIME_MEMORY = 0.8
"""Weight of what was known of step times of a size, after each such step."""
OUTLIER = 3.0
"""A step that takes so many times as long as expected counts as that."""
PROBE_DRAFTS, PROBE_STEPS = 2, 2
"""How many drafts are tried, and for how many steps, where none are worth it."""
MIN_PROBE_PAUSE, MAX_PROBE_PAUSE = 16, 128
"""Steps until some are tried again; doubled each time."""
MARGIN = 0.05
"""Gain that drafts must promise, in steps that have some: what they take of other processes' time
is not in the step times."""


class StepTimes:
    """Seconds of steps by their number of tokens."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._seconds: list[float] = []
        self._rising: list[float] = []
        """`_seconds`, or those of a smaller size where they are more."""

    def observe(self, tokens: int, seconds: float) -> None:
        """A step with `tokens` took `seconds`."""
        size = _bucket(tokens)
        at = bisect.bisect_left(self._sizes, size)
        if at == len(self._sizes) or self._sizes[at] != size:
            self._sizes.insert(at, size)
            self._seconds.insert(at, seconds)
        else:
            known = self._seconds[at]
            seconds = min(seconds, OUTLIER * known)
            self._seconds[at] = TIME_MEMORY * known + (1 - TIME_MEMORY) * seconds
        self._rising = list(accumulate(self._seconds, max))

    def estimate(self, tokens: float) -> float:
        """Seconds of a step with `tokens`, between those of the sizes seen; 0.0 if none was.

        Beyond the largest size it is that of the largest, and below the smallest it falls with the
        size: what was never tried is thought well of, until it is. Times never fall with the size.
        """
        sizes, seconds = self._sizes, self._rising
        at = bisect.bisect_right(sizes, tokens)
        if at == 0:
            return seconds[0] * tokens / sizes[0] if sizes else 0.0
        if at == len(sizes):
            return seconds[-1]
        share = (tokens - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])


class DraftLength:
    """Chooses the number of drafts before each step, and learns from each result.

    If a share s of the lines find drafts, a step of B lines with k drafts each takes the time of B
    (1 + s k) tokens, and gives B (1 + s (p + ... + p^k)) tokens if each draft is accepted with
    probability p. The k that gives the most tokens per second is chosen. Step times are kept by the
    number of tokens, and acceptance and share over the last steps (the share only where the worker
    drafts while the step is in flight). k = 0 is the ordinary step; then a step with drafts is
    tried now and then.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.most = config.num_speculative_tokens
        self._is_fixed = config.draft_length == "fixed"
        self._times = StepTimes()
        self._accepted, self._tried = 1.0, 2.0
        self._share = 1.0
        """Of the drafts that steps asked for, those that were found."""
        self._pause = MIN_PROBE_PAUSE
        self._until_probe = 0

    @property
    def acceptance(self) -> float:
        """Share of the drafts compared that were accepted, over the last of them."""
        return self._accepted / self._tried

    def choose(self, num_rows: int) -> int:
        """The most drafts that each of `num_rows` decodes may have in the next step."""
        if self._is_fixed or num_rows == 0:
            return self.most
        best = self._best(num_rows) if self._share >= MIN_SHARE else 0
        if best:
            self._pause = self._until_probe = MIN_PROBE_PAUSE
            return best
        self._until_probe -= 1
        if self._until_probe >= PROBE_STEPS:
            return 0
        if self._until_probe <= 0:
            self._pause = min(2 * self._pause, MAX_PROBE_PAUSE)
            self._until_probe = self._pause
        return min(PROBE_DRAFTS, self.most)

    def observe(self, step: LaunchedStep, result: GenerationBatchResult) -> None:
        """A step is back."""
        if self._is_fixed:
            return
        tokens = len(step.sampled) + sum(result.num_drafts or ())
        if step.drafts is not None:
            planned = step.drafts[1].tolist()
            first = len(step.sampled) - len(planned)
            gave = (result.num_tokens or [1] * len(step.sampled))[first:]
            drafted = (result.num_drafts or [0] * len(step.sampled))[first:]
            if step.forced:  # what constraints know says nothing of the drafter
                free = [i for i in range(len(planned)) if i not in step.forced]
                gave, drafted = [gave[i] for i in free], [drafted[i] for i in free]
                planned = [planned[i] for i in free]
            self._observe_drafts(gave, drafted, sum(planned))
        is_decode = len(step.sampled) == len(step.reqs) and not step.num_landed
        if is_decode and result.period_s is not None:
            self._times.observe(tokens, result.period_s)

    def _observe_drafts(
        self, num_tokens: Sequence[int], num_drafted: Sequence[int], planned: int
    ) -> None:
        """`planned` drafts were allowed in all; rows had `num_drafted` and gave `num_tokens`."""
        accepted = tried = 0
        for tokens, drafted in zip(num_tokens, num_drafted, strict=True):
            if drafted and tokens:
                accepted += tokens - 1
                tried += min(tokens, drafted)
        if planned:
            found = sum(num_drafted) / planned
            remembered = SHARE_MEMORY * self._share + (1 - SHARE_MEMORY) * found
            # Where hardly any were found for long, a find is news.
            self._share = found if self._share < MIN_SHARE < found else remembered
        if tried:
            self._accepted += accepted
            self._tried += tried
            if self._tried > MAX_TRIALS:
                self._accepted *= MAX_TRIALS / self._tried
                self._tried = MAX_TRIALS

    def _best(self, num_rows: int) -> int:
        """The number of drafts that promises the most tokens per second."""
        rate = min(self.acceptance, 0.99)
        share = self._share
        alone = self._times.estimate(num_rows)
        if alone == 0.0:
            return self.most
        # Steps in which no row has drafts cost hardly more.
        margin = MARGIN * min(1.0, share * num_rows)
        best, best_speed = 0, (1.0 + margin) / alone
        tokens, chance = 1.0, share
        for count in range(1, self.most + 1):
            chance *= rate
            tokens += chance
            speed = tokens / self._times.estimate(num_rows * (1.0 + share * count))
            if speed > best_speed:
                best, best_speed = count, speed
        return best


def _bucket(tokens: int) -> int:
    """The size whose time a step with `tokens` counts for: four to each doubling above 8."""
    if tokens <= 8:
        return tokens
    step = 1 << (tokens.bit_length() - 3)
    return tokens // step * step
