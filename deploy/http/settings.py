"""`ApiSettings`: limits and choices of the HTTP layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deploy.http.tracing.options import TracingOptions


@dataclass(frozen=True)
class ApiSettings:
    """Limits and choices of the HTTP layer."""

    max_body_bytes: int = 4 * 2**20
    max_request_tokens: int = 4 * 2**20
    """Prompts and outputs of all sequences of a request."""
    stall_timeout_s: float = 120.0
    """A stream is aborted when its client has read nothing for this time."""
    allow_request_chat_templates: bool = False
    """Take `chat_template` from requests. Only for clients you trust: templates are programs, and
    a loop in one stalls the tokenizer for everybody."""
    metrics_names: Literal["manta", "vllm"] = "manta"
    """"vllm": `/metrics` has vLLM's names beside Manta's."""
    add_request_id_header: bool = True
    """Answer with `X-Request-Id`. False behind Ray Serve's Python proxy, which adds its own."""
    body_timeout_s: float = 30.0
    """A request's body has this time to come."""
    api_keys_file: str = ""
    """The keys that may call; "": everybody may."""
    allowed_hosts: tuple[str, ...] = ()
    """What `Host` may name besides this machine; (): anything."""
    is_local: bool = False
    """Only programs of this machine reach the server. Then browsers must name it in `Host`."""
    cors_origins: tuple[str, ...] = ()
    """Sites whose pages may use the API in a browser."""
    tracing: TracingOptions | None = None
    """Where traces of requests go; None: there are none."""
