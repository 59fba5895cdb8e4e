"""The token without which a Ray cluster does nothing: one that runs must ask for it, and one that
starts here must have a place for it."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

from engine.errors import ConfigError

TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
"""Environment variable: the file with the token."""
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


def token_file(folder: Path) -> Path | None:
    """A new token's file in `folder`, where Ray can't keep one in the home folder: in a container
    with a root file system that is read-only, or a user without a home. None where it can, or has
    one.
    """
    is_given = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get(TOKEN_PATH)
    if is_given or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return None
    try:
        kept = Path.home() / ".ray" / "auth_token"
        kept.parent.mkdir(parents=True, exist_ok=True)
        if os.access(kept, os.R_OK) or os.access(kept.parent, os.W_OK | os.X_OK):
            return None
    except (OSError, RuntimeError):  # RuntimeError: the user has no home folder
        pass
    path = folder / "auth_token"
    path.touch(0o600)
    path.write_text(secrets.token_hex(32))
    return path
