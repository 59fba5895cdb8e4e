"""Models for comparisons, with random weights, built once: Llamas of 88 M and 4.2 M parameters, and
a mixture of experts of Qwen 3's shape, of whose 216 M parameters a token takes some 40 M.

Speed does not depend on a model's output, so random weights are enough. A fixed seed makes them the
same on every machine. They are stored as bfloat16, so a server that runs them in float32 and one
that runs them in bfloat16 hold the same numbers.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

SEED = 0
WEIGHT_STD = 0.06
SHAPES: dict[str, dict[str, int]] = {
    "llama-88m": {
        "vocab_size": 8192,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
    "llama-4m": {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
MIXTURE = "qwen3-moe-216m"
SHAPES[MIXTURE] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 256,
}
COPYING = "llama-88m-copying"
"""The shapes of `llama-88m`, with weights that give each token one successor (`successors`)."""
SHAPES[COPYING] = SHAPES["llama-88m"]
COPYING_SCALE = 0.005
"""What the layers of `COPYING` add to the hidden state, against random weights."""
CORPUS_BYTES = 8 << 20
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def build(name: str, folder: Path) -> Path:
    """Build the model of `SHAPES` in `folder`, with a tokenizer of its vocabulary.

    Returns `folder` at once if the model is there already. Takes about a minute on two cores.
    """
    if (folder / "config.json").exists():
        return folder
    import torch  # only here: building is rare, and importing these takes seconds
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    llama = (LlamaConfig, LlamaForCausalLM)
    make_config, make = (Qwen3MoeConfig, Qwen3MoeForCausalLM) if name == MIXTURE else llama
    config = make_config(
        **SHAPES[name],
        max_position_embeddings=4096,
        initializer_range=WEIGHT_STD,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_train_tokenizer(config.vocab_size),
        bos_token="<|bos|>",
        eos_token="<|eos|>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(SEED)
    model = make(config)
    if name == COPYING:
        _give_successors(model)
    model.bfloat16()

    building = folder.with_name(folder.name + ".building")
    shutil.rmtree(building, ignore_errors=True)
    model.save_pretrained(building)
    tokenizer.save_pretrained(building)
    building.rename(folder)
    return folder


def successors(vocab_size: int) -> list[int]:
    """What `COPYING` puts behind each token, as one cycle through all tokens but bos and eos.

    A model with random weights never repeats what stands in its prompt. This one goes on with any
    passage of the cycle as a model does that copies a text.
    """
    tokens = list(range(2, vocab_size))
    random.Random(SEED).shuffle(tokens)
    behind = [2, 2, *tokens]
    for token, following in zip(tokens, [*tokens[1:], tokens[0]], strict=True):
        behind[token] = following
    return behind


def _give_successors(model: LlamaForCausalLM) -> None:
    """The head finds a token's embedding in the hidden state; all layers are computed as ever."""
    import torch

    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(COPYING_SCALE)
            layer.mlp.down_proj.weight.mul_(COPYING_SCALE)
        embeddings = model.model.embed_tokens.weight
        model.lm_head.weight[torch.tensor(successors(len(embeddings)))] = embeddings


def fingerprint(folder: Path) -> str:
    """First 16 hex digits of the SHA-256 over the model's weights and configuration."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), folder / "config.json"]):
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:16]


def stdlib_text() -> Iterator[str]:
    """Source files of the running Python's standard library, in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts:
            yield path.read_text(encoding="utf-8", errors="replace")


def _train_tokenizer(vocab_size: int) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_bytes(CORPUS_BYTES), trainer)
    return tokenizer


def _first_bytes(limit: int) -> Iterator[str]:
    taken = 0
    for text in stdlib_text():
        if taken >= limit:
            return
        taken += len(text)
        yield text
