"""`OldClients`: replies to HTTP/1.0, which has no chunks."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class OldClients:
    """Sends a reply without `content-length` to a client of HTTP/1.0 as a whole, with its length.

    uvicorn sends such replies in chunks whatever the client's version is, and a client of HTTP/1.0
    takes the sizes of the chunks for text.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get("http_version") not in ("1.0", "0.9"):
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        body = bytearray()

        async def send_whole(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                if any(name.lower() == b"content-length" for name, _ in message["headers"]):
                    await send(message)
                else:
                    start = message
                return
            if start is None or message["type"] != "http.response.body":
                await send(message)
                return
            body.extend(message.get("body", b""))
            if message.get("more_body", False):
                return
            length = (b"content-length", str(len(body)).encode())
            await send({**start, "headers": [*start["headers"], length]})
            await send({"type": "http.response.body", "body": bytes(body)})

        await self._app(scope, receive, send_whole)
