"""Messages as templates read them, content parts, and the variables that a request may set."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.errors import RequestError
from engine.tokenizer.chat_messages import normalize_message
from engine.tokenizer.chat_template import ChatTemplate
from tests.unit.tokenizer.chat_shapes import LLAMA, SHAPES
from tests.unit.tokenizer.tokenizer_kinds import make_tokenizer

TOKENIZER = make_tokenizer("byte_level")
USER = {"role": "user", "content": "a"}


def called(arguments: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "function": function}]}


def render(messages: list[dict[str, Any]], shape: str, **options: Any) -> str:
    return TOKENIZER.render_chat(messages, chat_template=shape, **options)


def test_arguments_become_objects() -> None:
    given = called('{"a": [1, "é"]}')
    message = normalize_message(given)
    assert message["tool_calls"][0] == {
        "id": "c1",
        "function": {"name": "add", "arguments": {"a": [1, "é"]}},
    }
    assert given["tool_calls"][0]["function"]["arguments"] == '{"a": [1, "é"]}'
    for empty in (None, ""):
        assert normalize_message(called(empty))["tool_calls"][0]["function"]["arguments"] == {}
    assert '"arguments": {"a": [1, "é"]}}' in render([USER, given], "qwen")
    assert "a=\"[1, 'é']\"" in render([USER, given], "llama")


@pytest.mark.parametrize(
    "arguments",
    [
        "{",
        "[1]",
        '"a"',
        "NaN",
        '{"a": NaN}',
        '{"a": "\\ud800"}',
        "[" * 100_000,
        '{"a":' * 200,
        '{"a": 1, "a": 2}',
        '{"b": ' + '{"a":' * 120 + "1" + "}" * 121,
    ],
)
def test_arguments_that_are_no_object_stay_as_they_are(arguments: str) -> None:
    message = normalize_message(called(arguments))
    assert message["tool_calls"][0]["function"]["arguments"] == arguments
    assert json.dumps(arguments) in render([USER, called(arguments)], "qwen")
    assert f'arguments="{arguments}"' in render([USER, called(arguments)], "llama")


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        *((empty, {}) for empty in (None, "", " ", "null", '""')),
        (json.dumps('{"a": 1}'), {"a": 1}),
        (3, "3"),
        ([1], "[1]"),
        ({"a": [[]]}, {"a": [[]]}),
    ],
)
def test_arguments_in_the_forms_of_other_servers(arguments: Any, read: Any) -> None:
    message = normalize_message(called(arguments))
    assert message["tool_calls"][0]["function"]["arguments"] == read


def test_tool_results_go_to_templates_that_know_them() -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": '{"sum": 3}'}
    chat = [USER, called({"a": 1}), result]
    assert '<tool_response>\n{"sum": 3}\n</tool_response>' in render(chat, "qwen")
    assert f"ipython<|end_header_id|>\n\n{json.dumps(result['content'])}" in render(chat, "llama")
    with pytest.raises(RequestError, match="Only user and assistant roles"):
        render([USER, {"role": "assistant", "content": "b"}, USER, result], "mistral")


def test_a_template_that_reads_parts_gets_them() -> None:
    parts = [{"type": kind, "text": text} for kind, text in (("text", "a"), ("input_text", "b"))]
    for shape in SHAPES:
        text = render([{"role": "user", "content": parts}], shape)
        assert ("ab" if shape == "parts" else "a\nb") in text
    # This one reads parts only in users' messages.
    chat = [{"role": "system", "content": parts}, USER]
    assert "<|im_start|>system\na\nb<|im_end|>" in render(chat, "parts")


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        ("{{ messages[0].content }}", False),
        ("{{ messages[0].content | tojson }}", False),
        ("{{ messages[0].content + 'a' }}", False),
        ("{{ messages[0].content | trim }}", False),
        ("{{ messages[0].content[0].text }}", True),
        ("{% for p in messages[0]['content'] %}{{ p['text'] }}{% endfor %}", True),
        ("{% if messages | length < 2 %}{{ raise_exception('more') }}{% endif %}", False),
        ("none", False),
    ],
)
def test_which_templates_read_parts(template: str, reads: bool) -> None:
    assert ChatTemplate(template).reads_parts("user", {}) is reads
    assert ChatTemplate(template).reads_parts("robot", {}) is False


def test_variables_that_the_template_reads() -> None:
    assert "1 May" in render([USER], "llama", template_kwargs={"date_string": "1 May"})
    assert "26 Jul 2024" in render([USER], "llama")
    thinking = render([USER], "qwen", template_kwargs={"enable_thinking": False})
    assert thinking.endswith("<think>\n\n</think>\n\n")
    variables = ChatTemplate(LLAMA).variables
    assert {"messages", "tools", "bos_token", "persona", "date_string"} < variables
    assert not {"raise_exception", "loop", "key", "unread"} & variables


def test_other_variables_have_no_effect() -> None:
    template = "{% set x = 1 %}{% macro f() %}m{% endmacro %}{{ x }}{{ f() }}{{ y }}"
    for kwargs in ({"x": 2, "f": 3}, {"unknown": "a", "self": 1, "loop": 2, "True": 3}):
        assert render([USER], template, template_kwargs=kwargs) == "1m"
    assert render([USER], template, template_kwargs={"y": 4}) == "1m4"


@pytest.mark.parametrize(
    "name",
    [
        *("messages", "tools", "documents", "add_generation_prompt", "chat_template"),
        *("bos_token", "eos_token", "pad_token", "mask_token", "tool_token"),
        *("raise_exception", "strftime_now", "namespace", "dict", "range", "cycler", "lipsum"),
        *("not-a-name", "", "a b"),
    ],
)
def test_variables_that_a_request_cannot_set(name: str) -> None:
    tokenizer = make_tokenizer("byte_level")
    tokenizer._chat._special_tokens = {**tokenizer._special_tokens, "tool_token": "<tool_call>"}
    with pytest.raises(RequestError, match="must not set") as caught:
        tokenizer.render_chat([USER], chat_template="qwen", template_kwargs={name: "x"})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("content", ["", None, []])
def test_a_reply_without_content_where_a_template_demands_some(content: Any) -> None:
    template = """{% for m in messages %}
        {%- if not (m.content or m.tool_calls) %}{{ raise_exception('say something') }}{% endif %}
        {{- m.role[0] + ':' + m.content | trim + ';' }}
    {%- endfor %}"""
    reply = {"role": "assistant", "content": content, "reasoning_content": "Hm."}
    options: dict[str, Any] = {"add_generation_prompt": False}
    assert render([USER, reply, USER], template, **options) == "u:a;a:;u:a;"
    with pytest.raises(RequestError, match="say something"):
        render([{"role": "user", "content": ""}], template)
    strict = "{{ raise_exception('never') }}"
    with pytest.raises(RequestError, match="never"):
        render([USER, reply, USER], strict)
