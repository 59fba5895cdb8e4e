"""The emulator's Service passes connections to the pods that are ready, and to no others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.k8s.emulator import PROGRAMS
from tests.k8s.network import Network
from tests.k8s.service import PORT, Service
from tests.support.debian import install

pytestmark = [
    pytest.mark.optional_tool,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]
TIMEOUT_S = 20.0


@pytest.fixture
def network() -> Iterator[Network]:
    install(PROGRAMS)
    found = Network([], "manta")
    try:
        yield found
    finally:
        found.close()


def test_it_follows_the_pods_that_are_ready(network: Network, tmp_path: Path) -> None:
    ready: list[str] = []
    with ExitStack() as stack:
        pods = [_pod(network, f"pod-{i}", tmp_path, stack) for i in range(2)]
        folder = tmp_path / "service"
        folder.mkdir()
        service = Service(network.add("service", {}, "kube-system"), folder, lambda: list(ready))
        stack.callback(service.close)
        assert _answer(service) is None, "nobody listens without a pod that is ready"
        for pods_ready in ([0], [1], [], [0], [0, 1], [1]):
            ready[:] = [pods[i] for i in pods_ready]
            _wait_for(service, {f"pod-{i}" for i in pods_ready})


def _pod(network: Network, name: str, folder: Path, stack: ExitStack) -> str:
    """A web server in a network of its own that says its name. Returns its address."""
    interface = network.add(name, {}, "manta")
    (folder / name).mkdir()
    (folder / name / "name").write_text(name)
    server = [sys.executable, "-m", "http.server", str(PORT), "--directory", str(folder / name)]
    process = subprocess.Popen(
        ["ip", "netns", "exec", interface.netns, *server],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return interface.address


def _answer(service: Service) -> str | None:
    """Which pod a new connection reaches; None if it is refused."""
    try:
        return httpx.get(f"{service.url}/name", timeout=5).text
    except httpx.ConnectError:
        return None
    except httpx.TransportError:
        return "broken"  # a pod that doesn't listen yet, or an nginx that starts or ends


def _wait_for(service: Service, names: set[str]) -> None:
    """Until ten connections in a row reach these pods and no others."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        seen = {_answer(service) for _ in range(10)}
        if seen == (names or {None}):
            return
        assert time.monotonic() < deadline, f"{names} are ready, but connections reach {seen}"
        time.sleep(0.2)
