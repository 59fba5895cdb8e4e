"""The best known families of models that transformers' code computes, as a server takes them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from benchmarks.common import REPO_ROOT
from tests.support.models import THROUGH_TRANSFORMERS, make_model

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: THROUGH_TRANSFORMERS[name]
        for name in (
            *("gemma3", "gpt_oss", "qwen3_moe", "mixtral", "phi3", "smollm3", "granite", "glm4"),
            *("deepseek_v3", "llama4"),
        )
    },
    "olmo3": (
        "Olmo3ForCausalLM",
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
}
VOCAB = 4096


def make_family(folder: Path, name: str) -> Path:
    """A tiny model of a family, with the tokenizer of the model that the repository carries."""
    architecture, keys = FAMILIES[name]
    keys = {"num_hidden_layers": 4, **keys, "vocab_size": VOCAB}
    if "vocab_size_per_layer_input" in keys:
        keys["vocab_size_per_layer_input"] = VOCAB
    return with_tokenizer(make_model(folder, architecture, **keys))


def with_tokenizer(folder: Path) -> Path:
    """The files of the small model that a server needs besides weights."""
    for file in (REPO_ROOT / "models" / "manta-small").iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "special")):
            shutil.copy(file, folder)
    return folder
