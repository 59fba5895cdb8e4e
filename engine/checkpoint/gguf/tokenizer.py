"""The tokenizer of a GGUF file, as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from engine.checkpoint.gguf.splits import SPLITS
from engine.checkpoint.values import ConfigValues
from engine.errors import ConfigError

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""Words of `tokenizer.ggml.token_type`."""
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>"),
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"),
)
"""Control tokens that end an answer, of which a file often names only one. (llama.cpp stops at all
of them, too.)"""
_MAX_PIECE_CHARS = 256
"""Of a token that merges are looked for in. The longest that are known are runs of 31 blanks."""
_TEMPLATE = "tokenizer.chat_template"


class GgufTokenizer(NamedTuple):
    """Contents of the files."""

    json: str
    """tokenizer.json"""
    config: dict[str, Any]
    """tokenizer_config.json"""
    special_ids: dict[str, int | list[int] | None]
    """What config.json and generation_config.json say of tokens."""


class _Vocabulary:
    """The file's tokens."""

    def __init__(self, metadata: ConfigValues) -> None:
        self.metadata = metadata
        self.tokens = self._texts("tokens")
        if not self.tokens:
            raise ConfigError(f"{metadata.path} has no tokenizer ('tokenizer.ggml.tokens').")
        self.types = self._per_token("token_type", _NORMAL)
        self.ids: dict[str, int] = {}
        for number, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind != _UNUSED:
                self.ids.setdefault(token, number)

    def merges(self) -> list[tuple[str, str]] | None:
        """None if the file has none."""
        if self.metadata.get("tokenizer.ggml.merges") is None:
            return None
        found = []
        for merge in self._texts("merges"):
            blank = merge.find(" ", 1)
            left, right = merge[:blank], merge[blank + 1 :]
            if blank < 0 or not all(part in self.ids for part in (left, right, left + right)):
                raise ConfigError(
                    f"{self.metadata.path} is damaged: the merge {merge!r:.80} isn't one of its "
                    "tokens. Download it again."
                )
            found.append((left, right))
        return found

    def implied_merges(self, scores: list[float]) -> list[tuple[str, str]]:
        """Those of a SentencePiece vocabulary: all pairs of tokens that make one, best ones first.
        (As transformers' `generate_merges`.)"""
        found = []
        for token, score in zip(self.tokens, scores, strict=True):
            if len(token) > _MAX_PIECE_CHARS:
                continue
            pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
            known = [pair for pair in pairs if pair[0] in self.ids and pair[1] in self.ids]
            known.sort(key=lambda pair: (self.ids[pair[0]], self.ids[pair[1]]))
            found += [(score, len(left), len(right), left, right) for left, right in known]
        found.sort(key=lambda merge: merge[:3], reverse=True)
        return [(left, right) for *_, left, right in found]

    def scores(self) -> list[float]:
        scores = self._per_token("scores", 0.0)
        if not np.all(np.isfinite(scores)):
            raise self.metadata.error("tokenizer.ggml.scores", "a list of finite numbers")
        return scores

    def id(self, key: str) -> int | None:
        """Of a token that the metadata name."""
        key = f"tokenizer.ggml.{key}"
        if self.metadata.get(key) is None:
            return None
        number = self.metadata.count(key)
        # Some converters write -1 or 2**32 - 1 for none.
        return number if number < len(self.tokens) else None

    def flag(self, key: str, default: bool) -> bool:
        key = f"tokenizer.ggml.{key}"
        return default if self.metadata.get(key) is None else self.metadata.flag(key)

    def ends(self) -> list[int]:
        """Ids of tokens that end an answer."""
        named = [number for key in _ENDS if (number := self.id(key)) is not None]
        by_text = [self.ids[text] for text in _END_TEXTS if text in self.ids]
        controls = [number for number in by_text if self.types[number] == _CONTROL]
        return sorted({*named, *controls})

    def add_to(self, backend: Tokenizer, is_byte_level: bool) -> None:
        """Tell `backend` which tokens are found in texts as they stand."""
        added = [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED) and token
        ]
        for special, group in ((True, []), (False, [])):  # type: tuple[bool, list[AddedToken]]
            group += [token for token in added if token.special == special]
            (backend.add_special_tokens if special else backend.add_tokens)(group)

    def _texts(self, key: str) -> list[str]:
        key = f"tokenizer.ggml.{key}"
        found = self.metadata.get(key)
        if found is None:
            return []
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise self.metadata.error(key, "a list of texts")
        return found

    def _per_token(self, key: str, default: float) -> list[Any]:
        key = f"tokenizer.ggml.{key}"
        found = self.metadata.get(key)
        if found is None:
            return [default] * len(self.tokens)
        if not isinstance(found, np.ndarray) or found.shape != (len(self.tokens),):
            raise self.metadata.error(key, f"{len(self.tokens)} numbers, one for each token")
        listed: list[Any] = found.tolist()
        return listed


def read_tokenizer(metadata: ConfigValues) -> GgufTokenizer:
    """The tokenizer that a file describes. Raises `ConfigError` if it is of a kind that isn't
    known, or damaged."""
    vocabulary = _Vocabulary(metadata)
    kind = metadata.text("tokenizer.ggml.model")
    architecture = metadata.text("general.architecture")
    build = _KINDS.get(kind)
    if build is None:
        raise ConfigError(
            f"{metadata.path} has a tokenizer of the kind {kind!r:.80}, which Manta can't read; it "
            f"reads {', '.join(_KINDS)}. Use the model's safetensors checkpoint."
        )
    backend, add_bos = build(vocabulary, architecture)
    vocabulary.add_to(backend, kind == "gpt2")
    named = {name: vocabulary.id(key) for name, key in _NAMED.items()}
    _frame(
        backend,
        vocabulary,
        named["bos_token"] if vocabulary.flag("add_bos_token", add_bos) else None,
        named["eos_token"] if vocabulary.flag("add_eos_token", False) else None,
    )
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {name: vocabulary.tokens[i] for name, i in named.items() if i is not None}
    template = _chat_template(metadata)
    if template is not None:
        config["chat_template"] = template
    ids = {f"{name}_id": number for name, number in named.items() if name != "unk_token"}
    return GgufTokenizer(backend.to_str(), config, {**ids, "eos_token_id": vocabulary.ends()})


def _byte_level(vocabulary: _Vocabulary, architecture: str) -> tuple[Tokenizer, bool]:
    metadata = vocabulary.metadata
    key = "tokenizer.ggml.pre"
    name = "(none)" if metadata.get(key) is None else metadata.text(key)
    split = SPLITS.get(name)
    if split is None:
        raise ConfigError(
            f"{metadata.path} has a tokenizer that splits texts in the way {name!r:.80}, which "
            f"Manta doesn't know; it knows {', '.join(SPLITS)}. Use a newer file of the model, or "
            "its safetensors checkpoint."
        )
    merges = vocabulary.merges()
    if merges is None:
        raise ConfigError(f"{metadata.path} lacks the key 'tokenizer.ggml.merges'.")
    backend = Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=split.ignore_merges))
    normalizer = split.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = split.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos


def _sentencepiece(vocabulary: _Vocabulary, architecture: str) -> tuple[Tokenizer, bool]:
    is_gemma = architecture.startswith("gemma")
    if is_gemma:  # their pieces lie in the order of their merges, and blanks are written as such
        _respell_blanks(vocabulary)
        scores = [-float(number) for number in range(len(vocabulary.tokens))]
    else:
        scores = vocabulary.scores()
    unknown = vocabulary.id("unknown_token_id")
    backend = Tokenizer(
        models.BPE(
            vocabulary.ids,
            vocabulary.merges() or vocabulary.implied_merges(scores),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    has_prefix = vocabulary.flag("add_space_prefix", not is_gemma)
    if is_gemma and not has_prefix:
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif architecture == "phi3":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        scheme = "first" if has_prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
    if has_prefix:
        spaces.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(spaces)
    return backend, True


_KINDS: dict[str, Callable[[_Vocabulary, str], tuple[Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


def _respell_blanks(vocabulary: _Vocabulary) -> None:
    for number, token in enumerate(vocabulary.tokens):
        if re.fullmatch(" {2,}", token):
            vocabulary.ids.setdefault("▁" * len(token), number)
            vocabulary.ids.pop(token, None)
            vocabulary.tokens[number] = "▁" * len(token)


def _frame(backend: Tokenizer, vocabulary: _Vocabulary, bos: int | None, eos: int | None) -> None:
    """Texts begin and end with these tokens."""
    first = [] if bos is None else [(vocabulary.tokens[bos], bos)]
    last = [] if eos is None else [(vocabulary.tokens[eos], eos)]
    if first or last:
        words = [*(token for token, _ in first), "$A", *(token for token, _ in last)]
        backend.post_processor = processors.TemplateProcessing(
            single=words,
            pair=[*words, *("$B" if w == "$A" else w for w in words)],
            special_tokens=first + last,
        )


def _chat_template(metadata: ConfigValues) -> str | list[dict[str, str]] | None:
    """The template, or several with their names."""
    named = {
        key.removeprefix(f"{_TEMPLATE}."): metadata.text(key)
        for key in metadata.given
        if key.startswith(f"{_TEMPLATE}.")
    }
    main = metadata.text(_TEMPLATE) if metadata.get(_TEMPLATE) is not None else None
    if not named:
        return main
    if main is not None:
        named["default"] = main
    return [{"name": name, "template": text} for name, text in named.items()]
