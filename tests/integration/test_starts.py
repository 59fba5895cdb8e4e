"""Starts and stops of `manta serve`: what it prints, takes, leaves, and why it fails."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import httpx

from benchmarks.common import REPO_ROOT
from tests.support.launches import MANTA, MODEL, SMALL, assert_nothing_left, started
from tests.support.processes import SharedMemory, launch_mark


def test_ten_lines_to_ready_and_nothing_left(tmp_path: Path) -> None:
    """Then what the curl that it prints says, what the log holds, and a second start beside it."""
    shared = SharedMemory()
    with started([MODEL, *SMALL], tmp_path) as launch:
        launch.wait_ready()
        mark = launch_mark(launch.process.pid)
        assert len(launch.lines) <= 10, launch.lines
        text = "\n".join(launch.lines)
        assert "manta-small" in text and launch.url in text and str(launch.logs) in text
        curl = next(line for line in launch.lines if line.startswith("try: "))
        ran = subprocess.run(curl.removeprefix("try: ") + " -s", shell=True, capture_output=True)
        assert json.loads(ran.stdout)["choices"][0]["text"]
        for path in ("/health", "/metrics"):
            assert httpx.get(launch.url + path, timeout=30).status_code == 200
        beside = subprocess.run(
            [*MANTA, "serve", "--port", str(launch.port)],
            cwd=REPO_ROOT,
            capture_output=True,
            text=True,
        )
        assert beside.returncode == 2 and beside.stdout == ""
        assert "Address already in use" in beside.stderr and beside.stderr.count("\n") == 1
        assert launch.answers()
        assert launch.stop() == 0
        assert "POST /v1/completions 200" in launch.log, "the full log has what Serve says"
        assert not re.search("GET /(health|metrics)", launch.log)
        assert "graceful_shutdown failed" not in launch.log
        assert_nothing_left(launch, mark)
    assert shared.left() == set()
