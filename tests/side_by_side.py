"""Runs commands beside another one, in the time that it leaves.

    python -m tests.side_by_side COMMAND BESIDE ...

Servers wait while they start and for one another, so that half of a machine idles under their
tests. `COMMAND` runs as it would alone. The others run one after another, with the lowest priority.
What they print is shown when all have ended. The status is 1 if one has failed.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO


class Beside:
    """Commands with the lowest priority, one after another."""

    def __init__(self, commands: Sequence[str], output: IO[bytes]) -> None:
        self._commands, self._output = commands, output
        self._lock = threading.Lock()
        self._stopped = False
        self._running: subprocess.Popen[bytes] | None = None
        self.failed: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until all have ended."""
        self._thread.join()

    def stop(self) -> None:
        """End the one that runs, with all its processes, and begin no other."""
        with self._lock:
            self._stopped = True
            if self._running is not None and self._running.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._running.pid, signal.SIGTERM)
        self._thread.join()

    def _run(self) -> None:
        for command in self._commands:
            self.failed.append(command)  # until it has succeeded
            with self._lock:
                if self._stopped:
                    return
                self._running = subprocess.Popen(
                    ["nice", "-n", "19", *shlex.split(command)],
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            if self._running.wait() == 0:
                self.failed.remove(command)


def main(argv: Sequence[str]) -> int:
    """The status of all."""
    first, *others = argv
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryFile() as output:
        beside = Beside(others, output)
        try:
            failed = [] if subprocess.run(shlex.split(first)).returncode == 0 else [first]
            beside.wait()
        finally:
            beside.stop()
            output.seek(0)
            sys.stdout.buffer.write(output.read())
        failed += beside.failed
    for command in failed:
        print(f"failed: {command}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
