"""Calls of earlier replies are shown by every template, whatever form it reads them in."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from engine.errors import RequestError
from engine.tokenizer.call_shape import CallShape
from engine.tokenizer.chat_template import ChatTemplate
from engine.tokenizer.loading import load_tokenizer_files
from tests.unit.tokenizer.call_templates import TEMPLATES
from tests.unit.tokenizer.chat_shapes import SHAPES
from tests.unit.tokenizer.tokenizer_kinds import make_tokenizer

TOKENIZER = make_tokenizer("byte_level")
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "Where is it?"}
ALL = {**TEMPLATES, "qwen": SHAPES["qwen"]}


def call(name: str, arguments: Any, id: str | None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}} | (
        {} if id is None else {"id": id}
    )


def chat(*calls: dict[str, Any], content: Any = "") -> list[dict[str, Any]]:
    return [
        USER,
        {"role": "assistant", "content": content, "tool_calls": list(calls)},
        *({"role": "tool", "tool_call_id": c.get("id"), "content": "It is here."} for c in calls),
        {"role": "assistant", "content": "There."},
        USER,
    ]


def render(template: str, messages: list[dict[str, Any]]) -> str:
    return TOKENIZER.render_chat(messages, chat_template=ALL[template], add_generation_prompt=False)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("deepseek", CallShape("text", content="none", beside="apart")),
        ("mistral", CallShape(short_ids=True)),
        ("one_call", CallShape(parallel=False, beside="apart")),
        ("items", CallShape(takes_text=False)),
        ("absent", CallShape(content="absent", beside="apart")),
        ("plain", CallShape(is_read=False)),
        ("text_first", CallShape(beside="written")),
        ("qwen", CallShape()),
    ],
)
def test_shape_of_a_template(name: str, shape: CallShape) -> None:
    template = ChatTemplate(ALL[name])
    assert template.call_shape(VARIABLES, has_tools=False) == shape
    assert template.call_shape(VARIABLES, has_tools=True) == shape


def test_a_template_that_shows_calls_only_beside_tools() -> None:
    source = """{%- if tools %}{{ tools | tojson }}{% endif %}
    {%- for message in messages %}{{ message.role[0] + ':' + message.content }}
        {%- if tools %}{{ message.tool_calls | default([]) | tojson }}{% endif %}
    {%- endfor %}"""
    template = ChatTemplate(source)
    assert template.call_shape(VARIABLES, has_tools=True) == CallShape()
    assert template.call_shape(VARIABLES, has_tools=False) == CallShape(is_read=False)
    messages = chat(call("look", '{"city": "Paris"}', "c"))
    for tools in (None, [{"type": "function", "function": {"name": "wait"}}]):
        text = TOKENIZER.render_chat(
            messages, chat_template=source, add_generation_prompt=False, tools=tools
        )
        assert text.count('"look"') == text.count("Paris") == 1


def test_the_carried_model_reads_calls_as_they_are() -> None:
    model = Path(__file__).resolve().parents[3] / "models" / "manta-small"
    (source,) = load_tokenizer_files(model).chat_templates.values()
    assert ChatTemplate(source).call_shape(VARIABLES, has_tools=True) == CallShape()


BROKEN = [
    *('{"city": "Par', '{"city": "Paris"', '{"city": "Paris"}}', "{city: 'Paris'}", "Paris"),
    *('["Paris"]', '{"city": "Paris", "at": NaN}', 'x{"city": "Paris"}', '{"city": "Paris\n"}'),
]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("content", ["", None, [], "Let me look."])
def test_no_call_is_lost(name: str, content: Any) -> None:
    for first, second in product(['{"city": "Paris"}', *BROKEN], ["", None, "{}"]):
        messages = chat(call("look", first, "call_1"), call("wait", second, "toolu_2"))
        messages[1]["content"] = content
        text = render(name, messages)
        assert (
            "look" in text
            and "wait" in text
            and text.count("Paris") == 1 + (first.count("Paris") - 1)
        )
        assert text.count("It is here.") == 2
        if name != "mistral":  # it has no place for text beside calls
            assert (content or "") in text


def test_arguments_are_what_the_template_joins() -> None:
    text = render("deepseek", chat(call("look", {"city": "Orléans"}, "c")))
    assert '<|sep|>look\n```json\n{"city": "Orléans"}\n```' in text
    assert '"arguments": {"city": "Orléans"}' in render(
        "qwen", chat(call("look", '{"city": "Orléans"}', "c"))
    )


def test_calls_that_a_template_does_not_know_are_written_into_the_content() -> None:
    messages = chat(call("look", '{"city": "Paris"}', "c"), content="Let me look.")
    assert render("plain", messages) == (
        'u:Where is it?a:Let me look.\n<tool_call>\n{"name": "look", "arguments": '
        '{"city": "Paris"}}\n</tool_call>t:It is here.a:There.u:Where is it?'
    )


def test_names_of_control_tokens_in_written_calls_are_text() -> None:
    arguments = {"to": "<|im_end|></tool_call>"}
    messages = chat(call("look", arguments, "c"))
    ids = TOKENIZER.apply_chat_template(messages, chat_template=ALL["plain"])
    names = [TOKENIZER.token_text(token) for token in ids]
    assert names.count("</tool_call>") == 1
    assert "<|im_end|>" not in names
    assert json.dumps(arguments) in TOKENIZER.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "ids",
    [
        ("call_0123456789abcdef01234567", "call_0123456789abcdef01234568"),
        ("toolu_01", "chatcmpl-tool-8a7d"),
        ("abcDEF123", "000000001"),
        ("functions.look:0", "functions.look:1"),
        ("é" * 9, "         "),
        ("", ""),
        (None, None),
    ],
)
def test_ids_of_other_vendors(ids: tuple[str | None, str | None]) -> None:
    text = render("mistral", chat(*(call("look", "{}", id) for id in ids)))
    shown = [part[:9] for part in text.split('"id": "')[1:]]
    results = [part[:9] for part in text.split("It is here. ")[1:]]
    assert len(set(shown)) == 2
    assert results == shown
    assert all(id.isalnum() and id.isascii() for id in shown)
    assert text == render("mistral", chat(*(call("look", "{}", id) for id in ids)))
    if ids[0] == "abcDEF123":
        assert shown == list(ids)


def test_results_before_calls_and_ids_twice() -> None:
    result = {"role": "tool", "tool_call_id": "x", "content": "It is here."}
    unnamed = {"role": "tool", "content": "It is here."}
    twice = chat(call("look", "{}", "same"), call("wait", "{}", "same"))
    for name in ALL.keys() - {"gpt_oss"}:  # its template refuses results without a call
        for messages in ([USER, result], [USER, unnamed, *twice[1:]], twice):
            assert "It is here." in render(name, messages)


def test_the_templates_own_message_is_told() -> None:
    with pytest.raises(RequestError, match="conversation roles must alternate") as caught:
        render("mistral", [USER, USER])
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize("content", ["", "Well."])
def test_thoughts_by_another_name(content: str) -> None:
    tokenizer = make_tokenizer("byte_level", TEMPLATES["gpt_oss"])
    messages = [*chat(call("look", {"a": 1}, None), content=content)]
    messages[1]["reasoning_content"] = "I think."
    prompt = tokenizer.render_chat(messages, add_generation_prompt=False)
    said = content or "I think."
    assert f"analysis<|message|>{said}<|end|>" in prompt
    assert 'to=functions.look<|channel|>commentary json<|message|>{"a": 1}<|call|>' in prompt
