"""`raise_open_files`: how many files and sockets this launch's processes may hold open."""

from __future__ import annotations

import resource

from deploy.start.haproxy import MAX_CONNECTIONS, connections_in
from engine.errors import ConfigError

LEAST = 1024
"""With fewer, Ray's processes fail in ways that name no cause (400: requests hang)."""
COMFORTABLE = 4096
"""With fewer, the server tells how many connections fit."""


def raise_open_files() -> list[str]:
    """Raise the soft limit to the hard one; children inherit it. Returns sentences to tell the
    user. Raises `ConfigError` if the hard limit is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return []
    if hard < LEAST:
        raise ConfigError(
            f"a process may have {hard} open files here, and the server needs {LEAST}, better "
            f"{COMFORTABLE}. Raise the hard limit: `ulimit -Hn {COMFORTABLE}` as root, LimitNOFILE "
            "of a systemd unit, or --ulimit nofile of docker run."
        )
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard >= COMFORTABLE or connections_in(hard) >= MAX_CONNECTIONS:
        return []
    return [
        f"a process may have {hard} open files: only {connections_in(hard)} connections at once, "
        f"and others get status 503. {COMFORTABLE} or more are better (ulimit -Hn)"
    ]
