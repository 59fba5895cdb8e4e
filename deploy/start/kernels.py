"""The CPU kernels are built before a server starts: here a person sees the progress."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from deploy.start.child import prepare_child
from deploy.start.devices import is_on_cpu
from deploy.start.target import Target
from engine.native.library import needs_build

BUILD = (sys.executable, "-m", "engine.native.build")
STOP_LIMIT_S = 10.0


def build_kernels(target: Target) -> None:
    """Compile the CPU kernels if workers will compute on CPU and there is no library yet.

    A failure is no error: the server works without. Its workers tell the reason.
    """
    if not any(map(is_on_cpu, target.applications)) or not needs_build():
        return
    child = subprocess.Popen(
        BUILD,
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # progress is on stderr
        # Its own session: a Ctrl-C reaches only the launcher, which passes it on once.
        start_new_session=True,
        preexec_fn=prepare_child,
    )
    try:
        child.wait()
    except BaseException:  # Ctrl-C: the build ends its compilers
        child.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            child.wait(STOP_LIMIT_S)
        raise
