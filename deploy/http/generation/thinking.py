"""How the output to a prompt begins to think."""

from __future__ import annotations

import re
from typing import Any

from deploy.http.engine_client import EngineClient
from deploy.http.generation.request import ChatRequest, NamedConstraint, Wanted
from deploy.http.parsers.reasoning_format import THINK, ReasoningFormat
from engine.constraints import structured
from engine.constraints.grammar_payload import Thinking

_TAIL = 8
"""Tokens at a prompt's end that are looked at; `<think>` and a line end are up to six, gpt-oss'
marks four."""
_TURN = re.compile(r"<[|｜][^<>]*[|｜]>|</?s>|\[/?INST\]|<(?:start|end)_of_turn>")
"""What begins and ends turns in the templates of models that think."""
_BEGINS_LINE = re.compile(r"(?:^|\n|[\]>])[ \t]*$")


def opens_thought(prompt: str, form: ReasoningFormat = THINK) -> bool:
    """Whether a text ends within a thought: its last `start` begins a line or stands behind a mark,
    or is one, and neither `end` nor a turn follows. Elsewhere the tag is only spoken of."""
    before, start, thought = prompt.rpartition(form.start)
    if not start or form.end in thought or _TURN.search(thought):
        return False
    is_mark = _TURN.match(start) is not None
    return not thought.strip() or is_mark or _BEGINS_LINE.search(before) is not None


async def thinking_of_chat(
    client: EngineClient, request: ChatRequest, ids: list[int], form: ReasoningFormat
) -> Thinking | None:
    """How a model that reasons begins to think in reply to a conversation, rendered to `ids`; None
    if the prompt ends within an answer that has a mark of its own."""
    if not request.chat.continue_final_message:
        tail = await client.decode(ids[-_TAIL:])
        return form.thinking(is_open=tail.rstrip().endswith(form.start))
    final = _text_of(request.chat.messages[-1].get("content"))
    if form.start in final or form.end in final:
        # What the message says counts, not what the template writes before it.
        return form.thinking(is_open=opens_thought(final, form))
    # A token has at least one byte of the message.
    tail = await client.decode(ids[-len(final.encode(errors="replace")) - _TAIL :])
    before = tail.rstrip().removesuffix(final.strip()).rstrip()
    if form.answer and before.endswith(form.answer):
        return None
    return form.thinking(is_open=before.endswith(form.start))


async def thinking_of_text(
    client: EngineClient, prompt: str | list[int], wanted: Wanted, form: ReasoningFormat
) -> Thinking | None:
    """The thought in which a prompt ends, if the model reasons; None if it ends in none, or nothing
    depends on it: then the output is text alone."""
    params = wanted.params
    matters = wanted.constraint is not None or params.stop or params.stop_token_ids
    if not matters:
        return None
    text = prompt if isinstance(prompt, str) else await client.decode(prompt)
    return form.thinking(is_open=True) if opens_thought(text, form) else None


def behind(thinking: Thinking | None, constraint: NamedConstraint | None) -> NamedConstraint | None:
    """The constraint, which begins to count behind the thought."""
    if constraint is None or thinking is None:
        return constraint
    return constraint._replace(spec=structured.after_thinking(constraint.spec, thinking))


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content if isinstance(content, str) else ""
