"""`signal_at_parent_death`: so that a process doesn't outlive the one that started it."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def signal_at_parent_death(number: signal.Signals) -> None:
    """Let the kernel (Linux) send this process a signal when its parent is gone, killed or not."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
