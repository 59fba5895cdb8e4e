"""`AnsweringClient`: an engine client that gives each conversation an answer that leads on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine.constraints.grammar_payload import ToolCalls, parse_grammar
from engine.protocol.sequence import TokenSequence
from engine.protocol.tokenizer_messages import Conversation, TextDelta
from tests.support.fake_client import FakeEngineClient

TEXT = "Paris is the capital of France."
CONTEXT = 1_000_000
"""Tokens. Here a token is a byte, and agents send 100 kB with each request."""
VOCABULARY = 200_000
"""Clients may have a tokenizer of their own."""


class AnsweringClient(FakeEngineClient):
    """Calls the first tool of a conversation that has tools and no result yet, fills the schema of
    an answer that has one, and else says a sentence."""

    def __init__(self, preferred_tools: tuple[str, ...] = ()) -> None:
        super().__init__(CONTEXT, VOCABULARY, tool_format="hermes")
        self._preferred = preferred_tools
        self._answers: dict[tuple[int, ...], str] = {}
        """By prompt: requests of a client may overlap."""

    async def render_chat(self, chat: Conversation) -> list[int]:
        ids = await super().render_chat(chat)
        has_result = any(message["role"] == "tool" for message in chat.messages)
        if chat.tools and not has_result:
            self._answers[tuple(ids)] = self._call(chat.tools)
        return ids

    async def generate(
        self,
        request: TokenSequence,
        read: Callable[[list[TextDelta]], None],
        known_ids: Sequence[int] = (),
    ) -> None:
        constraint = request.params.constraint
        answer = self._answers.get(tuple(request.prompt_ids), TEXT)
        if constraint is not None:
            answer = _constrained(constraint.payload, answer)
        # The generator reads the script before its first pause.
        self.script = answer
        await super().generate(request, read, known_ids)

    def _call(self, tools: list[dict[str, Any]]) -> str:
        functions = [tool["function"] for tool in tools]
        wanted = [each for each in functions if each["name"] in self._preferred]
        function = (wanted or functions)[0]
        arguments = minimal(function.get("parameters") or {})
        return _call_text(function["name"], arguments)


def _call_text(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _constrained(payload: dict[str, Any], answer: str) -> str:
    """What the constraint allows, as far as clients ask for such."""
    grammar = parse_grammar(payload)
    if grammar.type == "json_schema":
        return json.dumps(minimal(json.loads(str(grammar.value))))
    if grammar.type == "json_object":
        return '{"answer": "Paris"}'
    if grammar.type == "choice":
        return grammar.value[0]
    if grammar.type != "tool_calls" or answer.startswith("<tool_call>"):
        return answer
    calls = msgspec.json.decode(str(grammar.value), type=ToolCalls)
    if not calls.may_answer:
        first = calls.calls[0]
        arguments = json.dumps(minimal(first.schema))
        return f"{calls.opening}{first.begin}{arguments}{first.end}{calls.closing}"
    return answer if calls.answer is None else json.dumps(minimal(calls.answer))


def minimal(schema: Any, root: dict[str, Any] | None = None) -> Any:
    """The least JSON value that a schema of a tool or of an answer accepts."""
    if not isinstance(schema, dict):
        return {}
    root = schema if root is None else root
    if "$ref" in schema:
        return minimal(_referred(schema["$ref"], root), root)
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if "enum" in schema:
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return minimal(schema[key][0], root)
    kind = schema.get("type", "object")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: minimal(properties.get(name), root) for name in schema.get("required", ())}
    if kind == "array":
        return [minimal(schema.get("items"), root)] * schema.get("minItems", 0)
    if kind == "string":
        return "x" * schema.get("minLength", 1)
    if kind in ("integer", "number"):
        return schema.get("minimum", 1)
    return False if kind == "boolean" else None


def _referred(path: str, root: dict[str, Any]) -> Any:
    found: Any = root
    for part in path.removeprefix("#/").split("/"):
        found = found[part]
    return found
