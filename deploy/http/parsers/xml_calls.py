"""Tool calls whose arguments stand between tags, as Qwen3-Coder, GLM 4.5 and MiniMax M2 write them.

<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>

<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">Paris</parameter>
</invoke>
</minimax:tool_call>

Demanded calls whose schema these forms can't hold are JSON objects in the same place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

from deploy.http.parsers.argument_text import (
    ONLY_TEXT,
    free_text,
    json_of,
    json_types,
    property_schema,
)
from deploy.http.parsers.parts import CallArguments
from deploy.http.parsers.tool_parser import (
    FindsPlace,
    ToolParser,
    Waits,
    length_of_beginning,
)
from engine.constraints.grammar_payload import TaggedStructure, TaggedValue

_DEFINITIONS = ("$defs", "definitions")
_DEFINED = re.compile(r"#/(?:\$defs|definitions)/")
_MAX_REFERRING = 8
"""Arguments that refer to definitions: each is compiled with all of them."""
_ROOT_KEYS = frozenset(
    ("type", "properties", "required", "additionalProperties", "title", "description", "$schema",
     *_DEFINITIONS)
)  # fmt: skip
"""Keys of a schema that tags can follow; properties that aren't named are never written."""


class XmlForm(NamedTuple):
    """The tags of one form: what stands before and behind a call's name, a key and a value.
    `behind_call` follows where more of the group does. `on_lines`: a value stands on lines of its
    own."""

    call: str
    named: str
    key: str
    keyed: tuple[str, ...]
    value_end: str
    call_end: str
    behind_call: str = "\n"
    on_lines: bool = False

    def structure(self, name: str, schema: Mapping[str, Any] | None) -> TaggedStructure | None:
        """What a call of the tool must be; with `schema` None its arguments are free. None if tags
        can't hold what the schema says: then they would leave open what a text means, or what it
        must be."""
        begin = f"{self.call}{name}{self.named}\n"
        end = self.call_end + self.behind_call
        if schema is None:
            free = TaggedValue("", self.behind_call, text_end=self.call_end)
            return TaggedStructure(begin, {}, "", values=[free])
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not schema.keys() <= _ROOT_KEYS or not isinstance(properties, Mapping):
            return None
        if not properties and schema.get("additionalProperties") is not False:
            return None
        if not isinstance(required, list):
            return None
        if not all(isinstance(key, str) and key in properties for key in required):
            return None
        values, needed = [], frozenset(required)
        for key in properties:
            value = self._value(key, schema, is_optional=key not in needed)
            if value is None:
                return None
            values.append(value)
        if sum(value.refers for value in values) > _MAX_REFERRING:
            return None
        definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
        return TaggedStructure(begin, definitions, end, values=values)

    def _value(self, key: str, root: Mapping[str, Any], is_optional: bool) -> TaggedValue | None:
        schema = root["properties"][key]
        line = "\n" if self.on_lines else ""
        begin = self.key + key + "\n".join(self.keyed) + line
        if any(mark in key for mark in '<>"\n'):
            return None
        if text := free_text(schema, root):
            if text.choices is None:
                # The line end doesn't count as text. Elsewhere the tag alone ends the text.
                text_end = self.value_end if text.max_length is None else line + self.value_end
                return TaggedValue(
                    begin, "\n", is_optional, text_end=text_end, max_length=text.max_length
                )
            if any(not choice or self.value_end in choice for choice in text.choices):
                return None
            end = f"{line}{self.value_end}\n"
            return TaggedValue(begin, end, is_optional, choices=list(text.choices))
        types = json_types(schema, root)
        if types is not None and "string" in types:
            return None
        references = _references(schema)
        if not isinstance(schema, Mapping) or not all(map(_DEFINED.match, references)):
            return None
        end = f"{line}{self.value_end}\n"
        return TaggedValue(begin, end, is_optional, schema=dict(schema), refers=bool(references))


class XmlParser(ToolParser):
    """Subclasses have the form. Tags within a value are the value's, unless the end of a value is
    followed by another key or the end of the call."""

    form: XmlForm

    def _read_calls(self, at: int) -> Waits:
        at = yield from self._skip_space(at)
        if self._text.startswith(("[", "{"), at):
            yield from super()._read_calls(at)
            return
        while True:
            at = yield from self._skip_space(at)
            at = yield from self._read_tagged(at)
            if at < 0:
                return
            yield from self._drop_left_overs(at)
            at = 0
            if self.closing and not self._is_open:
                return

    def _read_tagged(self, at: int) -> FindsPlace:
        """A call at `at`. Returns its end; -1 if there is none."""
        form = self.form
        begin = yield from self._after(at, form.call)
        end = -1 if begin < 0 else (yield from self._word(begin))
        if end < 0:
            return -1
        if not form.named and end == len(self._text):
            return -1  # the name may be cut
        name = self._text[begin:end]
        at = yield from self._after(end, form.named)
        if at >= 0:
            at = yield from self._skip_space(at)
        if at < 0 or not (yield from self._goes_on(at)):
            return -1
        self._begin(name)
        self._drop(at)
        yield from self._read_arguments_of(name)
        return 0

    def _read_arguments_of(self, name: str) -> Waits:
        """The keys and values of a call, and its end."""
        root = self._tools.get(name, {})
        self.is_cut = True
        separator = "{"
        while True:
            at = yield from self._skip_space(0)
            behind = yield from self._after(at, self.form.key)
            if behind < 0:
                break
            found = yield from self._key(behind)
            if found is None:
                if self._ended:
                    self._drop(len(self._text))
                else:
                    self._say("{}" if separator == "{" else "}")
                return
            key, at = found
            self._drop(at)
            schema = property_schema(root, key)
            prefix = f"{separator}{json.dumps(key, ensure_ascii=False)}: "
            if json_types(schema, root) == ONLY_TEXT:
                self._say(f'{prefix}"')
                is_whole, _ = yield from self._read_value(is_text=True)
                self._say('"' if is_whole else "")
            else:
                is_whole, value = yield from self._read_value(is_text=False)
                self._say(prefix + json_of(value, schema, root) if is_whole else "")
            separator = ", "
            if not is_whole:
                return
        end = yield from self._after(at, self.form.call_end)
        is_ended = end >= 0 or (yield from self._after(at, self.closing)) >= 0
        if not is_ended and (yield from self._goes_on(at)):
            self._drop(len(self._text))
            return
        self._say("{}" if separator == "{" else "}")
        self.is_cut = not is_ended
        if self.form.call_end != self.closing:
            self._drop(max(end, 0))

    def _key(self, at: int) -> Generator[None, None, tuple[str, int] | None]:
        """A key at `at`, and where its value begins; None if it is broken or cut."""
        first, *rest = self.form.keyed
        end = yield from self._until(at, first)
        if end < 0:
            return None
        behind = end + len(first)
        for word in rest:
            behind = yield from self._skip_space(behind)
            behind = yield from self._after(behind, word)
            if behind < 0:
                return None
        if self.form.on_lines:
            behind = max(behind, (yield from self._after(behind, "\n")))
        return self._text[at:end].strip(), behind

    def _read_value(self, is_text: bool) -> Generator[None, None, tuple[bool, str]]:
        """A value that begins the text, and the tag behind it. Returns whether it is whole, and the
        value, if it is. `is_text`: it is given out as it comes, and what is returned is its end."""
        tag, seen = self.form.value_end, 0
        while True:
            found = self._text.find(tag, seen)
            if found >= 0:
                behind = yield from self._skip_space(found + len(tag))
                if not (yield from self._goes_on(behind)):
                    seen = found + 1
                    continue
                value = self._without_line_end(found)
                if is_text:
                    self._say_text(value)
                self._drop(found + len(tag))
                return True, value
            cut = length_of_beginning(self._text, tag)
            seen = max(seen, len(self._text) - cut)
            if is_text:
                value = self._without_line_end(len(self._text) - cut)
                self._say_text(value)
                self._drop(len(value))
                seen -= len(value)
            if self._ended:
                self._drop(len(self._text))
                return False, ""
            yield

    def _without_line_end(self, end: int) -> str:
        value = self._text[:end]
        return value.removesuffix("\n") if self.form.on_lines else value

    def _goes_on(self, at: int) -> Generator[None, None, bool]:
        """Whether a key or an end of the call stands at `at`, or what was cut there may be one."""
        words = (self.form.key, self.form.call_end, self.closing)
        while True:
            rest = self._text[at:]
            if rest.startswith(words):
                return True
            may_come = any(word.startswith(rest) for word in words)
            if self._ended or not may_come:
                return may_come
            yield

    def _say(self, arguments: str) -> None:
        if arguments:
            self._parts.append(CallArguments(self._num_calls - 1, arguments))

    def _say_text(self, text: str) -> None:
        self._say(json.dumps(text, ensure_ascii=False)[1:-1])


class Qwen3CoderParser(XmlParser):
    """One call for each marker, which the model may leave out."""

    marker = "<tool_call>"
    closing = "</tool_call>"
    bare = "<function="
    form = XmlForm(
        "<function=", ">", "<parameter=", (">",), "</parameter>", "</function>", on_lines=True
    )


class Glm45Parser(XmlParser):
    """One call for each marker."""

    marker = "<tool_call>"
    closing = "</tool_call>"
    form = XmlForm(
        "", "", "<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>", "</tool_call>", ""
    )


class MiniMaxM2Parser(XmlParser):
    """Several calls behind one marker."""

    marker = "<minimax:tool_call>"
    closing = "</minimax:tool_call>"
    form = XmlForm(
        '<invoke name="', '">', '<parameter name="', ('">',), "</parameter>", "</invoke>"
    )


def _references(schema: Any) -> list[str]:
    """What a schema refers to, anywhere in it."""
    found: list[str] = []
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending += value.values()
            if "$ref" in value:
                found.append(str(value["$ref"]))
        elif isinstance(value, list):
            pending += value
    return found
