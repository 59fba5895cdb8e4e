"""Tokenizers in GGUF files give the ids of the tokenizers that they were made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers.integrations.gguf import convert_gguf_tokenizer

from engine.checkpoint.gguf.splits import SPLITS
from engine.checkpoint.gguf.tokenizer import read_tokenizer
from engine.checkpoint.values import ConfigValues
from engine.errors import ConfigError
from tests.support.tiny_tokenizers import CORPUS, write_sentencepiece

TEXTS = [
    *CORPUS,
    "",
    " ",
    "  two  blanks and a tab\t\n\n\n",
    "It's WE'LL they'Re don’t",
    "1234567 3.14 ٣٤٥ ½",
    "naïve nai\u0308ve Ａ ﬁ 你好，世界 नमस्ते مرحبا",
    "👩‍👩‍👧 \u200b\ufeff\x00\x07 \r\n\r mixed\r\nlines",
    "<|end|><|begin|>user<tool_call> x </tool_call>",
    "camelCase HTTPServer SomeXMLThing ### // --- ...",
    "▁already▁marked ▁",
]
MARKS = ["<|begin|>", "<|end|>", "<|user|>"]


def metadata(**keys: Any) -> ConfigValues:
    given = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return ConfigValues(Path("model.gguf"), {"general.architecture": "llama", **given}, {})


def byte_level(split: str) -> Tokenizer:
    """As a model's own tokenizer.json."""
    made = Tokenizer(models.BPE(ignore_merges=SPLITS[split].ignore_merges))
    normalizer = SPLITS[split].normalizer()
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = SPLITS[split].pre_tokenizer()
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=MARKS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    made.add_tokens(["<tool_call>", AddedToken("工具", normalized=False)])
    return made


def described(tokenizer: Tokenizer, **keys: Any) -> ConfigValues:
    """What llama.cpp's converter writes of a byte-level tokenizer."""
    state = json.loads(tokenizer.to_str())
    ids = tokenizer.get_vocab(with_added_tokens=True)
    types = {token["content"]: 3 if token["special"] else 4 for token in state["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    assert [ids[token] for token in tokens] == list(range(len(tokens)))
    return metadata(
        model="gpt2",
        tokens=[*tokens, "[PAD900]"],
        token_type=np.array([*(types.get(token, 1) for token in tokens), 5]),
        merges=[" ".join(merge) for merge in state["model"]["merges"]],
        **{"bos_token_id": 0, "eos_token_id": 1, **keys},
    )


def transformers_reads(values: ConfigValues) -> Tokenizer:
    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type"}
    short = {key.removeprefix("tokenizer.ggml."): value for key, value in values.given.items()}
    given = {names.get(key, key): value for key, value in short.items()}
    arrays = {key: value.tolist() for key, value in given.items() if isinstance(value, np.ndarray)}
    made: Tokenizer = convert_gguf_tokenizer("llama", {**given, **arrays})[0]
    return made


@pytest.mark.parametrize("split", SPLITS)
def test_byte_level_tokenizers(split: str) -> None:
    wanted = byte_level(split)
    made = read_tokenizer(described(wanted, pre=split, add_bos_token=False))
    found = Tokenizer.from_str(made.json)
    for text in TEXTS:
        ids = wanted.encode(text, add_special_tokens=False).ids
        assert found.encode(text).ids == ids
        for skip in (True, False):
            assert found.decode(ids, skip_special_tokens=skip) == wanted.decode(
                ids, skip_special_tokens=skip
            )
    assert found.get_vocab() == wanted.get_vocab()
    assert found.id_to_token(len(wanted.get_vocab())) is None


@pytest.mark.parametrize("split", ["llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_splits_are_those_of_transformers(split: str) -> None:
    """Its converter knows some; it leaves out that Qwen composes texts."""
    values = described(byte_level(split), pre=split, add_bos_token=False)
    oracle = transformers_reads(values)
    found = Tokenizer.from_str(read_tokenizer(values).json)
    for text in TEXTS:
        if split == "qwen2":
            text = normalizers.NFC().normalize_str(text)
        if not SPLITS[split].ignore_merges:
            assert found.encode(text).ids == oracle.encode(text, add_special_tokens=False).ids
        pieces = [word for word, _ in oracle.pre_tokenizer.pre_tokenize_str(text)]
        assert [word for word, _ in found.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(
    ("split", "keys", "first", "last"),
    [
        ("llama-bpe", {}, [0], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
        ("gpt-2", {}, [], []),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [0], [1]),
    ],
)
def test_first_and_last_token(
    split: str, keys: dict[str, Any], first: list[int], last: list[int]
) -> None:
    wanted = byte_level(split)
    made = read_tokenizer(described(wanted, pre=split, **keys))
    ids = wanted.encode("stop it", add_special_tokens=False).ids
    assert Tokenizer.from_str(made.json).encode("stop it").ids == [*first, *ids, *last]


def sentencepiece(folder: Path, **keys: Any) -> tuple[Tokenizer, ConfigValues]:
    """A Llama 2 tokenizer, whose merges are in the order of its pieces, and its description."""
    state = json.loads((write_sentencepiece(folder) / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]
    tokens = sorted(vocab, key=lambda token: vocab[token])
    types = [2, 3, 3, *[1] * (len(tokens) - 3 - 256), *[6] * 256]
    scores = [0.0] * 3 + [-float(n) for n in range(len(tokens) - 3)]
    given = metadata(
        model="llama",
        tokens=tokens,
        token_type=np.array(types),
        scores=np.array(scores, np.float32),
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        **keys,
    )
    return Tokenizer.from_file(str(folder / "tokenizer.json")), given


def test_sentencepiece_tokenizers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    _, values = sentencepiece(tmp_path)
    made = read_tokenizer(values)
    found = Tokenizer.from_str(made.json)
    oracle = transformers_reads(values)
    original = AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer
    for text in TEXTS:
        ids = found.encode(text).ids
        assert ids[0] == 1
        assert ids[1:] == oracle.encode(text, add_special_tokens=False).ids
        assert ids == original.encode(text).ids
        assert found.decode(ids) == original.decode(ids)


def test_sentencepiece_without_the_first_blank(tmp_path: Path) -> None:
    _, values = sentencepiece(tmp_path, add_space_prefix=False, add_bos_token=False)
    found = Tokenizer.from_str(read_tokenizer(values).json)
    assert found.encode("stop").tokens[0][0] == "s"
    assert found.decode(found.encode(" stop").ids) == " stop"


def test_names_ends_and_templates() -> None:
    values = described(byte_level("gpt-2"), pre="gpt-2", eot_token_id=2, padding_token_id=2**32 - 1)
    values.given["tokenizer.chat_template"] = "one"  # type: ignore[index]
    made = read_tokenizer(values)
    assert made.config["bos_token"] == "<|begin|>" and "pad_token" not in made.config
    assert made.config["chat_template"] == "one"
    assert made.special_ids == {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": None}
    values.given["tokenizer.chat_template.tool_use"] = "two"  # type: ignore[index]
    assert read_tokenizer(values).config["chat_template"] == [
        {"name": "tool_use", "template": "two"},
        {"name": "default", "template": "one"},
    ]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"model": "bert"}, "a tokenizer of the kind 'bert', which Manta can't read"),
        ({"pre": "klingon"}, "in the way 'klingon', which Manta doesn't know; it knows gpt-2"),
        ({"pre": None}, r"in the way '\(none\)'"),
        ({"tokens": []}, "has no tokenizer"),
        ({"tokens": np.array([1, 2])}, "must be a list of texts"),
        ({"merges": None}, "lacks the key 'tokenizer.ggml.merges'"),
        ({"merges": ["zz yy"]}, "the merge 'zz yy' isn't one of its tokens"),
        ({"token_type": np.array([1])}, "one for each token"),
        ({"eos_token_id": "x"}, "eos_token_id must be a whole number"),
        ({"add_bos_token": 3}, "add_bos_token must be true or false"),
    ],
)
def test_what_is_refused(keys: dict[str, Any], says: str) -> None:
    given = dict(described(byte_level("gpt-2"), pre="gpt-2").given)
    given.update({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    with pytest.raises(ConfigError, match=says):
        read_tokenizer(ConfigValues(Path("model.gguf"), given, {}))
