"""Tokenizers of every kind, with the control tokens that the templates of `chat_shapes` write."""

from __future__ import annotations

import json
from collections.abc import Callable

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from engine.tokenizer.loading import TokenizerFiles
from engine.tokenizer.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import CORPUS
from tests.unit.tokenizer.chat_shapes import SHAPES

BASIC = ["<unk>", "<s>", "</s>"]
CONTROL = [
    *("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("[INST]", "[/INST]", "<|endoftext|>", "<<|im_end|>>"),
]
MARKUP = [
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
]
"""Added tokens that aren't special."""
NAMES = [*BASIC, *CONTROL, *MARKUP]
_ALL_CORPUS = [*CORPUS, "".join(map(chr, range(0x20, 0x7F)))]
_WORDS = Regex(r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+")


def special(names: list[str]) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in names]


def markup(normalized: bool = False) -> list[AddedToken]:
    return [AddedToken(name, special=False, normalized=normalized) for name in MARKUP]


def byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer | None = None) -> tokenizers.Tokenizer:
    """Llama 3, Qwen: the names aren't in the model's vocabulary."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizer or pre_tokenizers.Split(_WORDS, "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_ALL_CORPUS, trainer)
    tokenizer.add_tokens([*special([*BASIC, *CONTROL]), *markup()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def whole_words() -> tokenizers.Tokenizer:
    """Byte-level BPE that takes a word as a whole if the vocabulary has it, names included."""
    state = json.loads(byte_level(pre_tokenizers.Split(Regex(r"\s+"), "isolated")).to_str())
    for name in NAMES:
        state["model"]["vocab"][name] = len(state["model"]["vocab"])
    for token, name in zip(state["added_tokens"], [*BASIC, *CONTROL, *MARKUP], strict=True):
        assert token["content"] == name
        token["id"] = state["model"]["vocab"][name]
    state["model"]["ignore_merges"] = True
    state["post_processor"] = None
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def lowercase() -> tokenizers.Tokenizer:
    """Finds its tool tags behind the normalizer, thus in any case."""
    state = json.loads(byte_level().to_str())
    state["normalizer"] = json.loads(normalizers.Lowercase().__getstate__())
    for token in state["added_tokens"]:
        token["normalized"] = not token["special"]
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def metaspace() -> tokenizers.Tokenizer:
    """Mistral 3: `▁` for spaces, byte tokens, the basic names in the vocabulary."""
    tokenizer = _pieces(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def prepend() -> tokenizers.Tokenizer:
    """Llama 2: the same by a normalizer, which begins every piece of text with `▁`."""
    tokenizer = _pieces(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = None
    return tokenizer


def _pieces(model: models.Model) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=BASIC, limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator(_ALL_CORPUS, trainer)
    state = json.loads(tokenizer.to_str())
    vocab = state["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))
    tokenizer.add_tokens([*special(CONTROL), *markup()])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    """T5, XLM-R: every name is a piece that the model would take for its text."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=220,
        special_tokens=[*BASIC, *CONTROL, *MARKUP],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(_ALL_CORPUS, trainer)
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_level() -> tokenizers.Tokenizer:
    """Whole words between whitespace, names among them; no decoder."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(
        special_tokens=special([*BASIC, *CONTROL]) + markup(), show_progress=False
    )
    tokenizer.train_from_iterator(_ALL_CORPUS, trainer)
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """BERT."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=special([*BASIC, *CONTROL]) + markup(), show_progress=False
    )
    tokenizer.train_from_iterator(_ALL_CORPUS, trainer)
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "whole_words": whole_words,
    "lowercase": lowercase,
    "metaspace": metaspace,
    "prepend": prepend,
    "unigram": unigram,
    "word_level": word_level,
    "word_piece": word_piece,
}
LOSSLESS = ("byte_level", "whole_words")
"""Kinds whose `decode` gives back every text."""


def make_tokenizer(kind: str, default: str | None = None) -> Tokenizer:
    """With all the templates of `chat_shapes` by name, and maybe a default."""
    templates = {**SHAPES, "default": default} if default is not None else SHAPES
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer(TokenizerFiles(KINDS[kind](), special_tokens, dict(templates)))
