"""All processes of a launch are found, and ended."""

from __future__ import annotations

import subprocess
import sys
import uuid

from deploy.start.processes import MARK, end_marked_processes, is_alive, marked_processes

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(flush=True)
time.sleep(600)
"""
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], env={{}})
print(child.pid, flush=True)
child.wait()
"""


def test_a_process_without_the_mark_is_found_by_its_session() -> None:
    mark = uuid.uuid4().hex
    with (
        subprocess.Popen(
            [sys.executable, "-c", PARENT],
            env={MARK: mark},
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as parent,
        subprocess.Popen(
            [sys.executable, "-c", STUBBORN], env={}, stdout=subprocess.PIPE, start_new_session=True
        ) as stranger,
    ):
        assert parent.stdout is not None and stranger.stdout is not None
        child = int(parent.stdout.readline())
        assert parent.stdout.readline() == stranger.stdout.readline() == b"\n"
        assert marked_processes(mark) == [parent.pid]
        assert sorted(marked_processes(mark, parent.pid)) == sorted([parent.pid, child])
        end_marked_processes(mark, parent.pid)
        assert parent.wait() != 0 and not is_alive(child)
        assert stranger.poll() is None
        stranger.kill()
