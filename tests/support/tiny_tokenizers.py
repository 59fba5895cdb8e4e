"""Tokenizers of a few hundred tokens, trained in milliseconds, as model folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, USER = "<|begin|>", "<|end|>", "<|user|>"
CORPUS = [
    "The quick brown fox jumps over the lazy dog. " * 4,
    "def encode(text: str) -> list[int]:\n    return [ord(c) for c in text]\n" * 4,
    "naïve café, déjà vu; 你好，世界。你好 emoji 👍🏽 👩‍👩‍👧 and 100 €\n" * 4,
    "stop stops stopping STOP ### User: ### Assistant: </answer>\n" * 4,
]
CHAT_TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role ' ~ message['role']) }}
    {%- endif %}
    {{- '<|user|>' ~ message['role'] ~ '\\n' ~ message['content'] | trim ~ eos_token ~ '\\n' }}
{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if enable_thinking is defined %}<think>{% endif %}
{%- if add_generation_prompt %}{{ '<|user|>assistant\\n' }}{% endif %}"""


def write_byte_level(folder: Path, **config: Any) -> Path:
    """A byte-level BPE tokenizer in the manner of Llama 3: bos first, added special tokens."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[BOS, EOS, USER],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    # This token isn't special, and its characters aren't in the byte-level alphabet.
    tokenizer.add_tokens(["<工具>"])
    defaults = {"bos_token": BOS, "eos_token": EOS, "chat_template": CHAT_TEMPLATE}
    return _write(folder, json.loads(tokenizer.to_str()), {**defaults, **config})


def write_sentencepiece(folder: Path, **config: Any) -> Path:
    """A BPE tokenizer in the manner of Llama 2: `▁` for spaces, byte tokens for the unknown."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>"],
        limit_alphabet=60,
        show_progress=False,
    )
    # Split only for training: merges across words would give few tokens that begin with a space.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    state = json.loads(tokenizer.to_str())
    vocab = state["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    defaults = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return _write(folder, state, {**defaults, **config})


def _write(folder: Path, tokenizer: dict[str, Any], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
