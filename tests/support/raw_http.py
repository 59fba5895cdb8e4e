"""Requests as raw bytes, and the ways to write one that might open a protected path."""

from __future__ import annotations

import socket

OPEN = {"/health", "/docs/assets/{name}", "/chat", "/status", "/pages/{name}"}
ADMIN = {
    "/metrics", "/debug/trace", "/debug/status", "/docs", "/openapi.json", "/flush_cache",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    "/server_info", "/get_server_info",
}  # fmt: skip
USER = {
    "/v1/models", "/v1/models/{model:path}", "/version", "/ping", "/v1/completions",
    "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/embeddings",
    "/v1/score", "/score", "/tokenize", "/detokenize", "/v1/messages",
    "/v1/messages/count_tokens", "/generate", "/abort_request", "/health_generate", "/model_info",
    "/get_model_info", "/v1/responses/{record_id}", "/v1/responses/{record_id}/cancel",
    "/v1/responses/{record_id}/input_items", "/v1/completions/{record_id}",
    "/v1/chat/completions/{record_id}", "/v1/chat/completions/{record_id}/messages",
    "/v1/messages/{record_id}", "/generate/{record_id}", "/v1/files", "/v1/files/{file_id}",
    "/v1/files/{file_id}/content", "/v1/batches", "/v1/batches/{batch_id}",
    "/v1/batches/{batch_id}/cancel",
}  # fmt: skip
"""Who may use which route of the application."""
NO_ROUTES = {"/", "/nothing", "/v1", "/status/data", "/-/routes"}

METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE")
HOSTS = ("x", "x/?", "x/health", "x/health?", "x/#", "a@health", "", "?")
PATHS = (
    "/health/../metrics", "/health/..%2fmetrics", "//metrics", "/%6detrics", "/metrics/",
    "/metrics;/health", "/METRICS", "/metrics%00", "/docs/assets/../../metrics", "/health//",
    "http://x/metrics", "/docs/assets/%2e%2e/%2e%2e/metrics", "/metrics?x=/health",
    "/metrics#/health", "/v1/models/", "/./metrics",
)  # fmt: skip
HEADERS = (
    "Authorization: user", "Authorization: Basic dXNlcjp1c2Vy", "Authorization: Bearer",
    "Authorization: Bearer wrong", "Authorization: Bearer user x", "X-Api-Key: User",
    "X-Api-Key:", "Authorization: Bearer \xff\xfe", "X-Forwarded-For: 127.0.0.1",
    "X-Original-URL: /health", "X-Rewrite-URL: /health", "Cookie: key=user",
    "X_Api_Key: user", "Proxy-Authorization: Bearer user", "X-HTTP-Method-Override: GET",
)  # fmt: skip
"""None is a valid way to present the key `user`."""


def ask(port: int, request: bytes) -> tuple[int, bytes]:
    """Status and all bytes of the answer to `request`, which must ask to close the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return int(answer.split(b" ", 2)[1]), answer


def raw(method: str, path: str, *headers: str, host: str = "x", body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *headers, "Connection: close"]
    if body:
        lines += [f"Content-Length: {len(body)}", "Content-Type: application/json"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body
