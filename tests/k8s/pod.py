"""A pod: its container, as a kubelet runs it. It starts it again, asks its probe, and ends it.

Init containers, other containers (sidecars), resource limits and affinities aren't emulated.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.k8s.container import Container, Volume
from tests.k8s.network import Interface

PROBE_PERIOD_S = 2.0
"""Shorter than KubeRay's 5 s: these machines start slowly enough."""
BACK_OFF_S = (0.5, 5.0, 10.0)


class Pod:
    """A running pod. `is_ready` follows its probe."""

    def __init__(
        self,
        name: str,
        spec: dict[str, Any],
        interface: Interface,
        container: Container,
        probe: Sequence[str],
        environment: Callable[[], Mapping[str, str]],
    ) -> None:
        self.name = name
        self.spec = spec
        self.interface = interface
        self.container = container
        self.restarts = 0
        self.is_ready = False
        self.was_ready = threading.Event()
        self._probe = probe
        self._environment = environment
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def labels(self) -> dict[str, str]:
        """The pod's labels."""
        return self.interface.labels

    def start(self) -> None:
        """Start its container, and go on as long as it isn't deleted."""
        self.container.start()
        self._thread.start()

    def delete(self, *, force: bool = False) -> float:
        """End it as the API server's `delete` does. Returns seconds until it was gone."""
        began = time.monotonic()
        self._is_ending.set()
        self.is_ready = False
        grace_s = float(self.spec.get("terminationGracePeriodSeconds", 30))
        if not force and self.container.is_running:
            hook = self.spec["containers"][0].get("lifecycle", {}).get("preStop")
            if hook is not None:
                self.container.run(hook["exec"]["command"], timeout_s=grace_s)
            self.container.signal(signal.SIGTERM)
            self.container.wait(grace_s - (time.monotonic() - began))
        self.killed = self.container.is_running
        self.container.remove()
        self._thread.join()
        return time.monotonic() - began

    def kill(self) -> None:
        """kill -9 of all its processes; the kubelet starts the container again."""
        self.container.signal(signal.SIGKILL)

    def remove(self) -> None:
        """End it at once, for good."""
        self.delete(force=True)

    def _run(self) -> None:
        ended = 0
        while not self._is_ending.wait(PROBE_PERIOD_S if self.container.is_running else 0.2):
            if not self.container.is_running:
                self.is_ready = False
                pause = BACK_OFF_S[min(ended, len(BACK_OFF_S) - 1)]
                if self._is_ending.wait(pause):
                    return
                ended += 1
                self.restarts += 1
                self.container.remove()
                self.container.env = self._environment()
                self.container.start()
                continue
            status, _ = self.container.run(self._probe, timeout_s=10)
            self.is_ready = status == 0 and not self._is_ending.is_set()
            if self.is_ready:
                self.was_ready.set()


def volumes(spec: dict[str, Any], files: Mapping[str, Path]) -> list[Volume]:
    """The mounts of a pod's first container. `files` has the folders of Secrets by name."""
    sources = {volume["name"]: volume for volume in spec.get("volumes", [])}
    found = []
    for mount in spec["containers"][0].get("volumeMounts", []):
        volume = sources[mount["name"]]
        if "secret" in volume:
            folder = files[volume["secret"]["secretName"]]
            found.append(Volume(mount["mountPath"], folder, read_only=True))
        elif "emptyDir" in volume or "persistentVolumeClaim" in volume:
            found.append(Volume(mount["mountPath"]))
        else:
            raise NotImplementedError(f"volume {volume}")
    return found
