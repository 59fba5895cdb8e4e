"""What happens to a cluster under load: each returns when the cluster is whole again."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from tests.k8s.cluster import START_TIMEOUT_S, Cluster
from tests.k8s.emulator import Emulator, scaled
from tests.k8s.manifests import render, the
from tests.k8s.pod import Pod
from tests.support.chaos_load import Case, Load

NUM_STREAMS = 16
CUT_S = 20.0


@dataclass(frozen=True)
class Outcome:
    """How the streams fared."""

    finished: int
    failures: list[str]
    longest_gap_s: float
    took_s: float

    def __str__(self) -> str:
        return (
            f"{self.finished} streams finished, {len(self.failures)} failed, longest gap "
            f"{self.longest_gap_s:.1f} s, whole again after {self.took_s:.0f} s"
        )


def under_load(emulator: Emulator, cases: list[Case], event: Callable[[Emulator], None]) -> Outcome:
    """Let something happen to the cluster while `NUM_STREAMS` streams are always open."""

    async def run() -> Outcome:
        headers = {"Authorization": f"Bearer {emulator.key}"}
        load = Load(emulator.url, cases, NUM_STREAMS, stagger_s=1.0, headers=headers)
        task = asyncio.create_task(load.run())
        await asyncio.sleep(4)
        began = time.monotonic()
        try:
            await asyncio.to_thread(event, emulator)
            took_s = time.monotonic() - began
            await asyncio.sleep(4)
        finally:
            load.stop.set()
            await task
        gaps = [
            after - before
            for got in load.finished
            for before, after in zip([got.started, *got.times], got.times, strict=False)
        ]
        return Outcome(len(load.finished), load.failures, max(gaps, default=0.0), took_s)

    return asyncio.run(run())


def worker_terminated(emulator: Emulator) -> None:
    """An engine's pod is deleted, as by a drained node; KubeRay makes another one."""
    cluster = emulator.cluster
    (old,) = cluster.of("engines")
    new = cluster.add_pod(cluster.group("engines"))  # at once, as KubeRay does
    cluster.delete_pod(old)
    assert not old.killed, "it didn't end within its grace period"
    _wait(lambda: new.is_ready, "the new pod is ready")


def worker_killed(emulator: Emulator) -> None:
    """kill -9 of all processes of an engine's pod; the kubelet starts its container again."""
    (pod,) = emulator.cluster.of("engines")
    _kill(pod)


def ingress_killed(emulator: Emulator) -> None:
    """kill -9 of all processes of the ingress' pod. Its clients lose their connections."""
    (pod,) = emulator.cluster.of("ingress")
    _kill(pod)
    emulator.cluster.wait_until_running()


def head_killed(emulator: Emulator) -> None:
    """kill -9 of all processes of the head's pod."""
    _kill(emulator.cluster.head)
    emulator.cluster.wait_until_running()


def new_cluster(emulator: Emulator) -> None:
    """A changed pod template: a second cluster takes over."""
    service = copy.deepcopy(emulator.cluster.service)
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    group["template"]["metadata"]["labels"]["version"] = "2"
    emulator.upgrade(service)


def scaled_up_and_down(emulator: Emulator) -> None:
    """1 -> 2 -> 1 engines by a changed config; pods come and go as by the autoscaler."""
    _scale_up(emulator.cluster)
    _scale_down(emulator.cluster)


def host_lost(emulator: Emulator) -> None:
    """One of two engines' hosts is gone at once: its network, then all its processes."""
    cluster = emulator.cluster
    lost = _scale_up(cluster)
    time.sleep(3)  # so that it has streams
    emulator.network.set_link(lost.interface, "down")
    cluster.delete_pod(lost, force=True)
    time.sleep(15)
    new = cluster.add_pod(cluster.group("engines"))  # on a third host
    _wait(lambda: new.is_ready and _has_engine(new), "there is a second engine again")
    _scale_down(cluster)


def network_cut(emulator: Emulator) -> None:
    """The network of an engine's pod is cut for 20 s."""
    (pod,) = emulator.cluster.of("engines")
    emulator.network.set_link(pod.interface, "down")
    time.sleep(CUT_S)
    emulator.network.set_link(pod.interface, "up")
    _wait(lambda: pod.is_ready, "the pod is ready")
    emulator.cluster.wait_until_running()


def parallel_service(emulator: Emulator, tp_size: int, pp_size: int) -> dict[str, Any]:
    """The RayService with an engine that spans two pods, one worker in each."""
    service = copy.deepcopy(the(emulator.documents, "RayService"))
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][1]
    two_hosts = the(render("k8s/overlays/pp2-two-hosts"), "RayService")
    like = two_hosts["spec"]["rayClusterConfig"]["workerGroupSpecs"][1]
    group["numOfHosts"] = like["numOfHosts"]
    probe = like["template"]["spec"]["containers"][0]["readinessProbe"]
    group["template"]["spec"]["containers"][0]["readinessProbe"] = probe
    group["rayStartParams"]["resources"] = '\'{"manta_engine": 1, "manta_worker": 1}\''
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    config["applications"][0]["args"] |= {
        "tp_size": tp_size,
        "pp_size": pp_size,
        "worker_resources": {"manta_worker": 1},
    }
    service["spec"]["serveConfigV2"] = yaml.safe_dump(config)
    return service


def _scale_up(cluster: Cluster) -> Pod:
    """From one engine to two. Returns the new pod."""
    new = cluster.add_pod(cluster.group("engines"))
    cluster.put(scaled(cluster.config, 2))
    _wait(lambda: new.is_ready and _has_engine(new), "the second engine runs")
    cluster.wait_until_running()
    return new


def _scale_down(cluster: Cluster) -> None:
    """From two engines to one, and the other's pod goes."""
    cluster.put(scaled(cluster.config, 1))
    _wait(lambda: _engines(cluster) == 1, "one engine is left")
    idle = next(pod for pod in cluster.of("engines") if not _has_engine(pod))
    cluster.delete_pod(idle)
    cluster.wait_until_running()


def _kill(pod: Pod) -> None:
    restarts = pod.restarts
    pod.kill()
    _wait(lambda: pod.restarts > restarts and pod.is_ready, f"{pod.name} is back")


def _engines(cluster: Cluster) -> int:
    return sum(_has_engine(pod) for pod in cluster.of("engines"))


def _has_engine(pod: Pod) -> bool:
    status, _ = pod.container.run(["pgrep", "-f", "^ray::SchedulerActor"])
    return status == 0


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {START_TIMEOUT_S:.0f} s until {what}")
        time.sleep(0.5)
