"""Dashboard, alerts and counters with a real Prometheus."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from benchmarks.common import REPO_ROOT


@pytest.mark.optional_tool
@pytest.mark.timeout(600)
def test_prometheus_sees_what_the_client_did() -> None:
    prometheus = shutil.which("prometheus")
    if prometheus is None or shutil.which("promtool") is None:
        pytest.skip("needs prometheus and promtool, as Debian's package prometheus has them")
    command = [sys.executable, "scripts/check_monitoring.py", "--prometheus", prometheus]
    done = subprocess.run(
        command, cwd=REPO_ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
