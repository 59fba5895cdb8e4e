"""Everything here must run in CI: a skip for want of a tool is a failure there."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Turn skips into failures under `CI=true`, but for what an option asks for, and what needs a
    program that pip doesn't bring."""
    outcome = yield
    report = outcome.get_result()
    may_be_skipped = {"full_chaos", "optional_tool"} & set(item.keywords)
    if report.skipped and os.environ.get("CI") == "true" and not may_be_skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
