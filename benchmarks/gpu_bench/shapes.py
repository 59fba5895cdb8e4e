"""Model shapes of the GPU benchmark, and the least time that a card needs for their steps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

BYTES = 2
"""Size of a bfloat16 number."""


class CardRates(NamedTuple):
    """The card's best rates, measured in the same run."""

    bytes_per_s: float
    """Bytes that a copy reads and writes per second."""
    flop_per_s: float
    """Rate of a bfloat16 matrix product."""


@dataclass(frozen=True)
class ModelShape:
    """A Llama, in bfloat16. Sizes in elements."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool

    @property
    def linear_params(self) -> int:
        """Elements of all layers' matrices."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_params(self) -> int:
        """Elements of the matrix that makes logits."""
        return self.vocab_size * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes that every decode step reads: layers and logits, not the table of embeddings."""
        return BYTES * (self.linear_params + self.head_params)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return BYTES * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def decode_s(self, batch: int, context: float, rates: CardRates) -> float:
        """Least time of a step of `batch` rows with `context` tokens each: every weight and every
        key and value read once, or all products computed."""
        memory = self.weight_bytes + batch * context * self.kv_bytes_per_token
        flop = 2 * batch * (self.linear_params + self.head_params)
        return max(memory / rates.bytes_per_s, flop / rates.flop_per_s)

    def prefill_s(self, num_tokens: int, rates: CardRates) -> float:
        """Least time of one prompt: products and causal attention, or every weight read once."""
        attention = 2 * self.num_layers * self.num_heads * self.head_dim * num_tokens**2
        flop = 2 * num_tokens * self.linear_params + attention + 2 * self.head_params
        return max(flop / rates.flop_per_s, self.weight_bytes / rates.bytes_per_s)

    def serving_s(
        self, num_requests: int, concurrency: int, input_len: int, output_len: int, rates: CardRates
    ) -> float:
        """Least time of requests of which `concurrency` run at a time: their prefills, and decode
        steps at the mean context."""
        waves = num_requests / concurrency
        step = self.decode_s(concurrency, input_len + output_len / 2, rates)
        prefill = num_requests * self.prefill_s(input_len, rates)
        return prefill + waves * (output_len - 1) * step

    def write(self, folder: Path, dtype: str) -> Path:
        """Write the shape's config.json, without weights or tokenizer."""
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "dtype": dtype,
            "torch_dtype": dtype,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return folder


LLAMA_8B = ModelShape("8b", 4096, 32, 32, 8, 128, 14336, 128256, tied=False)
LLAMA_1B = ModelShape("1b", 2048, 16, 32, 8, 64, 8192, 128256, tied=True)
TINY = ModelShape("tiny", 256, 2, 8, 2, 64, 512, 512, tied=True)
"""The shape for --quick: the smallest that FlashInfer has kernels for."""
SHAPES = {shape.name: shape for shape in (LLAMA_1B, LLAMA_8B)}


class Plan(NamedTuple):
    """What is measured. Sizes are tokens, steps and requests."""

    context: int
    """Mean tokens per row over the decode steps that count."""
    batches: tuple[int, ...]
    warmup: int
    steps: int
    prompts: tuple[int, ...]
    """Lengths of prefills."""
    repeats: int
    """Runs of each prefill; the median counts."""
    concurrency: int
    num_requests: int
    input_len: int
    output_len: int
    peer_batches: tuple[int, ...]
    """Decode batches of transformers."""
    chunk: int
    """`chunked_prefill_size`"""

    @property
    def decode_prompt(self) -> int:
        """Prompt after which the measured steps have `context` tokens on average."""
        return self.context - self.warmup - self.steps // 2

    @property
    def longest_decode(self) -> int:
        """Length of the longest request that runs together with others."""
        decode = self.decode_prompt + self.warmup + self.steps
        return max(decode, self.input_len + self.output_len)

    @property
    def max_model_len(self) -> int:
        """Length of the longest request, and some room."""
        return max(*self.prompts, self.longest_decode) + 16


FULL = Plan(
    context=1024,
    batches=(1, 64, 256),
    warmup=16,
    steps=64,
    prompts=(64, 1024, 8192),
    repeats=5,
    concurrency=256,
    num_requests=512,
    input_len=256,
    output_len=256,
    peer_batches=(1, 64),
    chunk=2048,
)
QUICK = Plan(
    context=32,
    batches=(1, 4),
    warmup=2,
    steps=4,
    prompts=(32, 96),
    repeats=2,
    concurrency=4,
    num_requests=8,
    input_len=16,
    output_len=8,
    peer_batches=(1,),
    chunk=64,
)
