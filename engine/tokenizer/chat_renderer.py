"""`ChatRenderer`: from a request's messages to the text of a prompt, by the model's templates."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jinja2

from engine.errors import ConfigError, RequestError
from engine.protocol.tokenizer_messages import Conversation
from engine.tokenizer.chat_messages import normalize_message, with_one_system_message
from engine.tokenizer.chat_template import BLANK, ChatTemplate, strftime_at
from engine.tokenizer.control_tokens import ControlTokens
from engine.tokenizer.template_variables import check_template_kwargs

logger = logging.getLogger(__name__)

_MAX_COMPILED_TEMPLATES = 16


class ChatRenderer:
    """The chat templates of one model.

    Raises `ConfigError` if one doesn't compile.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        control: ControlTokens,
    ) -> None:
        """`templates` by name, `special_tokens` by the names that templates use (`bos_token`)."""
        self._templates = templates
        self._special_tokens = special_tokens
        self._control = control
        self._compile = lru_cache(maxsize=_MAX_COMPILED_TEMPLATES)(ChatTemplate)
        for template in templates.values():
            try:
                self._compile(template)
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(
                    f"the model's chat template doesn't compile (line {error.lineno}: {error}). "
                    "Correct chat_template.jinja or tokenizer_config.json in the model folder."
                ) from error

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._templates)

    def render(self, given: Conversation) -> str:
        """Text of the prompt; names of control tokens in the request hold the marker.

        See `Tokenizer.render_chat` for the errors.
        """
        messages, tools = given.messages, given.tools
        if not messages:
            raise RequestError("messages must hold at least one message", "messages")
        if given.continue_final_message and given.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: "
                "set add_generation_prompt to false",
                "continue_final_message",
            )
        template = self._choose_template(given.chat_template, tools)
        kwargs = given.template_kwargs or {}
        check_template_kwargs(kwargs, self._special_tokens)
        names = self._control.every
        final = len(messages) - 1 if given.continue_final_message else None
        try:
            chat = self._prepare(messages, template, final, has_tools=bool(tools))
            tools = None if tools is None else names.break_value(tools)
            variables = {
                name: names.break_value(value)
                for name, value in kwargs.items()
                if name in template.variables
            }
        except RecursionError as error:
            raise RequestError(
                "messages, tools or chat_template_kwargs are nested too deeply", "messages"
            ) from error
        if given.now is not None:
            variables["strftime_now"] = strftime_at(given.now)
        render = partial(
            template.render,
            tools=tools,
            add_generation_prompt=given.add_generation_prompt,
            continue_final_message=given.continue_final_message,
            variables={**self._special_tokens, **variables},
        )
        try:
            return render(chat)
        except Exception as error:  # the template is a program that runs on the user's input
            reason = self._control.unmark(str(error))
            if (joined := with_one_system_message(chat)) is not None:
                try:
                    return render(joined)
                except Exception as second:  # what it says of the messages as they came counts
                    logger.debug("the joined messages are refused, too: %s", type(second).__name__)
            raise RequestError(
                f"the chat template refuses the messages: {reason}", "messages"
            ) from error

    def _prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: ChatTemplate,
        final: int | None,
        has_tools: bool,
    ) -> list[dict[str, Any]]:
        """The messages as `template` reads them; `final`: the index of the one to continue, whose
        parts are joined."""
        chat = [
            self._normalize(message, None if index == final else template)
            for index, message in enumerate(messages)
        ]
        if not any(message.get("tool_calls") or message.get("role") == "tool" for message in chat):
            return [self._control.break_message(message) for message in chat]
        shape = template.call_shape(self._special_tokens, has_tools)
        # What is to be continued stays one message.
        arranged = shape.arrange(chat[:final]) + ([] if final is None else chat[final:])
        return [shape.write(self._control.break_message(message)) for message in arranged]

    def _normalize(
        self, message: Mapping[str, Any], template: ChatTemplate | None
    ) -> dict[str, Any]:
        """The message with its parts, if `template` reads them, and with some content."""
        keep_parts = (
            template is not None
            and isinstance(message, Mapping)
            and isinstance(message.get("content"), list)
            and template.reads_parts(str(message.get("role")), self._special_tokens)
        )
        normal = normalize_message(message, keep_parts=keep_parts)
        is_empty = normal.get("role") == "assistant" and not (
            normal.get("content") or normal.get("tool_calls")
        )
        if is_empty and template is not None and not template.takes_empty(self._special_tokens):
            normal["content"] = BLANK
        if template is not None and template.reads_thinking and "reasoning_content" in normal:
            thought = normal.pop("reasoning_content")
            if not (normal.get("content") and normal.get("tool_calls")):
                normal["thinking"] = thought  # beside text and calls gpt-oss' template refuses it
        return normal

    def _choose_template(
        self, chat_template: str | None, tools: Sequence[Mapping[str, Any]] | None
    ) -> ChatTemplate:
        if chat_template is None:
            name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
            if name not in self._templates:
                raise RequestError(
                    f"the model has several chat templates and no default: set chat_template to "
                    f"one of {', '.join(sorted(self._templates))}"
                    if self._templates
                    else "the model has no chat template: use /v1/completions, or configure a "
                    "chat template",
                    "messages",
                )
            return self._compile(self._templates[name])
        try:
            return self._compile(self._templates.get(chat_template, chat_template))
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"chat_template doesn't compile (line {error.lineno}): {error}", "chat_template"
            ) from error
