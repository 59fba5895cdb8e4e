"""Manta from the manifests of `k8s/`, in pods made of Linux namespaces (`tests/k8s/`)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.k8s import scenarios
from tests.k8s.emulator import PROGRAMS, Emulator
from tests.k8s.manifests import render
from tests.support.chaos_load import Case, make_cases
from tests.support.debian import install
from tests.support.overlays import needs_kubectl
from tests.support.reading_on import Read, read_some, read_through

pytestmark = [
    pytest.mark.optional_tool,
    needs_kubectl,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.timeout(1200),
]
TOKENS = 300


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    install(PROGRAMS)
    with Emulator(render("k8s/overlays/cpu")) as running:
        running.apply()
        yield running
    assert running.network.strays == [], "processes outlived their pods"


@pytest.fixture(scope="module")
def cases(emulator: Emulator) -> list[Case]:
    return _cases(emulator)


def _cases(emulator: Emulator) -> list[Case]:
    headers = {"Authorization": f"Bearer {emulator.key}"}
    return make_cases(emulator.url, 8, TOKENS, headers=headers)


def _survives(emulator: Emulator, cases: list[Case], name: str) -> None:
    outcome = scenarios.under_load(emulator, cases, getattr(scenarios, name))
    print(f"\n{name}: {outcome}")
    assert outcome.failures == []
    assert outcome.finished >= scenarios.NUM_STREAMS


@pytest.mark.parametrize(
    "name", ["worker_killed", pytest.param("head_killed", marks=pytest.mark.full_chaos)]
)
def test_streams_survive(emulator: Emulator, cases: list[Case], name: str) -> None:
    _survives(emulator, cases, name)


def test_a_stream_is_read_on_when_its_ingress_was_lost(emulator: Emulator) -> None:
    """The Redis of requests has what it takes, and the new ingress the password for it."""
    path, body = (
        "/v1/chat/completions",
        {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
    )
    body["messages"] = [{"role": "user", "content": "What does os.path.join do?"}]
    undisturbed, cut = Read(), Read()

    async def run() -> Any:
        headers = {"Authorization": f"Bearer {emulator.key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            await read_through(undisturbed, session, emulator.url, path, body)
            await read_some(cut, session, emulator.url, path, body, events=20)
            assert not cut.is_whole()
            await asyncio.to_thread(scenarios.ingress_killed, emulator)
            await read_through(cut, session, emulator.url, path, body)
            async with session.get(f"{emulator.url}/debug/status") as reply:
                return (await reply.json())["request_store"]

    store = asyncio.run(run())
    assert cut.contents() == undisturbed.contents() and len(cut.events) > TOKENS / 2
    assert store["kind"] == "redis" and store["is_away"] is False


def test_strangers_reach_only_the_api(emulator: Emulator) -> None:
    pods = list(emulator.cluster.pods)
    stranger = emulator.client("stranger", {"app": "other"}, "elsewhere")
    script = (
        "import socket, sys\n"
        "for word in sys.argv[1:]:\n"
        "    host, port = word.split(':')\n"
        "    try:\n"
        "        socket.create_connection((host, int(port)), 0.5).close()\n"
        "        print(word)\n"
        "    except OSError:\n"
        "        pass\n"
    )
    ports = {port for pod in pods for port in _listening(pod.interface.netns)}
    assert {6379, 8265, 8000} <= ports
    hosts = emulator.around.hosts
    redis, store = (f"{hosts[name]}:6379" for name in ("manta-redis", "manta-request-store"))
    asked = [f"{p.interface.address}:{port}" for p in pods for port in sorted(ports)]
    asked += [redis, store]
    command = ["ip", "netns", "exec", stranger.netns, sys.executable, "-c", script, *asked]
    reached = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    (ingress,) = emulator.cluster.of("ingress")
    assert reached == [f"{ingress.interface.address}:8000"]
    # Beside it Manta's own pods reach what they need, so the rules don't just cut everything.
    head = emulator.cluster.head
    (engine,) = emulator.cluster.of("engines")
    ray = [f"{head.interface.address}:6379", f"{head.interface.address}:8265"]
    command[7:] = [*ray, redis, store]
    for pod, wanted in ((head, [*ray, redis]), (engine, ray), (ingress, [*ray, store])):
        command[3] = pod.interface.netns
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.split() == wanted, pod.name


def test_pods_write_only_to_volumes(emulator: Emulator) -> None:
    for pod in emulator.cluster.pods:
        for path in ("/x", "/opt/manta/x", "/etc/manta/keys/x", "/usr/x"):
            status, out = pod.container.run(["bash", "-c", f"echo a > {path}"])
            assert status != 0 and ("Read-only" in out or "denied" in out), (path, out)
        assert pod.container.run(["bash", "-c", "echo a > /tmp/x && id -u"])[1].strip() == "1000"


@pytest.mark.full_chaos
@pytest.mark.parametrize(
    "name", ["network_cut", "worker_terminated", "scaled_up_and_down", "host_lost"]
)
def test_streams_survive_changes(emulator: Emulator, cases: list[Case], name: str) -> None:
    _survives(emulator, cases, name)


@pytest.mark.full_chaos
def test_streams_survive_a_new_cluster(emulator: Emulator, cases: list[Case]) -> None:
    _survives(emulator, cases, "new_cluster")
    assert len(emulator.clusters) == 2 and emulator.clusters[0].pods == []


@pytest.mark.full_chaos
@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2)])
def test_an_engine_across_two_pods(cases: list[Case], tp_size: int, pp_size: int) -> None:
    with Emulator(render("k8s/overlays/cpu")) as running:
        running.apply(scenarios.parallel_service(running, tp_size, pp_size))
        workers = [
            pod.container.run(["pgrep", "-fc", "^ray::WorkerActor"])[1].strip()
            for pod in running.cluster.of("engines")
        ]
        assert workers == ["1", "1"]
        outcome = scenarios.under_load(running, cases, lambda _: None)
        assert outcome.failures == [] and outcome.finished >= scenarios.NUM_STREAMS


def _listening(netns: str) -> set[int]:
    """TCP ports that anything in a network namespace listens on, beyond loopback."""
    lines = subprocess.run(
        ["ip", "netns", "exec", netns, "ss", "-Hltn"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    addresses = [line.split()[3] for line in lines]
    return {int(a.rpartition(":")[2]) for a in addresses if not a.startswith("127.")}
