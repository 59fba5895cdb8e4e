"""Server-sent events of a stream; everything that doesn't change is encoded once."""

from __future__ import annotations

from typing import Any

import msgspec

from deploy.http.body import encode_json

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class ChunkEncoder:
    """Encodes the chunks of one stream; `payload` is "text" or "delta", the field that differs."""

    def __init__(
        self,
        head: dict[str, Any],
        payload: str,
        n: int,
        with_usage: bool,
    ) -> None:
        """`head`: the fields of every chunk that stand before its choices."""
        self._head = b"data: " + encode_json(head)[:-1]
        self._payload = payload.encode()
        self._choices = [
            self._head + b',"choices":[{"index":%d,"%s":' % (index, self._payload)
            for index in range(n)
        ]
        # With include_usage every chunk has the field, as in OpenAI's streams.
        self._no_usage = b',"usage":null' if with_usage else b""
        self._nulls = b',"logprobs":null,"finish_reason":null,"stop_reason":null'
        self._end = b"}]" + self._no_usage + b"}\n\n"
        self._tail = self._nulls + self._end

    def chunk(self, index: int, payload: bytes, token_ids: list[int] | None = None) -> bytes:
        """The usual chunk: only text, and its tokens if they were asked for."""
        if token_ids is None:
            return self._choices[index] + payload + self._tail
        ids = b',"token_ids":' + _encode(token_ids)
        return self._choices[index] + payload + self._nulls + ids + self._end

    def full_chunk(
        self,
        index: int,
        payload: bytes,
        *,
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
        stop_reason: str | int | None,
        token_ids: list[int] | None = None,
        choice_extra: dict[str, Any] | None = None,
        chunk_extra: dict[str, Any] | None = None,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        """A chunk with other fields. The extras are further fields of the choice or the chunk."""
        choice: dict[str, Any] = {
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
        if stop_reason is not None:
            choice["matched_stop"] = stop_reason
        if token_ids is not None:
            choice["token_ids"] = token_ids
        choice |= choice_extra or {}
        parts = [self._choices[index], payload, b",", encode_json(choice)[1:], b"]"]
        if chunk_extra:
            parts += [b",", encode_json(chunk_extra)[1:-1]]
        if usage is None:
            parts.append(self._no_usage)
        else:
            parts += [b',"usage":', encode_json(usage)]
        parts.append(b"}\n\n")
        return b"".join(parts)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The last chunk with `include_usage`; it has no choices."""
        return self._head + b',"choices":[],"usage":' + encode_json(usage) + b"}\n\n"
