"""Starts and stops of `manta serve`: what it prints, takes, leaves, and why it fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from benchmarks.common import REPO_ROOT
from deploy.start import ports
from tests.support.launches import MANTA, MODEL, SMALL, Started, assert_nothing_left, started
from tests.support.processes import launch_mark


def test_ten_lines_to_ready_and_nothing_left(tmp_path: Path) -> None:
    """Then what the curl that it prints says, what the log holds, and a second start beside it."""
    shared = set(os.listdir("/dev/shm"))
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
    assert set(os.listdir("/dev/shm")) <= shared


def test_every_port_of_first_choice_is_taken(tmp_path: Path) -> None:
    """The first block by one port; in the second those of the first replicas."""
    with ExitStack() as taken:
        first, second = ports.FIRST, ports.FIRST + ports.BLOCK
        for port in (
            first,
            *(second + ports.REPLICAS_FROM + i for i in range(3)),
            8404,
            9101,
            8500,
        ):
            try:
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:  # by somebody else: as good
                continue
        with started([MODEL, *SMALL], tmp_path) as launch:
            launch.wait_ready()
            assert launch.answers()
            assert launch.stop() == 0


@pytest.mark.parametrize("what", ["tokenizer", "device"])
def test_a_start_that_fails_ends_with_its_cause(tmp_path: Path, what: str) -> None:
    model = Path(shutil.copytree(REPO_ROOT / MODEL, tmp_path / "model"))
    arguments = [str(model), *SMALL]
    if what == "tokenizer":
        (model / "tokenizer.json").write_text("{}")
        cause = "tokenizer.json can't be read"
    else:
        arguments += ["--set", "device=cuda"]
        cause = "needs 1 GPU"
    launch = Started(arguments, tmp_path)
    assert launch.wait_end() == 1
    *before, last = launch.lines
    assert last.startswith("error: ") and cause in last, launch.lines
    assert "Error" not in last and len(launch.lines) <= 10
    assert f"full log: {launch.logs}" in before[-1]
    assert cause in launch.log, "and it is kept"
    assert launch.left == []
