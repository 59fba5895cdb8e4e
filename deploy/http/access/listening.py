"""Who can reach the server, and whether they need a key."""

from __future__ import annotations

import ipaddress

from engine.errors import ConfigError


def check_listening(api_keys_file: str | None, auth: str | None, host: str) -> None:
    """Raise `ConfigError` if others than this machine's programs could call without a key, and
    nobody has written that they may."""
    if api_keys_file or auth == "none" or is_loopback(host):
        return
    raise ConfigError(
        f"others can reach a server on {host}, and there are no keys. Set api_keys_file "
        "(docs/security.md), or auth: none to let everybody call, or http_options.host to "
        "127.0.0.1."
    )


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach what listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
