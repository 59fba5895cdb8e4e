"""`serve run` as the launcher's child: its start, its output, and its status."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from deploy.start.causes import config_error_in
from deploy.start.log_file import ANSI, LaunchLog
from engine.process.parent_death import signal_at_parent_death

OUR_WARNING = re.compile(r"\b(WARNING|ERROR|CRITICAL) ((?:engine|deploy)\.[\w.]+: .*)")
NOISE = "Task ServeController.graceful_shutdown failed."
"""What the raylet prints when Serve's controller ends; the controller ends itself with Serve."""
_JSON = '{"time": "'
"""How a record of `log_format: json` begins, behind what Ray writes before it."""
LINES_KEPT = 50


class ServeRun:
    """A running `serve run`, and the threads that listen to it."""

    def __init__(
        self,
        python: str,
        config: Path,
        env: Mapping[str, str],
        keep_fd: int,
        log: LaunchLog | None,
        verbose: bool,
    ) -> None:
        """`python` runs it and all of Ray's processes. `keep_fd` stays open as long as the child
        lives."""
        status_in, status_out = os.pipe()
        module = [python, "-m", "deploy.start.serve_run"]
        self.process = subprocess.Popen(
            [*module, str(config), str(status_out)],
            env=dict(env),
            cwd=Path(__file__).resolve().parents[2],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=[status_out, keep_fd],
            # Its own session: a Ctrl-C reaches only the launcher, which passes it on once.
            start_new_session=True,
            preexec_fn=prepare_child,
        )
        os.close(status_out)
        self.output = _Output(self.process, log, verbose)
        self.status = _Status(status_in)
        self.output.start()
        self.status.start()

    @property
    def is_over(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None


class _Output(threading.Thread):
    """Copies what the child prints to the log, and the important lines to the terminal.

    It reads on after any error: a child whose output nobody reads would stand still.
    """

    def __init__(
        self, process: subprocess.Popen[str], log: LaunchLog | None, verbose: bool
    ) -> None:
        super().__init__(daemon=True)
        self._process = process
        self._log = log
        self._verbose = verbose
        self.last_lines: list[str] = []
        self.config_error = ""

    def run(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self._take(line)
            except Exception:  # a full disk, a closed terminal: reported where that is possible
                say(traceback.format_exc(), to=sys.stderr)

    def _take(self, line: str) -> None:
        if NOISE in line:
            return
        texts = json_in(line) or [line]
        for text in texts:
            self.last_lines = [*self.last_lines[1 - LINES_KEPT :], text]
            self.config_error = self.config_error or config_error_in(text)
        if self._log is not None:
            self._log.write(line)
        if self._verbose:
            say(line.rstrip("\n"), to=sys.stderr)
        elif match := OUR_WARNING.search(texts[0]):
            say(f"{match[1].lower()}: {match[2]}", to=sys.stderr)


def json_in(line: str) -> list[str]:
    """The record that a line of the log holds as JSON, as lines of the format text; empty if there
    is none."""
    text = ANSI.sub("", line)
    begin = text.find(_JSON)
    if begin < 0:
        return []
    try:
        record, _ = json.JSONDecoder().raw_decode(text, begin)
        said = f"{record['level']} {record['logger']}: {record['message']}"
    except (ValueError, KeyError):  # cut off, or another program's
        return []
    if exception := record.get("exception"):
        said += f"\n{exception}"
    return [part + "\n" for part in said.split("\n")]


class _Status(threading.Thread):
    """Reads the status of the deployment that the child reports."""

    def __init__(self, fd: int) -> None:
        super().__init__(daemon=True)
        self._fd = fd
        self.failure = ""
        self.is_running = False
        self.knows_ray = False
        """Whether Serve has told of an application, so Ray runs."""
        self.summary = "Ray is being started"

    def run(self) -> None:
        with open(self._fd) as lines:
            for line in lines:
                self._take(json.loads(line))

    def _take(self, applications: dict[str, dict[str, Any]]) -> None:
        states = {app["status"] for app in applications.values()}
        self.knows_ray = self.knows_ray or bool(states)
        for app in applications.values():
            if app["status"] == "DEPLOY_FAILED":
                self.failure = app["message"] or "the deployment failed without a word"
        if states:
            self.summary = f"Serve says {', '.join(sorted(states))}"
        self.is_running = states == {"RUNNING"}


def say(*lines: str, to: TextIO | None = None) -> None:
    """Print lines at once. A terminal that is gone, or a full disk, doesn't end the server."""
    with suppress(OSError, ValueError):
        print(*lines, sep="\n", file=to or sys.stdout, flush=True)


def prepare_child() -> None:
    """Let `serve run` receive Ctrl-C (SIGINT) even if the launcher was started with it ignored, as
    shells do for programs in the background. On Linux `serve run` also gets it if the launcher is
    killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal_at_parent_death(signal.SIGINT)
