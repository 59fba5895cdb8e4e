"""The Service `manta`: nginx passes connections on to the pods that are ready.

kube-proxy passes connections too, not requests. Without a pod that is ready nobody listens, so a
connection is refused, as kube-proxy refuses it.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.k8s.network import Interface

PORT = 8000
CONFIG = """
load_module /usr/lib/nginx/modules/ngx_stream_module.so;
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/log warn;
events {{ worker_connections 1024; }}
stream {{
    upstream pods {{ least_conn; {servers} }}
    server {{
        listen {address}:{port};
        proxy_pass pods; proxy_timeout 1h; proxy_connect_timeout 2s;
    }}
}}
"""
START_TIMEOUT_S = 10.0


class Service:
    """Follows `ready`, which gives the addresses of the pods that are ready. Close it."""

    def __init__(self, interface: Interface, folder: Path, ready: Callable[[], list[str]]) -> None:
        self.address = interface.address
        self._netns = interface.netns
        self._folder = folder
        self._ready = ready
        self._passes_to: list[str] = []
        self._nginx: subprocess.Popen[bytes] | None = None
        self._all: list[subprocess.Popen[bytes]] = []
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="service")
        self._watcher.start()

    @property
    def url(self) -> str:
        """Where clients on this machine or in another pod find it."""
        return f"http://{self.address}:{PORT}"

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until it passes on connections to the pods that are ready now."""
        deadline = time.monotonic() + timeout_s
        while not (self._passes_to and self._passes_to == self._ready()):
            if time.monotonic() > deadline or not self._watcher.is_alive():
                raise TimeoutError(f"the Service has no pods that are ready: {self._ready()}")
            time.sleep(0.05)

    def close(self) -> None:
        """Stop it, with the connections that are open."""
        self._closing.set()
        self._watcher.join()  # it starts nginx
        for nginx in self._all:
            nginx.terminate()
            nginx.wait(20)

    def _watch(self) -> None:
        while not self._closing.wait(0.2):
            ready = self._ready()
            if ready == self._passes_to:
                continue
            if not ready:
                self._stop()
            elif self._nginx is None:
                self._start(ready)
            else:
                self._write(ready)
                self._nginx.send_signal(signal.SIGHUP)  # open connections stay with their pods
            self._passes_to = ready

    def _start(self, ready: list[str]) -> None:
        config = self._write(ready)
        words = ["ip", "netns", "exec", self._netns, "nginx", "-c", str(config)]
        with (self._folder / "out").open("ab") as out:
            self._nginx = subprocess.Popen(words, stdout=out, stderr=out)
        self._all.append(self._nginx)
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                return socket.create_connection((self.address, PORT), 1).close()
            except OSError as error:
                if time.monotonic() > deadline:
                    told = (self._folder / "out").read_text()[-1000:]
                    raise TimeoutError(f"nginx doesn't listen: {told}") from error
                time.sleep(0.05)

    def _stop(self) -> None:
        """No new connections. Those that are open go on."""
        if self._nginx is not None:
            self._nginx.send_signal(signal.SIGQUIT)
            self._nginx = None

    def _write(self, ready: list[str]) -> Path:
        servers = " ".join(f"server {address}:{PORT} max_fails=0;" for address in ready)
        path = self._folder / "nginx.conf"  # what a running nginx reads again
        text = CONFIG.format(folder=self._folder, servers=servers, address=self.address, port=PORT)
        path.write_text(text)
        return path
