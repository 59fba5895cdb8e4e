"""How torch's compute threads wait for each other on CPU: a little awake, then asleep.

Threads that sleep at once (`OMP_WAIT_POLICY=PASSIVE` alone) have to be woken for every operator,
threads that spin on (OpenMP's default) keep the machine's other processes waiting. libgomp reads
both variables when it is loaded, so they must be set before torch is imported.
"""

from __future__ import annotations

import os

SPIN_COUNT = "10000"
"""Looks of a waiting thread (libgomp's `GOMP_SPINCOUNT`), 50 to 500 us by processor: longer than
from one operator of a step to the next, shorter than from one step to the next."""


def wait_policy() -> dict[str, str]:
    """The variables: as they are set, ours where they aren't."""
    policy = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    if policy["OMP_WAIT_POLICY"].upper() == "PASSIVE":  # the count would outrank another policy
        policy["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", SPIN_COUNT)
    return policy


def set_wait_policy() -> None:
    """Set what the user hasn't, for this process and its children."""
    os.environ.update(wait_policy())
