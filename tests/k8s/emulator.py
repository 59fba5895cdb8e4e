"""Kubernetes with KubeRay on one machine, from the rendered manifests of `k8s/`.

    sudo .venv/bin/python -m tests.k8s.emulator k8s/overlays/cpu   # serves until Ctrl-C

Emulated: pods (network, mount, pid, ipc and uts namespaces, the user, a read-only root), the
kubelet's restarts, readiness probes, preStop hooks and grace periods, NetworkPolicy (nftables),
Secrets, ConfigMaps, the Service `manta` (nginx), both Redis, and what KubeRay does with a
RayService: commands, environment, probes, the token, PUT of `serveConfigV2`, a new cluster beside
the old one.
Not emulated: the API server (admission, CEL, RBAC), scheduling, the autoscaler, limits of
resources, storage, init containers and sidecars.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from tests.k8s.cluster import Cluster, Surroundings
from tests.k8s.container import image_folder
from tests.k8s.manifests import Document, find, matches, render, served, the
from tests.k8s.network import Interface, Network
from tests.k8s.service import Service
from tests.support.debian import missing_packages

PROGRAMS = {
    "ip": "iproute2",
    "nft": "nftables",
    "redis-server": "redis-server",
    "nginx": "nginx-light",
    "/usr/lib/nginx/modules/ngx_stream_module.so": "libnginx-mod-stream",
}
"""Programs and files that it uses -> the Debian packages that have them."""


class Emulator:
    """One Kubernetes namespace with Manta in it. Use it as a context."""

    def __init__(self, documents: list[Document]) -> None:
        if missing := missing_packages(PROGRAMS):
            raise RuntimeError(f"install Debian's {', '.join(sorted(missing))}")
        self.folder = Path(tempfile.mkdtemp(prefix="manta-k8s-"))
        self.folder.chmod(0o755)
        self.documents = documents
        self.key = f"sk-{secrets.token_hex(24)}"
        self.clusters: list[Cluster] = []
        self._names = (f"manta-{letters}" for letters in itertools.count(1))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closing = threading.Event()
        self._service: Service | None = None
        self.network = Network(find(documents, "NetworkPolicy"), "manta")
        try:
            image = self.folder / "image"
            image.mkdir()
            self.around = Surroundings(self.network, self.folder, image_folder(image), documents)
            self._make_secrets()
            for stateful in find(documents, "StatefulSet"):
                self._start_redis(stateful)
            folder = self.folder / "service"
            folder.mkdir()
            interface = self.network.add("service", {}, "kube-system")
            self._service = Service(interface, folder, self._ready)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Emulator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave no process, no network and no file."""
        self._closing.set()
        if self._service is not None:
            self._service.close()
        for cluster in self.clusters:
            cluster.close()
        for process in reversed(self._processes):
            process.terminate()
            process.wait(20)
        self.network.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def url(self) -> str:
        """The address of the Service, for clients on this machine or in another pod."""
        assert self._service is not None
        return self._service.url

    @property
    def cluster(self) -> Cluster:
        """The newest cluster."""
        return self.clusters[-1]

    def apply(self, service: Document | None = None) -> Cluster:
        """Start a cluster for the RayService, and wait until it serves."""
        service = service or the(self.documents, "RayService")
        cluster = Cluster(next(self._names), service, self.around)
        self.clusters.append(cluster)
        cluster.put(served(service))
        cluster.wait_until_running()
        assert self._service is not None
        self._service.wait()
        return cluster

    def upgrade(self, service: Document) -> None:
        """`NewCluster`: start a second cluster, wait until it serves, then delete the first."""
        old = self.cluster
        self.apply(service)
        # The Service's endpoints now have both; KubeRay deletes the old cluster after its delay.
        delay_s = service["spec"]["rayClusterDeletionDelaySeconds"]
        if self._closing.wait(delay_s):
            return
        ends = [threading.Thread(target=old.delete_pod, args=(pod,)) for pod in list(old.pods)]
        for end in ends:
            end.start()
        for end in ends:
            end.join()

    def client(self, name: str, labels: dict[str, str], namespace: str) -> Interface:
        """Another pod's network, to call from."""
        return self.network.add(name, labels, namespace)

    def _make_secrets(self) -> None:
        """What README tells to create, and the keys' Secret with a key that is known here."""
        digest = hashlib.sha256(self.key.encode()).hexdigest()
        keys = {"keys": [{"name": "test", "sha256": digest, "role": "admin"}]}
        for document in find(self.documents, "Secret"):
            self.around.set_secret(document["metadata"]["name"], {})
        self.around.set_secret("manta-keys", {"keys.yaml": yaml.safe_dump(keys)})
        for name in ("manta-redis", "manta-request-store"):
            self.around.set_secret(name, {"password": secrets.token_hex(16)})

    def _start_redis(self, stateful: Document) -> None:
        """Debian's redis-server with the manifest's arguments and the network of its pod. Its name
        is that of its Service."""
        name, template = stateful["metadata"]["name"], stateful["spec"]["template"]
        interface = self.network.add(name, template["metadata"]["labels"], "manta")
        self.around.hosts[stateful["spec"]["serviceName"]] = interface.address
        container = template["spec"]["containers"][0]
        env = {
            entry["name"]: self.around.secret(entry["valueFrom"]["secretKeyRef"])
            for entry in container["env"]
        }
        (script,) = container["args"]
        data = self.folder / name
        data.mkdir()
        script = script.replace("/tmp/", f"{data}/").replace("/data", str(data))
        script = script.replace("--dir", "--protected-mode no --dir")
        words = ["ip", "netns", "exec", interface.netns, *container["command"], script]
        env["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
        log = (self.folder / f"{name}.log").open("wb")
        self._processes.append(subprocess.Popen(words, env=env, stdout=log, stderr=log))

    def _ready(self) -> list[str]:
        """Addresses that the Service `manta` selects and that are ready."""
        selector = {"matchLabels": the(self.documents, "Service", "manta")["spec"]["selector"]}
        return sorted(
            pod.interface.address
            for cluster in self.clusters
            for pod in list(cluster.pods)
            if pod.is_ready and matches(pod.labels, selector)
        )


def scaled(config: dict[str, Any], replicas: int) -> dict[str, Any]:
    """A config with at least this number of engines."""
    changed = copy.deepcopy(config)
    scaling = changed["applications"][0]["args"]["autoscaling"]
    scaling |= {"min_replicas": replicas, "downscale_delay_s": 5.0}
    return changed


def main() -> None:
    """Serve an overlay until Ctrl-C."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("overlay", nargs="?", default="k8s/overlays/cpu")
    documents = render(parser.parse_args().overlay)
    began = time.monotonic()
    with Emulator(documents) as emulator:
        emulator.apply()
        print(
            f"serves at {emulator.url} after {time.monotonic() - began:.0f} s; key {emulator.key}"
        )
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
