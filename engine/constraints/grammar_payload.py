"""`GrammarPayload`: a grammar as plain data."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

from engine.errors import RequestError

MAX_GRAMMAR_BYTES = 64 * 1024
"""UTF-8 bytes of all texts of a grammar."""
MAX_CHOICES = 10_000
MAX_WHITESPACE_PATTERN = 256
"""Characters of `whitespace_pattern`."""

GrammarType = Literal[
    "json_schema", "json_object", "regex", "choice", "lark", "gbnf", "structural_tag", "tool_calls"
]
JSON_TYPES = ("json_schema", "json_object", "structural_tag", "tool_calls")


class Thinking(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """Free text before what the grammar says, between two texts. `is_open`: the prompt has `start`
    already, so `end` must come; otherwise there may be none of it."""

    start: str
    end: str
    is_open: bool
    answer: str = ""
    """Stands before an answer, but not before tool calls; "" if nothing does."""

    @property
    def before_answer(self) -> str:
        """The text behind which the answer begins."""
        return self.answer or self.end


class GrammarPayload(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Payload of kind "grammar". By `type`, `value` is

    - json_schema: the schema, as JSON text
    - json_object: nothing; any JSON object
    - regex: a regular expression, which the whole output matches
    - choice: the texts of which the output is one
    - lark: a grammar in llguidance's dialect of Lark, which begins with the rule `start`
    - gbnf: a grammar in llama.cpp's GBNF, which begins with the rule `root`
    - structural_tag: `StructuralTags` as JSON text
    - tool_calls: `ToolCalls` as JSON text
    """

    type: GrammarType
    value: str | list[str] = ""
    any_whitespace: bool = True
    """JSON may have whitespace between its parts. False: none at all."""
    whitespace_pattern: str | None = None
    """A regular expression of the whitespace between parts of JSON."""
    thinking: Thinking | None = None


class TaggedValue(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A value between two texts: JSON that follows `schema`, or one of `choices`, or else any text
    up to the first `text_end`, of at most `max_length` characters."""

    begin: str
    end: str
    is_optional: bool = False
    schema: dict[str, Any] | None = None
    choices: list[str] = []
    text_end: str = ""
    max_length: int | None = None
    refers: bool = False
    """`schema` refers to definitions, which are in the schema of its `TaggedStructure`."""


class TaggedStructure(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """JSON that follows `schema`, between two texts. With `lark` it is the inside of a JSON string
    whose text follows this grammar, in place of the schema; with `values` it is these, one behind
    the other."""

    begin: str
    schema: dict[str, Any]
    end: str
    lark: str = ""
    values: list[TaggedValue] | None = None


class StructuralTags(msgspec.Struct, forbid_unknown_fields=True):
    """Free text with structures in it (vLLM's `structural_tag`).

    Where the text has one of the `triggers`, a structure begins whose `begin` starts with this
    trigger.
    """

    structures: list[TaggedStructure]
    triggers: list[str]
    type: Literal["structural_tag"] = "structural_tag"


class ToolCalls(msgspec.Struct, forbid_unknown_fields=True):
    """Calls of tools as a model writes them: groups of `marker`, `opening`, calls with `separator`
    between them, `closing`.

    `words` are texts that are looked up among the tokenizer's special tokens.
    """

    calls: list[TaggedStructure]
    """What a call may be: its text up to the arguments, their schema, and the text behind."""
    marker: str = ""
    opening: str = ""
    separator: str | None = None
    """None: one call in each group."""
    closing: str = ""
    between: str | None = None
    """What stands between groups; None: there is one group only."""
    words: list[str] = []
    may_answer: bool = False
    """The output may be free text, too, up to the marker; without a marker: unless it begins as a
    call does, with a brace."""
    parallel: bool = True
    """More than one call is allowed."""
    answer: dict[str, Any] | None = None
    """The free text is JSON that follows this schema; there is either an answer or calls."""


def parse_grammar(payload: dict[str, Any]) -> GrammarPayload:
    """Check types and size. Cheap. Raises `RequestError`."""
    try:
        grammar = msgspec.convert(payload, GrammarPayload)
    except msgspec.ValidationError as error:
        raise refused(f"constraint of kind grammar: {error}") from None
    is_list = isinstance(grammar.value, list)
    if is_list != (grammar.type == "choice"):
        wanted = "a list of strings" if grammar.type == "choice" else "a string"
        raise refused(f"a grammar of type {grammar.type} needs {wanted} as its value")
    if is_list and not (0 < len(grammar.value) <= MAX_CHOICES and all(grammar.value)):
        raise refused(f"choice takes 1 to {MAX_CHOICES} strings, none of them empty")
    if not grammar.value and grammar.type != "json_object":
        raise refused(f"a grammar of type {grammar.type} must not be empty")
    if grammar.type not in JSON_TYPES and not (
        grammar.any_whitespace and grammar.whitespace_pattern is None
    ):
        raise refused("whitespace options are only for JSON")
    if len(grammar.whitespace_pattern or "") > MAX_WHITESPACE_PATTERN:
        raise refused(f"whitespace_pattern takes at most {MAX_WHITESPACE_PATTERN} characters")
    try:
        texts = [grammar.value] if isinstance(grammar.value, str) else grammar.value
        num_bytes = sum(len(text.encode()) for text in texts)
        (grammar.whitespace_pattern or "").encode()
    except UnicodeEncodeError:
        raise refused("the grammar isn't valid Unicode: it has half of a surrogate pair") from None
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise refused(f"the grammar has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")
    return grammar


def grammar_key(payload: dict[str, Any]) -> bytes:
    """Tells payloads apart [20 bytes]. A hash that nobody can steer: equal keys of different
    payloads would give a client another one's grammar."""
    return hashlib.blake2b(msgspec.msgpack.encode(payload), digest_size=20).digest()


def refused(message: str) -> RequestError:
    """The error of a grammar that isn't taken."""
    return RequestError(message, "constraint")
