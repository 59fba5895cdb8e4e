"""`ChunkSizer`: shorter prompt chunks behind longer prefixes, so that all take the same time.

Attention reads the whole prefix, so equal chunks of one long prompt take longer and longer. Then a
pipeline's stages wait for each other, and decodes in the same steps get slower tokens.

Source: SGLang's dynamic chunking (lmsys.org/blog/2026-01-15-chunked-pipeline).
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

import numpy as np

ALIGNMENT = 64
"""Tokens. Matrix products run best on multiples of this."""
MIN_POINTS = 8
WARM_UP = 2
"""Number of first observations that are dropped: first steps allocate and compile."""
WINDOW = 128
REFIT_EVERY = 8
SMOOTHING = 0.5
"""Share of the way that the coefficients move at each fit."""
OUTLIER_MADS = 5.0
"""Observations with a residual above this many median absolute deviations are left out: the host
was busy."""
MAX_TRIMS = 3
SHORTEST_S, LONGEST_S = 1e-6, 3600.0
"""Times outside of this range can only be errors of a clock. They are ignored, because they would
overflow in the fit."""

FloatMatrix = np.ndarray[Any, np.dtype[np.float64]]


class Observation(NamedTuple):
    """A step that ran one chunk and nothing else."""

    num_tokens: int
    prefix_len: int
    seconds: float


class Fit(NamedTuple):
    """Coefficients of t(p, n) that sizes need, in seconds and not negative."""

    a: float
    b: float


class ChunkSizer:
    """Computes the size of the next chunk from the times of earlier chunks. It reads no clock.

    The time to prefill L tokens is fitted as f(L) = a L^2 + b L + c and the next chunk behind a
    prefix of L tokens is the x with f(L + x) - f(L) = f(base) - f(0). SGLang fits times of whole
    prompts that it runs at start; here the chunks of real prompts are fitted, which take

        t(p, n) = f(p + n) - f(p) + c = a n (2p + n) + b n + c

    for n tokens behind a prefix of p. A window of observations smooths the fit, and the
    coefficients move only part of the way. SGLang mixes the base size into the result instead.

    Sizes lie between a quarter of the base size and the base size, in whole pages, and in multiples
    of about `ALIGNMENT` where the base size has room for that. Until there are enough observations,
    and where these show no growth with the prefix, the base size is used.
    """

    def __init__(self, base_size: int, page_size: int) -> None:
        """`base_size`: tokens of a chunk without a prefix, at least `page_size`."""
        if not 1 <= page_size <= base_size:
            raise ValueError(f"base_size ({base_size}) must hold a page of {page_size} tokens")
        self.base_size = base_size // page_size * page_size
        self.unit = page_size * max(1, min(ALIGNMENT, self.base_size // 4) // page_size)
        """Sizes below the base size are multiples of it."""
        quarter = -(-self.base_size // (4 * self.unit)) * self.unit
        self.min_size = min(quarter, self.base_size)
        self.fit: Fit | None = None
        self._points: deque[Observation] = deque(maxlen=WINDOW)
        self._observed = 0

    def observe(self, num_tokens: int, prefix_len: int, seconds: float) -> None:
        """Learn that a step with one chunk of `num_tokens` behind `prefix_len` took `seconds`."""
        if num_tokens < 1 or not SHORTEST_S <= seconds <= LONGEST_S:
            return
        self._observed += 1
        if self._observed <= WARM_UP:
            return
        self._points.append(Observation(num_tokens, prefix_len, seconds))
        if len(self._points) >= MIN_POINTS and (self._observed - WARM_UP) % REFIT_EVERY == 0:
            self._refit()

    def size_behind(self, prefix_len: int) -> int:
        """Tokens of a chunk behind `prefix_len` tokens, if the prompt is long enough."""
        if self.fit is None:
            return self.base_size
        a, b = self.fit
        base = self.base_size
        # a x^2 + (2 a p + b) x = budget, solved in the form that is also right for a = 0.
        budget = a * base * base + b * base
        slope = 2.0 * a * prefix_len + b
        exact = 2.0 * budget / (slope + math.sqrt(slope * slope + 4.0 * a * budget))
        size = int(exact + 1e-6)
        if size >= base:
            return base
        return max(size // self.unit * self.unit, self.min_size)

    def _refit(self) -> None:
        points = np.array(self._points, np.float64)
        # Without a second chunk the quadratic part would be a guess from rounding noise.
        if points[:, 1].max() < self.min_size:
            return
        found = self._solve(points)
        if found == Fit(0.0, 0.0):
            self.fit = None  # the time depends neither on n nor on p: nothing to equalise
        elif self.fit is None:
            self.fit = found
        else:
            self.fit = Fit(
                self.fit.a + SMOOTHING * (found.a - self.fit.a),
                self.fit.b + SMOOTHING * (found.b - self.fit.b),
            )

    def _solve(self, points: FloatMatrix) -> Fit:
        """Least squares over [n, p, seconds] rows, without outliers."""
        n, prefix, seconds = points.T / [[self.base_size], [self.base_size], [1.0]]
        # If all chunks have the same length, b and c can't be told apart: the small constant column
        # gives that time to b. Errors grow with the time of a step, so relative errors count.
        columns = [n * (2.0 * prefix + n), n, np.full(len(n), 0.01)]
        design = np.column_stack(columns) / seconds[:, np.newaxis]
        kept = np.ones(len(n), np.bool_)
        coefficients = least_squares(design)
        for _ in range(MAX_TRIMS):
            residuals = np.abs(design @ coefficients - 1.0)
            spread = float(np.median(residuals[kept]))
            inliers = residuals <= max(OUTLIER_MADS * spread, 1e-6)
            if inliers.sum() < MIN_POINTS or np.array_equal(inliers, kept):
                break
            kept = inliers
            coefficients = least_squares(design[kept])
        a, b, _ = coefficients.tolist()
        return Fit(a / self.base_size**2, b / self.base_size)


def least_squares(design: FloatMatrix) -> FloatMatrix:
    """[3] coefficients with `design` @ coefficients = 1, none of them negative.

    Columns whose coefficient would be negative are left out, the constant first, the quadratic one
    last.
    """
    ones = np.ones(len(design))
    solution: FloatMatrix = np.zeros(3)
    used = [0, 1, 2]
    while used:
        found = np.linalg.lstsq(design[:, used], ones, rcond=1e-9)[0]
        negative = [column for column, value in zip(used, found, strict=True) if value < 0.0]
        if not negative:
            solution[used] = found
            break
        used.remove(negative[-1])
    return solution
