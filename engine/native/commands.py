"""Runs the commands of a build: several at once, until a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

POLL_S = 0.05


class Command(NamedTuple):
    """`title` names it in messages; its output goes to the file `output`."""

    title: str
    words: tuple[str, ...]
    output: Path


class CommandFailed(Exception):
    """A command failed, or the deadline has passed (`timed_out`)."""

    def __init__(self, command: Command, *, timed_out: bool) -> None:
        super().__init__(command.title)
        self.command = command
        self.timed_out = timed_out


def run_commands(
    commands: Sequence[Command],
    at_once: int,
    deadline: float,
    on_progress: Callable[[int], None],
) -> None:
    """Run all, at most `at_once` at a time. `deadline` is of `time.monotonic`; `on_progress` gets
    the number of commands that are done, several times a second.

    Raises `CommandFailed` after the first failure. No command is left running in any case.
    """
    waiting, done = list(commands), 0
    running: dict[Command, subprocess.Popen[bytes]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                command = waiting.pop(0)
                running[command] = _start(command)
            time.sleep(POLL_S)
            for command, process in list(running.items()):
                if process.poll() is None:
                    if time.monotonic() > deadline:
                        raise CommandFailed(command, timed_out=True)
                    continue
                del running[command]
                if process.returncode != 0:
                    raise CommandFailed(command, timed_out=False)
                done += 1
            on_progress(done)
    finally:
        for process in running.values():
            _kill(process)


def _start(command: Command) -> subprocess.Popen[bytes]:
    with command.output.open("wb") as output:
        return subprocess.Popen(
            command.words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"},
            cwd=command.output.parent,
            start_new_session=True,  # a group of its own: g++ has children
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
