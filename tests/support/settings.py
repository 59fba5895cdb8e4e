"""Settings that every suite needs before it imports torch or runs a property test."""

from __future__ import annotations

import os

# Read by libgomp when torch loads; spinning threads starve the other processes of a test.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hypothesis import HealthCheck, settings


def set_up() -> None:
    """For `pytest_configure`: one torch thread, and property tests without a time limit, because a
    slow, busy machine is no failure."""
    import torch

    if not torch.cuda.is_available():
        # Read when Triton is imported: its kernels then run in Python, on CPU.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)
    checks = [HealthCheck.too_slow]
    settings.register_profile("unhurried", deadline=None, suppress_health_check=checks)
    settings.load_profile("unhurried")
