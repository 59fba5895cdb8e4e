"""A Ray cluster of pods, as KubeRay makes one from a RayService."""

from __future__ import annotations

import itertools
import json
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.k8s import kuberay
from tests.k8s.container import Container
from tests.k8s.manifests import Document, groups, served
from tests.k8s.network import Interface, Network
from tests.k8s.pod import Pod, volumes

START_TIMEOUT_S = 240.0


class Surroundings:
    """What the pods of all clusters share. `secrets` has a folder for each Secret."""

    def __init__(
        self, network: Network, folder: Path, image: Path, documents: list[Document]
    ) -> None:
        self.network = network
        self.folder = folder
        self.image = image
        self.namespace = "manta"
        self.hosts: dict[str, str] = {}
        self.config_maps = {
            document["metadata"]["name"]: document["data"]
            for document in documents
            if document["kind"] == "ConfigMap"
        }
        self.secrets: dict[str, Path] = {}

    def set_secret(self, name: str, values: Mapping[str, str]) -> None:
        """Write a Secret; pods that mount it see the change."""
        target = self.folder / "secrets" / name
        target.mkdir(parents=True, exist_ok=True)
        for key, value in values.items():
            (target / key).write_text(value)
        self.secrets[name] = target

    def secret(self, reference: Mapping[str, str]) -> str:
        """The value of a `secretKeyRef`."""
        return (self.secrets[reference["name"]] / reference["key"]).read_text()

    def write_hosts(self, own: Interface, name: str) -> Path:
        """A pod's /etc/hosts, which stands for the cluster's DNS."""
        path = self.folder / f"{name}.hosts"
        lines = ["127.0.0.1 localhost", f"{own.address} {name}"]
        lines += [f"{address} {host}" for host, address in self.hosts.items()]
        path.write_text("\n".join(lines) + "\n")
        return path


class Cluster:
    """One Ray cluster. Close it in any case."""

    def __init__(self, name: str, service: Document, surroundings: Surroundings) -> None:
        self.name = name
        self.service = service
        self.token = secrets.token_hex(16)
        self._around = surroundings
        self._numbers = itertools.count(1)
        self.pods: list[Pod] = []
        self.config = served(service)
        head, *workers = groups(service)
        try:
            self.head = self.add_pod(head)
            self._wait_for_head()
            for group in workers:
                for _ in range(group["replicas"] * group.get("numOfHosts", 1)):
                    self.add_pod(group)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill all pods."""
        for pod in list(self.pods):
            self._forget(pod)
            pod.remove()
            self._around.network.remove(pod.interface)

    def group(self, name: str) -> dict[str, Any]:
        """A group of the RayService by its name."""
        return next(group for group in groups(self.service) if group["groupName"] == name)

    def of(self, group: str) -> list[Pod]:
        """The pods of a group, the oldest first."""
        return [pod for pod in self.pods if pod.labels["ray.io/group"] == group]

    def add_pod(self, group: dict[str, Any]) -> Pod:
        """Create a pod of a group."""
        around, spec = self._around, group["template"]["spec"]
        name = f"{self.name}-{group['groupName']}-{next(self._numbers)}"
        labels = {
            **group["template"]["metadata"]["labels"],
            "ray.io/cluster": self.name,
            "ray.io/group": group["groupName"],
        }
        interface = around.network.add(name, labels, around.namespace)
        if group["groupName"] == "head":
            around.hosts[f"{self.name}-head-svc"] = interface.address

        def environment() -> dict[str, str]:
            return self._environment(group, name)

        container = Container(
            interface.netns,
            kuberay.start_command(self.service, group),
            environment(),
            around.write_hosts(interface, name),
            volumes(spec, around.secrets),
            around.folder / f"{name}.log",
            spec["securityContext"]["runAsUser"],
            around.image,
        )
        port = int(self.config["http_options"]["port"])
        pod = Pod(name, spec, interface, container, kuberay.probe(group, port), environment)
        self.pods.append(pod)
        pod.start()
        return pod

    def delete_pod(self, pod: Pod, *, force: bool = False) -> float:
        """Delete a pod with its grace period, unless `force`. Returns seconds until it was gone."""
        took_s = pod.delete(force=force)
        self._forget(pod)
        self._around.network.remove(pod.interface)
        return took_s

    def put(self, config: dict[str, Any]) -> None:
        """Give Serve a config, as the operator does until the dashboard takes it."""
        self.config = config
        self._in_head(kuberay.dashboard_command(self.token, config))

    def status(self) -> dict[str, str]:
        """Each application's status and the reason, from the dashboard."""
        status, out = self.head.container.run(kuberay.dashboard_command(self.token))
        if status != 0:
            return {"dashboard": out[-300:]}
        applications = json.loads(out)["applications"]
        return {name: f"{a['status']} {a['message']}" for name, a in applications.items()}

    def wait_until_running(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until the application runs and every pod is ready."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = self.status()
            running = status and all(text.startswith("RUNNING") for text in status.values())
            if running and all(pod.is_ready for pod in self.pods):
                return
            time.sleep(1)
        ready = {pod.name: pod.is_ready for pod in self.pods}
        raise TimeoutError(f"not running after {timeout_s:.0f} s: {status}, {ready}")

    def _environment(self, group: dict[str, Any], pod: str) -> dict[str, str]:
        """What the API server, KubeRay and the image give a Ray container."""
        container = group["template"]["spec"]["containers"][0]
        values = image_environment()
        for source in container.get("envFrom", []):
            values |= self._around.config_maps[source["configMapRef"]["name"]]
        for entry in container.get("env", []):
            if "value" in entry:
                values[entry["name"]] = entry["value"]
            else:
                values[entry["name"]] = self._around.secret(entry["valueFrom"]["secretKeyRef"])
        values |= kuberay.environment(self.service, group, self.name, pod, self.token)
        options = self.service["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions")
        if options is not None and group["groupName"] == "head":
            reference = options["redisPassword"]["valueFrom"]["secretKeyRef"]
            values["REDIS_PASSWORD"] = self._around.secret(reference)
        return values

    def _wait_for_head(self) -> None:
        """As KubeRay's init container `wait-gcs-ready` does."""
        if not self.head.was_ready.wait(START_TIMEOUT_S):
            raise TimeoutError(
                f"the head isn't ready: {self.head.container.log.read_text()[-2000:]}"
            )

    def _in_head(self, command: list[str]) -> None:
        deadline = time.monotonic() + 60
        while True:
            status, out = self.head.container.run(command)
            if status == 0:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"the dashboard doesn't take the config: {out[-1000:]}")
            time.sleep(1)

    def _forget(self, pod: Pod) -> None:
        if pod in self.pods:
            self.pods.remove(pod)


def image_environment() -> dict[str, str]:
    """The environment of a process in the image."""
    folders = [str(Path(sys.executable).parent), "/usr/local/bin", "/usr/sbin", "/usr/bin", "/bin"]
    return {
        "PATH": ":".join(folders),
        "PYTHONPATH": "/opt/manta",
        "PYTHONUNBUFFERED": "1",
        "LANG": "C.UTF-8",
    }
