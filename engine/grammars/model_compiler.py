"""`make_grammar_compiler`: a `GrammarCompiler` for a model folder.

python -m engine.grammars.model_compiler FOLDER     # prints the folder's tokenizer as JSON
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from engine.checkpoint.model_config import ModelConfig
from engine.constraints.grammar_compiler import GrammarCompiler
from engine.errors import ConfigError
from engine.process.other_process import ask_module
from engine.tokenizer.loading import load_tokenizer_files

LOAD_TIMEOUT_S = 120.0


def make_grammar_compiler(model: ModelConfig) -> GrammarCompiler:
    """The compiler of a model's grammars. It reads the tokenizer when it is first needed."""
    load = partial(tokenizer_json, model.path)
    return GrammarCompiler(load, model.vocab_size, model.eos_token_ids)


def tokenizer_json(folder: Path) -> str:
    """The tokenizer of a model folder as `tokenizer.json` would hold it. Raises `ConfigError`.

    If transformers has to load it, another process does: it would bring torch, hundreds of MB.
    """
    return _ask_other_process(folder) if _needs_transformers(folder) else _read(folder)


def _read(folder: Path) -> str:
    backend = load_tokenizer_files(folder).backend
    backend.no_truncation()
    backend.no_padding()
    text: str = backend.to_str()
    return text


def _needs_transformers(folder: Path) -> bool:
    """Whether `load_tokenizer_files` may turn to transformers."""
    if not (folder / "tokenizer.json").is_file():
        return True
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        return str(config.get("tokenizer_class")).startswith("LlamaTokenizer")
    except (OSError, ValueError, AttributeError):
        return False


def _ask_other_process(folder: Path) -> str:
    return ask_module(
        "engine.grammars.model_compiler",
        folder,
        LOAD_TIMEOUT_S,
        late=f"the tokenizer of {folder} takes too long to load",
        failed=f"the tokenizer of {folder} can't be loaded",
    ).decode()


if __name__ == "__main__":
    try:
        sys.stdout.write(_read(Path(sys.argv[1])))
    except ConfigError as error:
        sys.exit(str(error))
