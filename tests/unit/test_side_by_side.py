"""Commands beside another one: priorities, failures, and what a stop leaves."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import side_by_side

PYTHON = shlex.quote(sys.executable)


def python(code: str) -> str:
    return f"{PYTHON} -c {shlex.quote(code)}"


def test_others_run_with_the_lowest_priority(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    say = "import os; print('NAME', os.nice(0))"
    names = ("first", "second", "third")
    assert side_by_side.main([python(say.replace("NAME", name)) for name in names]) == 0
    out = capfd.readouterr().out
    assert f"first {os.nice(0)}" in out
    assert out.index("second 19") < out.index("third 19")


@pytest.mark.parametrize("number", range(3))
def test_a_failure_is_told_and_ends_no_other(
    number: int, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    touch = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch(); sys.exit(int(sys.argv[2]))"
    files = [tmp_path / str(n) for n in range(3)]
    commands = [f"{python(touch)} {file} {int(n == number)}" for n, file in enumerate(files)]
    assert side_by_side.main(commands) == 1
    assert all(file.exists() for file in files)
    assert f"failed: {commands[number]}" in capfd.readouterr().out


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_ends_all(tmp_path: Path, by: signal.Signals) -> None:
    """Also what the others have started."""
    file = tmp_path / "pid"
    child = f"open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    parent = f"import os, time; os.fork(); {child}"
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.side_by_side", python("import time; time.sleep(600)"),
         python(parent)],
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not file.exists() or not file.read_text():
        time.sleep(0.05)
    os.killpg(program.pid, by)
    assert program.wait(timeout=60) != 0
    own = int(file.read_text())
    while (
        Path(f"/proc/{own}").exists()
        and "\nState:\tZ" not in Path(f"/proc/{own}/status").read_text()
    ):
        time.sleep(0.05)
