"""`check_cluster_token`: whether a running Ray cluster asks for a token."""

from __future__ import annotations

import os
import subprocess
import sys

from engine.errors import ConfigError

PROBE_TIMEOUT_S = 12.0
_PROBE = """
import sys
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._raylet import GcsClient
address = canonicalize_bootstrap_address_or_die(sys.argv[1])
GcsClient(address=address).internal_kv_keys(b"", None, timeout=5)
print("open")
"""
"""Reads something of the cluster as a program without a token would."""


def check_cluster_token(address: str) -> None:
    """Raise `ConfigError` if the cluster at `address` (`RAY_ADDRESS`) serves programs without a
    token: whoever reaches its ports can run code in it, and so in the server.

    A cluster that can't be reached passes: `serve run` says what is wrong with it.
    """
    if address.startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS={address} is Ray's client protocol, which has no token. Run this on a "
            "machine of the cluster, with RAY_ADDRESS=auto."
        )
    env = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"}
    env["RAY_AUTH_MODE"] = "disabled"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, address],
            env=env,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:  # not reached, or asked for a token again and again
        return
    if done.stdout.strip().endswith("open"):
        raise ConfigError(
            f"the Ray cluster at {address} asks for no token, so whoever reaches it can run code "
            "in this server. Start it with RAY_AUTH_MODE=token (see docs/security.md)."
        )
