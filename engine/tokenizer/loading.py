"""Reading the tokenizer files of a model folder."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from engine.errors import ConfigError

# transformers rebuilds these from vocabulary and merges with the pipeline of the original
# SentencePiece model; a `tokenizer.json` written by older versions gives other ids.
_REBUILT_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
_OTHER_FORMATS = ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "*.tiktoken")


class TokenizerFiles(NamedTuple):
    """Content of the files: the `tokenizers` pipeline, the named special tokens, the templates."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    """Special tokens by the names that chat templates use: `bos_token`, `eos_token`, ..."""
    chat_templates: dict[str, str]
    """Templates by name; a model with a single one has "default"."""


def load_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read `folder`. Raises `ConfigError` if it holds no tokenizer that can be loaded."""
    if not folder.is_dir():
        raise ConfigError(f"the model folder {folder} doesn't exist")
    check_tokenizer_files(folder)
    config = _read_json(folder / "tokenizer_config.json") or {}
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _load_with_transformers(folder)
    try:
        # Some editors write a mark of the encoding first, which the package doesn't take.
        backend = tokenizers.Tokenizer.from_buffer(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except Exception as error:  # the package raises plain Exception
        raise ConfigError(
            f"{path} can't be read: {error}. Download the file again, or install the version of "
            "the tokenizers package that wrote it."
        ) from error
    is_byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
    if config.get("tokenizer_class") in _REBUILT_CLASSES and not is_byte_level:
        return _load_with_transformers(folder)
    if "added_tokens_decoder" not in config:
        config |= _read_json(folder / "special_tokens_map.json") or {}
    special_tokens = {
        name: _content(value)
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    _add_tokens(backend, config, special_tokens.values())
    return TokenizerFiles(backend, special_tokens, _read_chat_templates(folder, config))


def check_tokenizer_files(folder: Path) -> None:
    """Raise `ConfigError` if `folder` holds no file of a tokenizer."""
    if not any(next(folder.glob(name), None) for name in ("tokenizer.json", *_OTHER_FORMATS)):
        raise ConfigError(
            f"{folder} holds no tokenizer: expected tokenizer.json beside config.json. "
            "Copy the tokenizer files of the model's repository there."
        )


def _add_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], named: Iterable[str]
) -> None:
    """Add what `tokenizer_config.json` lists and `tokenizer.json` lacks, in transformers' order."""
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    listed = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    tokens = [AddedToken(**spec) for _, spec in listed]
    backend.add_tokens([token for token in tokens if repr(token) not in known])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        extra = list(extra.values())
    by_content = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens(
        [
            by_content.get(name) or AddedToken(name, special=True, normalized=False)
            for name in [*named, *map(_content, extra)]
        ]
    )


def load_chat_templates(folder: Path) -> dict[str, str]:
    """The chat templates of a model folder by name. Raises `ConfigError`."""
    return _read_chat_templates(folder, _read_json(folder / "tokenizer_config.json") or {})


def _read_chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    files = {
        path.stem: path.read_text(encoding="utf-8-sig")
        for path in sorted(folder.glob("additional_chat_templates/*.jinja"))
    }
    main = folder / "chat_template.jinja"
    if main.is_file():
        files["default"] = main.read_text(encoding="utf-8-sig")
    if files:
        return files
    return _named_templates(config.get("chat_template"))


def _named_templates(value: Any) -> dict[str, str]:
    """Templates by name. `value` is one text, a mapping, or a list of {name, template}."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value}
    return dict(value or {})


def _load_with_transformers(folder: Path) -> TokenizerFiles:
    # Takes seconds and imports torch, so only here.
    from transformers import AutoTokenizer

    try:
        loaded: Any = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # many kinds of errors have the same advice
        raise ConfigError(
            f"transformers can't load the tokenizer in {folder}: {error}. "
            "Add the model's tokenizer.json to the folder."
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ConfigError(
            f"the tokenizer in {folder} ({type(loaded).__name__}) has no form that the tokenizers "
            "package can run. Add the model's tokenizer.json to the folder."
        )
    templates = _named_templates(loaded.chat_template)
    return TokenizerFiles(backend, dict(loaded.special_tokens_map), templates)


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} isn't valid JSON: {error}. Download the file again.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object. Download the file again.")
    return value
