"""Chat templates: Jinja programs that come with a model and turn messages into a prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.defaults
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.tokenizer.call_shape import CallShape, find_call_shape

# transformers' marker: it finds the end of the final message in the rendered chat.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*$")
_PROBE = "the text of a part"
BLANK = " "
"""Stands for no content where a template demands some; templates trim it."""
_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "offered_function",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": []},
    },
}
_PROBED_ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatTemplate:
    """One compiled template, with the environment and the rules of transformers.

    The sandbox keeps a template from reaching the interpreter; it doesn't bound its time or
    memory, so only take templates from people you would take a model from.
    Raises `jinja2.TemplateSyntaxError` if `source` isn't a template.
    """

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(_FUNCTIONS)
        self._template = environment.from_string(source)
        self.variables: frozenset[str] = frozenset(
            jinja2.meta.find_undeclared_variables(environment.parse(source))
        )
        """Names that the template may read before it sets them; functions aren't among them."""
        self.reads_thinking = ".thinking" in source and "reasoning_content" not in source
        """Whether the thought of an earlier reply is its `thinking`, as in gpt-oss' template."""
        self._reads_parts: dict[str, bool] = {}
        self._call_shapes: dict[bool, CallShape] = {}
        self._takes_empty: bool | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Text of the chat. Keys with the value None are dropped from the messages, but for the
        content of a message with calls: templates ask whether it is none.

        `continue_final_message` cuts the text after the last message's content, so that the model
        goes on with it. Raises any error of the template, and `ValueError` if the last message
        can't be continued.
        """
        chat = [
            {k: v for k, v in m.items() if v is not None or (k == "content" and "tool_calls" in m)}
            for m in messages
        ]
        if continue_final_message:
            if not isinstance(chat[-1].get("content"), str):
                raise ValueError("the final message has no content to continue")
            chat[-1]["content"] += _CONTINUE_TAG
        text = self._template.render(
            {
                **variables,
                "messages": chat,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        if not continue_final_message:
            return text
        final = chat[-1]["content"].removesuffix(_CONTINUE_TAG).strip()
        return _without_empty_thought(_cut_at_tag(text), final)

    def reads_parts(self, role: str, variables: Mapping[str, Any]) -> bool:
        """Whether the template reads the content of a `role`'s message as a list of text parts.

        Found by rendering such a message, once per role: many templates know lists only in some
        roles and print them as Python's repr in others. `variables`: the special tokens.
        """
        if role not in _PROBED_ROLES:
            return False
        if role not in self._reads_parts:
            self._reads_parts[role] = self._probe_parts(role, variables)
        return self._reads_parts[role]

    def call_shape(self, variables: Mapping[str, Any], has_tools: bool) -> CallShape:
        """How the template reads calls of earlier replies, in a chat with tools or without; found
        by rendering some, once. `variables`: the special tokens."""
        if has_tools not in self._call_shapes:
            self._call_shapes[has_tools] = find_call_shape(
                lambda messages: self.render(
                    messages,
                    tools=[_PROBE_TOOL] if has_tools else None,
                    add_generation_prompt=False,
                    continue_final_message=False,
                    variables=variables,
                )
            )
        return self._call_shapes[has_tools]

    def takes_empty(self, variables: Mapping[str, Any]) -> bool:
        """Whether an assistant's message may have neither content nor calls, as a reply that was
        cut within its thought has. `variables`: the special tokens."""
        if self._takes_empty is None:
            self._takes_empty = self._takes_reply("", variables) or not self._takes_reply(
                BLANK, variables
            )
        return self._takes_empty

    def _takes_reply(self, content: str, variables: Mapping[str, Any]) -> bool:
        user = {"role": "user", "content": "a"}
        try:
            self.render(
                [user, {"role": "assistant", "content": content}, user],
                tools=None,
                add_generation_prompt=False,
                continue_final_message=False,
                variables=variables,
            )
        except Exception:  # the template wants some content
            return False
        return True

    def _probe_parts(self, role: str, variables: Mapping[str, Any]) -> bool:
        other: dict[str, Any] = {"role": "user", "content": "a"}
        message = {"role": role, "content": [{"type": "text", "text": _PROBE}]}
        if role == "user":
            chat = [message]
        else:
            chat = [other, message] if role in ("assistant", "tool") else [message, other]
        try:
            text = self.render(
                chat,
                tools=None,
                add_generation_prompt=False,
                continue_final_message=False,
                variables=variables,
            )
        except Exception:  # the template takes strings only
            return False
        # A list that was printed as a whole has the text in quotes.
        return _PROBE in text and f"'{_PROBE}" not in text and f'"{_PROBE}' not in text


def _cut_at_tag(text: str) -> str:
    """`text` up to the marker; a template that trims contents trims the continued one too."""
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0:
        raise ValueError("the chat template drops the final message, so it can't be continued")
    head = text[:at]
    return head if text.startswith(_CONTINUE_TAG, at) else head.rstrip()


def _without_empty_thought(text: str, final: str) -> str:
    """`text` without an empty thought before the final message, if that begins a thought itself:
    templates of models that think write one before what they take for an answer."""
    at = text.rfind(final)
    if at < 0 or not final.startswith("<think>") or "</think>" in final:
        return text
    return _EMPTY_THOUGHT.sub("", text[:at]) + text[at:]


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training. Serving renders only its content."""

    tags = {"generation"}  # noqa: RUF012  (how Jinja declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateDict:
    """`dict` without the class behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _TemplateNamespace(jinja2.utils.Namespace):
    """`namespace` whose attributes can't begin with an underscore (Python's internals)."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # The first of `args` is self, so that a template may call namespace(self=...).
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"chat templates can't store the underscore-prefixed attribute {name!r}"
        )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which models never saw in training.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def strftime_at(now: int) -> Callable[[str], str]:
    """`strftime_now` at this Unix time."""
    return lambda pattern: datetime.fromtimestamp(now).strftime(pattern)


_FUNCTIONS: dict[str, Any] = {
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
    "dict": _TemplateDict(),
    "namespace": _TemplateNamespace,
}
FUNCTION_NAMES = frozenset(jinja2.defaults.DEFAULT_NAMESPACE) | _FUNCTIONS.keys()
"""Functions that templates call by name."""
