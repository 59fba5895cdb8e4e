"""Log-probabilities in the three shapes that the API has for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.protocol.tokenizer_messages import LogprobEntry, TopLogprob

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks (as in OpenAI's API)."""


class LogprobStyle(NamedTuple):
    """How a request wants its log-probabilities."""

    num_top: int
    """Alternatives per position."""
    listed: bool = False
    """The alternatives are the tokens that the request listed: all are given, and the token
    itself."""
    as_token_ids: bool = False
    """Tokens are named "token_id:<id>"."""

    def name(self, text: str, token_id: int) -> str:
        """The token as the reply names it."""
        return f"token_id:{token_id}" if self.as_token_ids else text

    def alternatives(self, entry: LogprobEntry) -> list[TopLogprob]:
        """What to show beside `entry`."""
        if not self.listed:
            return entry.top[: self.num_top]
        others = [other for other in entry.top if other[1] != entry.token_id]
        return [(entry.token, entry.token_id, entry.logprob, entry.bytes), *others]


def _finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def chat_logprobs(entries: Sequence[LogprobEntry], style: LogprobStyle) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""
    content = [
        {
            "token": style.name(entry.token, entry.token_id),
            "logprob": _finite(entry.logprob),
            "bytes": entry.bytes,
            "top_logprobs": [
                {"token": style.name(text, token_id), "logprob": _finite(logprob), "bytes": data}
                for text, token_id, logprob, data in style.alternatives(entry)
            ],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    entries: Sequence[LogprobEntry], offsets: Sequence[int], style: LogprobStyle
) -> dict[str, list[Any]]:
    """`choices[].logprobs` of a completion.

    The alternatives of a position are keyed by text, so of two with the same text (parts of
    characters) the likelier stays; the token itself is always among them.
    """
    names = [style.name(entry.token, entry.token_id) for entry in entries]
    tops = []
    for name, entry in zip(names, entries, strict=True):
        top: dict[str, float] = {}
        for text, token_id, logprob, _ in style.alternatives(entry):
            top.setdefault(style.name(text, token_id), _finite(logprob))
        top.setdefault(name, _finite(entry.logprob))
        tops.append(top)
    return {
        "text_offset": list(offsets),
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "tokens": names,
        "top_logprobs": tops,
    }


def echoed_logprobs(
    first_token: str,
    entries: Sequence[LogprobEntry | None],
    text: str,
    num_added: int,
    style: LogprobStyle,
) -> dict[str, list[Any]]:
    """`choices[].logprobs` of the echoed prompt, whose first token has no probability.

    Offsets are into the echoed `text`. It lacks the `num_added` characters of special tokens that
    the tokenizer put before it.
    """
    known = [entry for entry in entries if entry is not None]
    offsets = [min(max(entry.text_offset - num_added, 0), len(text)) for entry in known]
    logprobs = completion_logprobs(known, offsets, style)
    return {
        "text_offset": [0, *offsets],
        "token_logprobs": [None, *logprobs["token_logprobs"]],
        "tokens": [first_token, *logprobs["tokens"]],
        "top_logprobs": [None, *logprobs["top_logprobs"]],
    }


def prompt_logprobs(entries: Sequence[LogprobEntry | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each prompt token its own entry and the likeliest, by token id.

    `rank` is 1 for the likeliest.
    """
    positions: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            positions.append(None)
            continue
        own = {
            "logprob": _finite(entry.logprob),
            "rank": entry.rank or None,
            "decoded_token": entry.token,
        }
        position = {str(entry.token_id): own}
        for rank, (token, token_id, logprob, _) in enumerate(entry.top, 1):
            position[str(token_id)] = {
                "logprob": _finite(logprob),
                "rank": rank,
                "decoded_token": token,
            }
        positions.append(position)
    return positions
