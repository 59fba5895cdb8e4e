"""`ApiSettings`: what the HTTP layer goes by."""

from __future__ import annotations

from dataclasses import dataclass, field

from deploy.http.tracing.options import TracingOptions
from deploy.options import ServerOptions


@dataclass(frozen=True)
class ApiSettings:
    """The server's options, and what follows from where and as what it is served."""

    server: ServerOptions = field(default_factory=ServerOptions)
    add_request_id_header: bool = True
    """Answer with `X-Request-Id`. False behind Ray Serve's Python proxy, which adds its own."""
    is_local: bool = False
    """Only programs of this machine reach the server. Then browsers must name it in `Host`."""
    tracing: TracingOptions | None = None
    """Where traces of requests go; None: there are none."""
