"""The benchmarks' own tests run as the project's do."""

from __future__ import annotations

import pytest

from tests.support.settings import set_up


def pytest_configure(config: pytest.Config) -> None:
    set_up()
