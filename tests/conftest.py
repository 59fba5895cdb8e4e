"""Options and fixtures of the whole suite."""

from __future__ import annotations

import os
import tempfile

import pytest

from tests.support.settings import set_up


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
    set_up()
    state = tempfile.TemporaryDirectory(prefix="manta-tests-")
    config.add_cleanup(state.cleanup)
    os.environ["MANTA_STATE_DIR"] = state.name  # where servers of tests keep records
