"""How torch's compute threads wait for each other on CPU: a little awake, then asleep.

Threads that sleep at once (`OMP_WAIT_POLICY=PASSIVE` alone) have to be woken for every operator.
Threads that keep spinning (OpenMP's default) keep the machine's other processes waiting. libgomp
reads both variables when it is loaded, so they must be set before torch is imported.
"""

from __future__ import annotations

import os

SPIN_COUNT = "10000"
"""How often a waiting thread looks before it sleeps (libgomp's `GOMP_SPINCOUNT`). That takes 50 to
500 us, depending on the processor: longer than the time between two operators of a step, shorter
than the time between two steps."""


def wait_policy() -> dict[str, str]:
    """The variables with their values: the user's if set, else ours."""
    policy = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    if policy["OMP_WAIT_POLICY"].upper() == "PASSIVE":  # the count would override another policy
        policy["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", SPIN_COUNT)
    return policy


def set_wait_policy() -> None:
    """Set the variables that the user hasn't set, for this process and its children."""
    os.environ.update(wait_policy())
