"""What is left to do after a launcher that was killed: end its processes, remove its folder.

    python -m deploy.start.aftermath MARK SESSION FOLDER

A process without Ray does it: one that Ray knows ends at once when its raylet does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from deploy.start.processes import MARK, end_marked_processes


def leave_to_aftermath(folder: Path) -> None:
    """Start it for this process' launch, and return."""
    command = [sys.executable, "-m", "deploy.start.aftermath"]
    subprocess.Popen(
        [*command, os.environ[MARK], str(os.getsid(0)), str(folder)],
        cwd=Path(__file__).resolve().parents[2],
        env={name: value for name, value in os.environ.items() if name != MARK},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main() -> None:
    """Do it."""
    mark, session, folder = sys.argv[1:]
    end_marked_processes(mark, int(session))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
