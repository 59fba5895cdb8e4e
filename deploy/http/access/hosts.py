"""`HostGuard`: refuses requests that were meant for another server."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from starlette.types import ASGIApp, Receive, Scope, Send

from deploy.http.access.gate import send_refusal
from deploy.http.access.paths import app_path
from deploy.http.errors import ErrorReply
from engine.errors import RequestError

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_ROUTED = ("192.0.2.1", 9)
"""An address that nobody has (RFC 5737), to learn which of our own the default route begins with;
a UDP socket sends nothing when it connects."""


class HostGuard:
    """Answers 421 unless `Host` names this server.

    A page that a browser has loaded can let its own name point to 127.0.0.1 and then send requests
    to a server there, as if they were to its own site (DNS rebinding). Its name is in `Host`.
    """

    def __init__(
        self,
        app: ASGIApp,
        allowed: Collection[str],
        error_reply: Callable[[str, RequestError], ErrorReply],
        refused: Callable[[str], None],
        *,
        browsers_only: bool,
    ) -> None:
        """`allowed`: names and addresses without ports; `*.example.com` stands for every name that
        ends so. `browsers_only`: programs that aren't browsers may name any host.

        Loopback and the addresses of this machine are allowed besides.
        """
        self._app = app
        self._allowed = frozenset(host.lower() for host in allowed) | LOOPBACK
        self._endings = tuple(h[1:] for h in self._allowed if h.startswith("*."))
        self._own: frozenset[str] | None = None
        self._error_reply = error_reply
        self._refused = refused
        self._browsers_only = browsers_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_fine(scope):
            self._refused("misdirected")
            message = "The Host header doesn't name this server; allowed_hosts has the names."
            failure = RequestError(message, status=421, code="misdirected_request")
            reply = self._error_reply(app_path(scope), failure)
            await send_refusal(scope, send, reply)
            return
        await self._app(scope, receive, send)

    def _is_fine(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"host"]
        if self._browsers_only and not _is_browser(name for name, _ in scope["headers"]):
            return True
        return len(given) == 1 and self._allows(host_name(given[0]))

    def _allows(self, name: str) -> bool:
        if name in self._allowed or (name and name.endswith(self._endings or ("\0",))):
            return True
        if self._own is None:  # asked late: the process that built this isn't the one that serves
            self._own = own_hosts()
        return name in self._own


def host_name(value: bytes) -> str:
    """The name or address in a `Host` header, in lower case; "" if it is neither."""
    text = value.decode("latin-1").strip().lower()
    if text.startswith("["):
        name, bracket, port = text[1:].partition("]")
        port = port.removeprefix(":")
        try:
            name = str(ipaddress.IPv6Address(name))
        except ValueError:
            return ""
    else:
        name, bracket, port = text.partition(":")
        name = name.removesuffix(".")
        bracket = "]"
    if not bracket or (port and not port.isascii()) or (port and not port.isdigit()):
        return ""
    return name


def own_hosts() -> frozenset[str]:
    """Name and addresses of this machine or pod."""
    name = socket.gethostname().lower()
    found = {name}
    with suppress(OSError):  # a name that nothing resolves: then nobody can use it either
        found |= {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ROUTED)  # fails without a route: then the machine has no address of its own
        found.add(probe.getsockname()[0])
    return frozenset(found)


def _is_browser(names: Iterable[bytes]) -> bool:
    """Browsers say where a request comes from, with one of these headers or both."""
    return any(name in (b"origin", b"sec-fetch-site") for name in names)
