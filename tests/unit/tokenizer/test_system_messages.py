"""Instructions between turns, as agents put them, reach templates that allow them only first."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import RequestError
from tests.unit.tokenizer.tokenizer_kinds import make_tokenizer

TOKENIZER = make_tokenizer("byte_level")
FIRST_ONLY = """
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('the system message must be first') }}
    {%- endif %}
    {{- '[' + message.role + ']' + message.content }}
{%- endfor %}"""
NONE = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def render(template: str, *messages: dict[str, Any]) -> str:
    return TOKENIZER.render_chat(
        list(messages), chat_template=template, add_generation_prompt=False
    )


@pytest.mark.parametrize(
    "messages",
    [
        [message("system", "a"), message("user", "u"), message("system", "b")],
        [message("system", "a"), message("system", "b"), message("user", "u")],
        [message("system", [{"type": "text", "text": "a"}]), message("user", "u"),
         message("system", "b")],
    ],
)  # fmt: skip
def test_they_are_joined_where_the_template_refuses_them(messages: list[dict[str, Any]]) -> None:
    assert render(FIRST_ONLY, *messages) == "[system]a\n\nb[user]u"


def test_a_template_that_takes_them_gets_them_as_they_are() -> None:
    template = FIRST_ONLY.replace("not loop.first", "false")
    given = [message("user", "u"), message("system", "b"), message("user", "v")]
    assert render(template, *given) == "[user]u[system]b[user]v"


def test_the_first_refusal_is_told() -> None:
    with pytest.raises(RequestError, match="must be first"):
        render(FIRST_ONLY + NONE, message("user", "u"), message("system", "b"))
    with pytest.raises(RequestError, match="no system role"):
        render(NONE, message("system", "a"), message("user", "u"))
