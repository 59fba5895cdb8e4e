"""`ApiSettings`: limits and choices of the HTTP layer."""

from __future__ import annotations

from dataclasses import dataclass


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
    add_request_id_header: bool = True
    """Answer with `X-Request-Id`. False behind Ray Serve's Python proxy, which adds its own."""
