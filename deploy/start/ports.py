"""Ports of one launch: a block of its own below the ephemeral ports, held while the launch runs.

A port that was free a moment ago may be another process's now, and Ray Serve starts its proxies on
the same port again and again. So no code here looks for free ports: it binds each port it chooses.
"""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import psutil

from engine.errors import ConfigError

BLOCK = 1_000
FIRST, LAST = 12_000, 32_000
"""Blocks begin at 12000, 13000, ..., 31000: below Linux's own ephemeral ports (from 32768)."""
REPLICAS_FROM = 10
"""Offset in the block of the first port for replicas; all later ports are theirs too."""
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortBlock:
    """1,000 ports: `fallback_http`, `fallback_grpc` and `replicas`.

    This launch owns the block while its first port is bound, without listening. Another launch that
    tries the block takes the next one. The fallback proxy's ports are bound too: that proxy shares
    them (`SO_REUSEPORT`, same user), other programs can't. Replicas skip ports that are taken.
    """

    def __init__(self) -> None:
        """Raises `ConfigError` if every block is taken."""
        self._held = ExitStack()
        for first in blocks():
            with ExitStack() as held:
                try:
                    held.enter_context(_bound(first, shared=False))
                    held.enter_context(_bound(first + 1, shared=True))
                    held.enter_context(_bound(first + 2, shared=True))
                except OSError:
                    continue
                self._held = held.pop_all()
            self.first = first
            return
        raise ConfigError(
            f"no block of {BLOCK} ports from {FIRST} to {LAST - 1} is free: other servers, or "
            "programs that listen on a block's first three ports, hold them all."
        )

    @property
    def fallback_http(self) -> int:
        """HTTP port of the Python proxy, which HAProxy uses when there is no replica."""
        return self.first + 1

    @property
    def fallback_grpc(self) -> int:
        """gRPC port of the same proxy. Serve wants a number; nothing listens there."""
        return self.first + 2

    @property
    def replicas(self) -> range:
        """Ports on which ingress replicas may listen."""
        return range(self.first + REPLICAS_FROM, self.first + BLOCK)

    def __enter__(self) -> PortBlock:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._held.close()


def blocks() -> list[int]:
    """First ports of the blocks, in the order of trying: below the ephemeral ports if possible."""
    firsts = list(range(FIRST, LAST, BLOCK))
    try:
        lowest = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return firsts
    return [first for first in firsts if first + BLOCK <= lowest] or firsts


def hold_api_port(host: str, port: int) -> socket.socket:
    """Keep other launches from `host`:`port` as long as the result is open; the API binds it.

    Raises `ConfigError` if the API can't listen there.
    """
    if not 1 <= port <= 65535:
        raise ConfigError(f"there is no port {port}; choose one from 1024 to 65535.")
    _check_free(host, port)
    lock = socket.socket(socket.AF_UNIX)
    try:
        # Serve's Python proxies share ports: two launches at once could both have this one.
        if sys.platform == "linux":
            lock.bind(f"\0manta-api-{host}-{port}")
    except OSError as error:
        lock.close()
        raise ConfigError(
            f"another server is starting or stopping on {host} port {port}. Choose another port "
            "with --port."
        ) from error
    return lock


def _check_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            # As servers do: connections of an earlier server in TIME_WAIT don't hold the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
    except PermissionError as error:
        raise ConfigError(
            f"port {port} may be taken by privileged users only; choose one from 1024 on with "
            "--port."
        ) from error
    except socket.gaierror as error:
        raise ConfigError(f"the host name {host} is unknown ({error.strerror}).") from error
    except OSError as error:
        raise ConfigError(
            f"can't listen on {host} port {port}: {error.strerror}. Choose another with --port, or "
            f"stop what uses it{_user_of(port)}."
        ) from error


def _user_of(port: int) -> str:
    """` (process 12, name)` of the process that listens on the port; "" if that isn't known."""
    try:
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid:
                return f" (process {each.pid}, {psutil.Process(each.pid).name()})"
    except (psutil.Error, OSError):  # it ended, or the system doesn't tell
        pass
    return ""


def _bound(port: int, *, shared: bool) -> socket.socket:
    """A socket that holds the port on all interfaces. Raises `OSError` if it is taken."""
    holder = socket.socket()
    try:
        if shared:
            # First try without sharing: other servers of this user could share the port too.
            with socket.socket() as probe:
                probe.bind(("", port))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("", port))
    except OSError:
        holder.close()
        raise
    return holder
