"""TLS at the API's port: `ssl_certfile` and `ssl_keyfile` of `http_options`."""

from __future__ import annotations

import os
import ssl
from typing import Any

from engine.errors import ConfigError

KEYS = ("ssl_certfile", "ssl_keyfile")


def check_tls(http: dict[str, Any]) -> None:
    """Make the paths absolute. Raises `ConfigError` if certificate and key can't be used."""
    given = [http.get(key) for key in KEYS]
    if not any(given):
        return
    if not all(given):
        raise ConfigError("http_options: ssl_certfile and ssl_keyfile go together; set both.")
    for key in KEYS:
        http[key] = os.path.abspath(str(http[key]))
        try:
            with open(http[key], "rb"):
                pass
        except OSError as error:
            raise ConfigError(f"{key} {http[key]} can't be read: {error.strerror}.") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(http["ssl_certfile"], http["ssl_keyfile"], password="")
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"ssl_certfile and ssl_keyfile can't be used together: {error.args[-1]}. They must be "
            "PEM files that belong to each other, and the key without a password."
        ) from error


def without_tls(config: dict[str, Any]) -> dict[str, Any]:
    """The Serve config for Serve itself, when HAProxy does TLS in front of it."""
    http = {key: value for key, value in config["http_options"].items() if key not in KEYS}
    return {**config, "http_options": http}


def scheme(http: dict[str, Any]) -> str:
    """`https` or `http`."""
    return "https" if http.get("ssl_certfile") else "http"
