"""`TracingOptions`: where traces go. Loads nothing of OpenTelemetry."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple
from urllib.parse import urlsplit

from engine.errors import ConfigError

_EXPORTER = "opentelemetry.exporter.otlp.proto.http"


class TracingOptions(NamedTuple):
    """Where traces go, and what they name."""

    endpoint: str
    """Base URL of a collector that speaks OTLP over HTTP."""
    model: str
    """The model's name in the API."""


def check_tracing(endpoint: str | None) -> None:
    """Raise `ConfigError` unless traces can be sent to `endpoint`; None: there are none."""
    if endpoint is None:
        return
    # The text may hold a password, so that no message repeats it.
    try:
        parts = urlsplit(endpoint)
        is_base = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_base = False
    if not is_base or parts.query or parts.fragment:
        raise ConfigError("otlp_endpoint must be a base URL, as http://collector:4318.")
    if parts.username is not None:
        raise ConfigError(
            "otlp_endpoint must hold no password; set OTEL_EXPORTER_OTLP_HEADERS in the "
            "environment instead."
        )
    if parts.path.rstrip("/").endswith("/v1/traces"):
        raise ConfigError("otlp_endpoint is a base URL; leave out /v1/traces.")
    if not _has(_EXPORTER):
        raise ConfigError(
            "otlp_endpoint needs OpenTelemetry's packages: pip install 'manta-serve[otel]'."
        )


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False
