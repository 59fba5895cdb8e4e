"""Options and fixtures of the whole suite."""

from __future__ import annotations

import os

# Read by libgomp when torch loads; spinning threads starve the other processes of a test.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is slow, which is no failure.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-matrix",
        action="store_true",
        help="token-exact tests: the full product instead of the covering subset",
    )
    parser.addoption(
        "--full-chaos",
        action="store_true",
        help="chaos tests: every role killed and stopped in three rounds, instead of a short form",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full-chaos"):
        skip = pytest.mark.skip(reason="part of `make chaos`")
        for item in items:
            if "full_chaos" in item.keywords:
                item.add_marker(skip)


def pytest_configure(config: pytest.Config) -> None:
    import torch

    torch.set_num_threads(1)
