"""A running Ray cluster is taken only if it asks for a token."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.servers import free_port
from deploy.start.cluster_token import check_cluster_token
from deploy.start.processes import MARK, end_marked_processes
from engine.errors import ConfigError

TOKEN = "0123456789abcdef0123456789abcdef"


@contextmanager
def cluster(mode: str) -> Iterator[str]:
    """Address of a head node that does no more than that."""
    port, mark = free_port(), uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        env = {
            **os.environ, MARK: mark, "RAY_TMPDIR": folder, "RAY_AUTH_MODE": mode,
            "RAY_AUTH_TOKEN": TOKEN,
        }  # fmt: skip
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        command += [f"--port={port}", "--include-dashboard=false", "--num-cpus=1"]
        command += ["--min-worker-port=0", "--max-worker-port=0"]
        with subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                assert process.stdout is not None
                assert any("Ray runtime started" in line for line in process.stdout)
                yield f"127.0.0.1:{port}"
            finally:
                end_marked_processes(mark)


@pytest.mark.parametrize("own_token", [True, False])
def test_with_a_token(own_token: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if own_token:
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    with cluster("token") as address:
        check_cluster_token(address)


def test_without_a_token() -> None:
    with cluster("disabled") as address, pytest.raises(ConfigError, match="asks for no token"):
        check_cluster_token(address)


def test_where_nothing_listens() -> None:
    """`serve run` itself says what is wrong."""
    check_cluster_token(f"127.0.0.1:{free_port()}")


def test_rays_client_protocol() -> None:
    with pytest.raises(ConfigError, match="RAY_ADDRESS=auto"):
        check_cluster_token("ray://127.0.0.1:10001")
