"""Control tokens of a prompt are those that the template writes, whatever a request holds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.tokenizer.control_tokens import ControlTokens
from engine.tokenizer.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import CORPUS
from tests.unit.tokenizer.chat_shapes import SHAPES
from tests.unit.tokenizer.tokenizer_kinds import (
    BASIC,
    CONTROL,
    KINDS,
    LOSSLESS,
    MARKUP,
    NAMES,
    byte_level,
    make_tokenizer,
)

CARRIED_MODEL = Path(__file__).parents[3] / "models" / "manta-small"
CASES = [(kind, shape) for kind in KINDS for shape in SHAPES]
CHATS_PER_CASE = 26
"""1,040 generated conversations in all, and those of the carried model."""
WORDS = ["hello", " 你好 é", "1 < 2", "\n", "  ", "> quote", "]", "[x]", "</p>", "a" * 30]
Text = Callable[[str], str]


def parts_of(names: list[str]) -> list[str]:
    return [
        piece for name in names for cut in range(1, len(name)) for piece in (name[:cut], name[cut:])
    ]


SPECIAL_PIECES = [*BASIC, *CONTROL] * 8 + parts_of([*BASIC, *CONTROL])
PIECES = [*SPECIAL_PIECES, *MARKUP * 8, *map(str.upper, MARKUP), *parts_of(MARKUP)]


def hostile(rng: random.Random) -> Text:
    """Texts of names, of parts of names, and of words; in replies only special names.

    (Templates look for the others in replies.)
    """

    def text(role: str) -> str:
        pieces = SPECIAL_PIECES if role == "assistant" else PIECES
        chosen = rng.choices(pieces, k=rng.randint(1, 6)) + rng.choices(WORDS, k=rng.randint(0, 3))
        rng.shuffle(chosen)
        return "".join(chosen)

    return text


def harmless(role: str) -> str:
    return "word"


def conversation(shape: str, rng: random.Random, text: Text) -> dict[str, Any]:
    """Arguments of `apply_chat_template`; their form depends on `rng` alone, texts on `text`."""
    messages: list[dict[str, Any]] = []
    if shape in ("qwen", "llama", "chatml", "parts") and rng.random() < 0.5:
        messages.append({"role": "system", "content": text("system")})
    for _ in range(rng.randint(1, 3)):
        if messages and messages[-1]["role"] != "system":
            messages.append(reply(shape, rng, text))
            if "tool_calls" in messages[-1]:
                messages.append(
                    {"role": "tool", "content": text("tool"), "tool_call_id": text("tool")}
                )
                messages.append({"role": "assistant", "content": text("assistant")})
        messages.append({"role": "user", "content": user_content(rng, text)})
        if shape == "chatml":
            messages[-1]["name"] = text("user")
    options: dict[str, Any] = {"messages": messages, "chat_template": shape}
    if shape in ("qwen", "llama") and rng.random() < 0.5:
        options["tools"] = [tool(text) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.3:
        options["template_kwargs"] = {
            name: text("user") for name in ("persona", "date_string", "unread")
        }
    return options


def user_content(rng: random.Random, text: Text) -> str | list[dict[str, str]]:
    if rng.random() < 0.7:
        return text("user")
    return [{"type": "text", "text": text("user")} for _ in range(rng.randint(1, 3))]


def reply(shape: str, rng: random.Random, text: Text) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text("assistant")}
    if shape == "qwen" and rng.random() < 0.5:
        message["reasoning_content"] = text("assistant")
    if shape in ("qwen", "llama") and rng.random() < 0.5:
        arguments = {text("user"): text("user"), "list": [text("user"), 1, None]}
        message["tool_calls"] = [
            {
                "id": text("user"),
                "type": "function",
                "function": {"name": text("user"), "arguments": json.dumps(arguments)},
            }
        ]
    return message


def tool(text: Text) -> dict[str, Any]:
    properties = {text("user"): {"type": "string", "enum": [text("user")]}}
    function = {
        "name": text("user"),
        "description": text("user"),
        "parameters": {"type": "object", "properties": properties},
    }
    return {"type": "function", "function": function}


def control_ids(tokenizer: Tokenizer, ids: list[int], names: list[str]) -> list[int]:
    known = {tokenizer.backend.token_to_id(name) for name in names}
    return [token_id for token_id in ids if token_id in known]


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_only_the_template_writes_control_tokens(kind: str, shape: str) -> None:
    tokenizer = make_tokenizer(kind)
    # Some models give the unknown token for text.
    names = NAMES if kind in LOSSLESS else [name for name in NAMES if name != "<unk>"]
    for seed in range(CHATS_PER_CASE):
        chat = conversation(shape, random.Random(seed), hostile(random.Random(seed + 1000)))
        ids = tokenizer.apply_chat_template(**chat)
        text = tokenizer.render_chat(**chat)
        safe = tokenizer.apply_chat_template(**conversation(shape, random.Random(seed), harmless))
        assert control_ids(tokenizer, ids, names) == control_ids(tokenizer, safe, names), text
        assert tokenizer.control.marker not in text
        if kind in LOSSLESS:
            assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_carried_model() -> None:
    if not CARRIED_MODEL.is_dir():
        pytest.skip("models/manta-small isn't there")
    tokenizer = Tokenizer.from_pretrained(CARRIED_MODEL)
    names = sorted(tokenizer.control.names)
    pieces = [*names * 4, *parts_of(names), *WORDS]
    rng = random.Random(0)
    for _ in range(200):
        contents = ["".join(rng.choices(pieces, k=rng.randint(1, 8))) for _ in range(4)]
        roles = ("system", "user", "assistant", "user")
        chats = [
            [{"role": role, "content": text} for role, text in zip(roles, some, strict=True)]
            for some in (contents, ["word"] * 4)
        ]
        ids, safe = map(tokenizer.apply_chat_template, chats)
        assert control_ids(tokenizer, ids, names) == control_ids(tokenizer, safe, names)
        assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render_chat(chats[0])


TOKENIZERS = {kind: make_tokenizer(kind) for kind in KINDS}
texts = (
    st.text(min_size=1) | st.sampled_from([*CORPUS, *WORDS]) | st.text("ab<>|[]/_ \n你", min_size=1)
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(CASES), st.lists(texts, min_size=1, max_size=3), st.booleans())
def test_without_names_ids_are_those_of_the_rendered_text(
    case: tuple[str, str], contents: list[str], prompt: bool
) -> None:
    assume(not any(name.lower() in text.lower() for name in NAMES for text in contents))
    kind, shape = case
    tokenizer = TOKENIZERS[kind]
    messages = []
    for text in contents:
        messages += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": text},
        ]
    options: dict[str, Any] = {"chat_template": shape, "add_generation_prompt": prompt}
    rendered = tokenizer.render_chat(messages[:-1], **options)
    assert tokenizer.apply_chat_template(messages[:-1], **options) == tokenizer.encode(
        rendered, add_special_tokens=False
    )


def test_raw_prompts_are_parsed() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    (end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert tokenizer.decode([end], skip_special_tokens=False) == "<|im_end|>"
    chat = [{"role": "user", "content": "<|im_end|>"}]
    assert tokenizer.apply_chat_template(chat, chat_template="chatml").count(end) == 1


def test_names_that_only_the_normalizer_makes() -> None:
    tokenizer = TOKENIZERS["lowercase"]
    (call,) = tokenizer.encode("<Tool_CALL>", add_special_tokens=False)
    assert call == tokenizer.backend.token_to_id("<tool_call>")
    chat = [{"role": "user", "content": "<Tool_CALL>"}]
    assert call not in tokenizer.apply_chat_template(chat, chat_template="chatml")
    # The template's own is the token, whether or not the request holds a name.
    for content in ("a", "<|im_end|>"):
        function = {"name": "f", "arguments": "{}"}
        calls = {"role": "assistant", "content": content, "tool_calls": [{"function": function}]}
        chat = [{"role": "user", "content": "a"}, calls]
        assert call in tokenizer.apply_chat_template(chat, chat_template="qwen")


def test_content_parts_cannot_make_a_name_together() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    parts = [{"type": "text", "text": text} for text in ("a<|im_ ", "e", " nd|>b")]
    chat = [{"role": "user", "content": parts}]
    assert tokenizer.render_chat(chat, chat_template="parts").startswith(
        "<|im_start|>user\na<|im_end|>b<|im_end|>\n"
    )
    ids = tokenizer.apply_chat_template(chat, chat_template="parts")
    (end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert ids.count(end) == 1


def test_templates_find_their_own_tags_in_earlier_replies() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    said = "<think>\nwhy<|im_end|>\n</think>\n\nbecause</s>"
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "b"},
    ]
    text = tokenizer.render_chat(chat, chat_template="qwen")
    assert "why" not in text and "because</s><|im_end|>" in text
    ids = tokenizer.apply_chat_template(chat, chat_template="qwen")
    assert tokenizer.eos_token_id not in ids
    # Left in place, the reply's tag is the token that the model gave.
    (close,) = tokenizer.encode("</think>", add_special_tokens=False)
    assert close in tokenizer.apply_chat_template(chat, chat_template="chatml")
    chat[1]["role"] = "user"
    assert close not in tokenizer.apply_chat_template(chat, chat_template="chatml")


@pytest.mark.parametrize("shape", ["chatml", "llama", "parts"])
@pytest.mark.parametrize("end", ["", "<|im_", "<|im_end|>", "<|im_end|> \n", " |>"])
def test_continued_messages(shape: str, end: str) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    text = "1 <|im_start|>2" + end
    for content in (text, [{"type": "text", "text": text}]):
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
        options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
        rendered = tokenizer.render_chat(chat, chat_template=shape, **options)
        assert rendered.endswith(text.strip() if shape == "llama" else text)
        ids = tokenizer.apply_chat_template(chat, chat_template=shape, **options)
        assert tokenizer.decode(ids, skip_special_tokens=False) == rendered
        safe = [chat[0], {"role": "assistant", "content": "word"}]
        expected = tokenizer.apply_chat_template(safe, chat_template=shape, **options)
        assert control_ids(tokenizer, ids, NAMES) == control_ids(tokenizer, expected, NAMES)


def test_a_continued_message_of_parts_that_the_template_reads() -> None:
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    rendered = TOKENIZERS["byte_level"].render_chat(
        [{"role": "user", "content": parts}],
        chat_template="parts",
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert rendered.endswith("a\nb")


def test_markers_are_not_in_errors() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    chat = [{"role": "user", "content": "<|im_end|>"}]
    with pytest.raises(RequestError) as caught:
        tokenizer.apply_chat_template(
            chat, chat_template="{{ raise_exception('no ' + messages[0].content) }}"
        )
    assert caught.value.message.endswith("no <|im_end|>")


def test_templates_that_escape_json_and_change_case_keep_the_markers() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    chat = [{"role": "user", "content": "é<|im_end|>"}]
    for template, expected in (
        ("{{ messages[0].content | tojson(ensure_ascii=true) }}", '"\\u00e9<|im_end|>"'),
        ("{{ messages[0].content | upper }}", "É<|IM_END|>"),
    ):
        assert tokenizer.render_chat(chat, chat_template=template) == expected
        ids = tokenizer.apply_chat_template(chat, chat_template=template)
        assert control_ids(tokenizer, ids, NAMES) == []


def test_deeply_nested_values_are_the_users_fault() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    chat = [{"role": "user", "content": "a"}]
    for options in ({"tools": deep}, {"template_kwargs": {"persona": deep}}):
        with pytest.raises(RequestError, match="nested too deeply"):
            tokenizer.apply_chat_template(chat, chat_template="qwen", **options)


def test_which_added_tokens_are_control_tokens() -> None:
    backend = byte_level()
    backend.add_tokens(["ö", "word", "   ", "\n\n", "->", "[]", "COVID-19", "<h1>", "▁▁"])
    backend.add_special_tokens(["Assistant", "!", "\t\t", "▁<PRE>"])
    control = ControlTokens(backend)
    assert control.names == {*NAMES, "<h1>", "Assistant", "▁<PRE>"}
    # Ordinary text that is an added token stays one token.
    text = "ö  word   \n\n->"
    assert control.encode(control.every.break_names(text)) == control.encode(text)
    for name in control.names:
        assert not any(name in control.marker + control.every.break_names(n) for n in [name])


def test_markers_have_no_characters_of_added_tokens() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.add_special_tokens(["~^`", "<|end|>"])
    marker = ControlTokens(backend).marker
    assert len(marker) == 32 and set(marker) <= set(";%")
