"""What a person sees of a build on stderr."""

from __future__ import annotations

import sys
import time
from contextlib import suppress

_STEP_S = 1.0


class Progress:
    """On a terminal one line that changes, elsewhere one line at the start and one at the end."""

    def __init__(self, compiler: str, files: int) -> None:
        self._head = f"building the CPU kernels with {compiler}: "
        self._files = files
        self._started = time.monotonic()
        self._told = 0.0
        self._on_terminal = sys.stderr.isatty()
        if not self._on_terminal:
            _write(f"{self._head}{files} files\n")

    def update(self, done: int) -> None:
        """Say how many files are done."""
        now = time.monotonic()
        if self._on_terminal and now - self._told >= _STEP_S:
            self._told = now
            _write(
                f"\r{self._head}{done} of {self._files} files, {now - self._started:.0f} s\x1b[K"
            )

    def end(self, result: str) -> None:
        """The last line; `result` is a word such as "built"."""
        start = "\r\x1b[K" if self._on_terminal else ""
        _write(f"{start}{result} the CPU kernels in {time.monotonic() - self._started:.0f} s\n")


def _write(text: str) -> None:
    with suppress(OSError, ValueError):  # a terminal that is gone ends no build
        sys.stderr.write(text)
        sys.stderr.flush()
