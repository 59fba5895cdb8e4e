"""The launcher and its child."""

from __future__ import annotations

import subprocess
import sys

_IN_BACKGROUND = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from deploy.start.child import prepare_child
child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
for prepare in (None, prepare_child):
    subprocess.run([sys.executable, "-c", child], preexec_fn=prepare)
"""


def test_serve_run_hears_ctrl_c_where_the_launcher_runs_in_the_background() -> None:
    """Shells start background commands with SIGINT ignored, which children inherit."""
    ran = subprocess.run(
        [sys.executable, "-c", _IN_BACKGROUND], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["False", "True"]
