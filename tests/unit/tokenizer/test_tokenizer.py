"""Tokenizer against transformers' AutoTokenizer on the same folders, and its own promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError, RequestError
from engine.protocol.tokenizer_messages import Conversation
from engine.tokenizer.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import (
    BOS,
    CHAT_TEMPLATE,
    CORPUS,
    EOS,
    USER,
    write_byte_level,
    write_sentencepiece,
)

REPOSITORY = Path(__file__).parents[3]
CARRIED_MODEL = REPOSITORY / "models" / "manta-small"
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces \n\n\ttab",
    f"{BOS}already there{EOS} </s>",
    "naïve 你好，世界 👩‍👩‍👧 \ufffd \x00",
    *CORPUS,
]
CHAT = [
    {"role": "system", "content": "  Be brief. "},
    {"role": "user", "content": "What is a list? 你好"},
    {"role": "assistant", "content": "A sequence ", "tool_calls": None},
]


def byte_level_variant(folder: Path) -> Path:
    """Special tokens that only tokenizer_config.json knows, in each form that occurs."""
    return write_byte_level(
        folder,
        added_tokens_decoder={
            "0": {"content": BOS, "special": True, "normalized": False},
            "1": {"content": EOS, "special": True, "normalized": False},
            "421": {"content": "<|tool|>", "special": True, "lstrip": True, "normalized": False},
            "422": {"content": "<note>", "special": False, "normalized": True},
        },
        bos_token={"__type": "AddedToken", "content": BOS, "special": True, "normalized": False},
        eos_token={"__type": "AddedToken", "content": EOS, "special": True, "normalized": False},
        pad_token="<|pad|>",
        additional_special_tokens=["<|x|>"],
        add_bos_token=False,
        clean_up_tokenization_spaces=True,
    )


def sentencepiece_llama_class(folder: Path) -> Path:
    return write_sentencepiece(folder, tokenizer_class="LlamaTokenizer", legacy=True)


FOLDERS = {
    "byte_level": write_byte_level,
    "byte_level_variant": byte_level_variant,
    "sentencepiece": write_sentencepiece,
    "sentencepiece_llama_class": sentencepiece_llama_class,
}


@pytest.fixture(scope="module", params=[*FOLDERS, "carried"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "carried":
        if not CARRIED_MODEL.is_dir():
            pytest.skip("models/manta-small isn't there")
        return CARRIED_MODEL
    return FOLDERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture
def byte_level(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(write_byte_level(tmp_path))


def test_equals_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(str(folder))
    ours = Tokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_id == theirs.eos_token_id
    assert set(theirs.all_special_ids) <= ours.special_ids
    texts = [*TEXTS, "a <|tool|> <|x|><note><|pad|> <工具>b"]
    for special in (True, False):
        expected = theirs(texts, add_special_tokens=special)["input_ids"]
        assert ours.encode_batch(texts, special) == expected
        assert [ours.encode(text, special) for text in texts] == expected
    for ids in [*expected, list(range(len(theirs))), [len(theirs) + 5, 3]]:
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte_level", "byte_level_variant", "carried"])
def test_chat_equals_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = CARRIED_MODEL if name == "carried" else FOLDERS[name](tmp_path)
    if not folder.is_dir():
        pytest.skip("models/manta-small isn't there")
    theirs: Any = AutoTokenizer.from_pretrained(str(folder))
    ours = Tokenizer.from_pretrained(folder)
    tools = [{"type": "function", "function": {"name": "é<b>", "parameters": {"type": "object"}}}]
    for options in (
        {"add_generation_prompt": True},
        {"add_generation_prompt": False, "tools": tools},
        {"add_generation_prompt": False, "continue_final_message": True},
    ):
        expected = theirs.apply_chat_template(CHAT, return_dict=False, **options)
        assert ours.apply_chat_template(CHAT, **options) == expected
        assert expected.count(ours.bos_token_id) == 1
    expected = theirs.apply_chat_template(CHAT[:2], return_dict=False, enable_thinking=True)
    assert expected == ours.apply_chat_template(
        CHAT[:2], add_generation_prompt=False, template_kwargs={"enable_thinking": True}
    )


@pytest.mark.parametrize("write", [write_byte_level, write_sentencepiece])
def test_token_bytes_make_the_text(write: Any, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(write(tmp_path))
    for text in CORPUS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(tokenizer.token_bytes(i) for i in ids).decode()
        assert joined.removeprefix(" ") == text
    ids = tokenizer.encode("你🦊", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(i) for i in ids).decode().strip() == "你🦊"


def test_token_text(tmp_path: Path, byte_level: Tokenizer) -> None:
    assert byte_level.bos_token_id is not None
    assert byte_level.token_text(byte_level.bos_token_id) == BOS
    assert byte_level.token_bytes(byte_level.vocab_size) == b""
    (tool_id,) = byte_level.encode("<工具>", add_special_tokens=False)
    assert byte_level.token_bytes(tool_id).decode() == "<工具>" == byte_level.decode([tool_id])
    *_, last = byte_level.encode("🦊", add_special_tokens=False)
    assert byte_level.token_text(last) == "\ufffd"
    pieces = Tokenizer.from_pretrained(write_sentencepiece(tmp_path / "pieces"))
    first = pieces.encode("The", add_special_tokens=False)[0]
    assert pieces.token_text(first) == " " + pieces.decode([first])


def test_templates_in_files_go_before_the_config(tmp_path: Path) -> None:
    write_byte_level(tmp_path, chat_template=[{"name": "default", "template": "config"}])
    assert Tokenizer.from_pretrained(tmp_path).render_chat(CHAT) == "config"
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.render_chat(CHAT) == "file"
    assert tokenizer.render_chat(CHAT, tools=[{}]) == "tools"
    assert tokenizer.render_chat(CHAT, chat_template="tool_use") == "tools"
    assert tokenizer.render_chat(CHAT, chat_template="{{ messages | length }}") == "3"


def test_text_parts_are_joined(byte_level: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert byte_level.render_chat([{"role": "user", "content": parts}]) == byte_level.render_chat(
        [{"role": "user", "content": "one\ntwo"}]
    )


def test_template_helpers(byte_level: Tokenizer) -> None:
    def render(template: str) -> str:
        return byte_level.render_chat(CHAT, chat_template=template)

    assert render("{% generation %}a{{ 1 + 1 }}{% endgeneration %}b") == "a2b"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render(
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}x{% endfor %}"
    )
    assert render("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}") == "2"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    # A request that is answered again has the same prompt.
    dated = Conversation(CHAT, chat_template="{{ strftime_now('%Y') }}", now=400 * 86400)
    assert byte_level.decode(byte_level.encode_chat(dated)) == "1971"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('no tools here') }}", "no tools here"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set ns = namespace(__class__=1) %}", "underscore"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_refusals_of_a_template_are_the_users(
    byte_level: Tokenizer, template: str, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        byte_level.render_chat(CHAT, chat_template=template)
    assert caught.value.param == "messages" and caught.value.status == 400


@pytest.mark.parametrize(
    ("messages", "options", "param", "words"),
    [
        ([], {}, "messages", "at least one"),
        (["hi"], {}, "messages", "object"),
        ([{"role": "robot", "content": ""}], {}, "messages", "unknown role robot"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "messages", "image_url"),
        ([{"role": "user", "content": "\ud83d"}], {}, "messages", "surrogate"),
        (CHAT, {"continue_final_message": True}, "continue_final_message", "exclude"),
        (CHAT, {"chat_template": "{% if %}"}, "chat_template", "line 1"),
        (CHAT, {"template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        (
            [{"role": "user"}],
            {"add_generation_prompt": False, "continue_final_message": True},
            "messages",
            "no content",
        ),
    ],
)
def test_bad_chats(
    byte_level: Tokenizer, messages: Any, options: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        byte_level.apply_chat_template(messages, **options)
    assert caught.value.param == param


def test_lone_surrogate_is_the_users_fault(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        byte_level.encode_batch(["fine", "a\ud800"])


def test_without_a_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(write_byte_level(tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template") as caught:
        tokenizer.apply_chat_template(CHAT)
    assert caught.value.param == "messages"
    assert tokenizer.apply_chat_template(CHAT, chat_template=CHAT_TEMPLATE)[0] == (
        tokenizer.bos_token_id
    )


def test_folders_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="doesn't exist"):
        Tokenizer.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no tokenizer: expected tokenizer\.json"):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ConfigError, match="can't be read"):
        Tokenizer.from_pretrained(tmp_path)
    write_byte_level(tmp_path, chat_template="{% if %}")
    with pytest.raises(ConfigError, match="chat template doesn't compile"):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="isn't valid JSON"):
        Tokenizer.from_pretrained(tmp_path)


def test_other_formats_go_through_transformers(tmp_path: Path, byte_level: Tokenizer) -> None:
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").unlink()
    merges = [" ".join(merge) for merge in state["model"]["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(state["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": BOS,
        "eos_token": EOS,
        "additional_special_tokens": [USER],
        "chat_template": CHAT_TEMPLATE,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.is_byte_level
    assert tokenizer.eos_token_id == byte_level.eos_token_id
    for text in CORPUS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
    assert tokenizer.apply_chat_template(CHAT)[0] == tokenizer.bos_token_id
    (tmp_path / "merges.txt").unlink()
    (tmp_path / "vocab.json").write_text("broken")
    with pytest.raises(ConfigError, match=r"Add the model's tokenizer\.json"):
        Tokenizer.from_pretrained(tmp_path)


def test_fast_path_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    program = (
        "import sys; from engine.tokenizer import Tokenizer\n"
        f"Tokenizer.from_pretrained({str(tmp_path)!r}).encode('hi')\n"
        "print(sorted({'torch', 'transformers', 'ray', 'zmq'} & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, check=True, text=True
    )
    assert output.stdout.strip() == "[]"
