"""What the launcher prints of a server: what is loaded, where it listens, what to try."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from deploy.start.devices import weights_line
from deploy.start.target import Target
from deploy.start.tls import scheme
from engine import __version__
from engine.checkpoint.gguf.folder import is_gguf_folder
from engine.checkpoint.tried_types import model_line


def loading_lines(target: Target, log: Path | None, warnings: list[str]) -> list[str]:
    """The lines to print before anything starts."""
    lines = [
        line
        for app in target.applications
        for line in (
            f"manta {__version__}: loading {describe(app)}",
            f"model: {model_line(app.resolved.model)}",
            *(f"weights: {weights}" for weights in [weights_line(app)] if weights),
        )
    ]
    if log is not None:
        lines.append(f"log: {log}")
    return lines + [f"warning: {warning}" for warning in warnings]


def describe(app: Any) -> str:
    """The model of an `AppConfig`, its folder or GGUF file, and its parallel layout."""
    engine, model = app.engine, app.resolved.model
    # The folder that is made of a GGUF file means nothing to its owner.
    place = engine.model if is_gguf_folder(model.path) else model.path
    replicas = f"{app.max_replicas} replicas of " if app.max_replicas > 1 else ""
    return (
        f"{app.model_name} ({model.title}) from {place}, {replicas}tp {engine.tp_size} "
        f"pp {engine.pp_size}{_groups(app)}, device {engine.device}"
    )


def _groups(app: Any) -> str:
    """How tensor parallel ranks divide experts; "" if there is nothing to divide."""
    layout, engine = app.resolved.model.layout, app.engine
    if layout is None or not layout.mixtures or engine.tp_size == 1:
        return ""
    return f" ep {layout.expert_groups(engine.tp_size, engine.ep_size)}"


def ready_lines(target: Target, seconds: float) -> list[str]:
    """The lines to print once requests are answered."""
    host = reachable_host(str(target.http["host"]))
    address = f"[{host}]" if ":" in host else host
    app = target.config["applications"][0]
    prefix = app.get("route_prefix", "/").rstrip("/")
    base = f"{scheme(target.http)}://{address}:{target.http['port']}{prefix}"
    body = {"model": target.applications[0].model_name, "prompt": "Return the", "max_tokens": 32}
    return [
        f"ready after {seconds:.0f} s: OpenAI's API on {base}/v1 (Ctrl-C stops)",
        f"try: curl {base}/v1/completions -H 'Content-Type: application/json' -d "
        + shlex.quote(json.dumps(body)),
    ]


def reachable_host(host: str) -> str:
    """The host by which a program on this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
