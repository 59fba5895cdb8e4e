"""`GuardProcess`: the process that compiles grammars first, as its owner sees it.

The two speak in frames on two pipes: the length in 4 bytes, the highest first, and MessagePack. The
first `GuardReply` says that the process is ready, or why it can't be. Then one answers each payload
of a grammar.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from typing import Any, Literal

import msgspec

from engine.process.other_process import module_environment

MODULE = "engine.grammars.guard_child"
HEAD_BYTES = 4
MAX_FRAME = 2**20
"""Bytes; a question is at most a few times as long as `MAX_GRAMMAR_BYTES`."""
START_TIMEOUT_S = 120.0
"""Loading a tokenizer takes up to 3 s, and 10 s if transformers has to."""


class GuardReply(msgspec.Struct, array_like=True):
    """`refused`: for the reason in `message`. `died`, `late`: so did the process that compiled.
    `starved`: it got too little of the CPU to say."""

    verdict: Literal["ok", "refused", "died", "late", "starved"]
    message: str = ""


def frame(message: GuardReply | dict[str, Any]) -> bytes:
    """The bytes that go through the pipe."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEAD_BYTES, "big") + body


class GuardLostError(Exception):
    """The process ended or doesn't answer; the message says why if it told."""


class GuardUnavailableError(Exception):
    """There can't be such a process for this model; the message says why."""


class GuardProcess:
    """Starts the process; it ends when its standard input does, or with the thread that made it.

    Not thread-safe, except `kill`.
    """

    def __init__(self, model_path: str, timeout_s: float) -> None:
        """`timeout_s` is the CPU time that a grammar may take. Raises `GuardUnavailableError`, and
        `GuardLostError` if the process is lost while it starts."""
        self._timeout_s = timeout_s
        command = [sys.executable, "-m", MODULE, model_path, str(timeout_s), str(os.getpid())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # Linux (autogroup) shares CPU time among sessions first. In the server's session, a
            # compilation that kept a core busy made other threads wait for up to 2 s.
            start_new_session=True,
            env=module_environment(),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout
        os.set_blocking(self._questions.fileno(), False)
        self.pid = self._process.pid
        try:
            ready = self._read(time.monotonic() + START_TIMEOUT_S)
        except GuardLostError:
            self.close()
            raise
        if ready.verdict != "ok":
            self.close()
            raise GuardUnavailableError(ready.message)

    def ask(self, payload: dict[str, Any]) -> GuardReply:
        """What becomes of a grammar. Raises `GuardLostError` if the process is lost meanwhile."""
        # It ends what takes too long by itself; if it doesn't, it hangs.
        deadline = time.monotonic() + 5 * self._timeout_s + 5.0
        self._write(frame(payload), deadline)
        return self._read(deadline)

    def kill(self) -> None:
        """End the process at once; an `ask` under way raises `GuardLostError`."""
        self._process.kill()

    def close(self) -> None:
        """End the process and wait until it is gone."""
        self._process.kill()
        for pipe in (self._questions, self._answers):
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()

    def _write(self, data: bytes, deadline: float) -> None:
        rest = memoryview(data)
        while rest:
            _wait_for(self._questions.fileno(), select.POLLOUT, deadline)
            try:
                rest = rest[self._questions.write(rest) or 0 :]
            except OSError as error:
                raise GuardLostError(f"it ended: {error}") from None

    def _read(self, deadline: float) -> GuardReply:
        length = int.from_bytes(self._read_bytes(HEAD_BYTES, deadline), "big")
        if length > MAX_FRAME:
            raise GuardLostError("it wrote nonsense")
        return msgspec.msgpack.decode(self._read_bytes(length, deadline), type=GuardReply)

    def _read_bytes(self, count: int, deadline: float) -> bytes:
        data = b""
        while len(data) < count:
            _wait_for(self._answers.fileno(), select.POLLIN, deadline)
            piece = self._answers.read(count - len(data))
            if not piece:
                raise GuardLostError("it ended")
            data += piece
        return data


def _wait_for(fd: int, event: int, deadline: float) -> None:
    """Raise `GuardLostError` if nothing happens at `fd` in time."""
    poll = select.poll()  # unlike select, it takes file numbers above 1023
    poll.register(fd, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise GuardLostError("it doesn't answer")
