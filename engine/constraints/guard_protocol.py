"""What `GuardProcess` and `engine.grammar_process` say to each other: frames on two pipes.

A frame is its length in 4 bytes, the highest first, and MessagePack. The first `GuardReply` says
that the process is ready, or why it can't be. Then one answers each payload of a grammar.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

HEAD_BYTES = 4
MAX_FRAME = 2**20
"""Bytes; a question is at most a few times as long as `MAX_GRAMMAR_BYTES`."""


class GuardReply(msgspec.Struct, array_like=True):
    """`refused`: for the reason in `message`. `died`, `late`: so did the process that compiled.
    `starved`: it got too little of the CPU to say."""

    verdict: Literal["ok", "refused", "died", "late", "starved"]
    message: str = ""


def frame(message: GuardReply | dict[str, Any]) -> bytes:
    """The bytes that go through the pipe."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEAD_BYTES, "big") + body
