"""Decoding the same shape with `transformers`: sdpa attention, a cache that grows."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.gpu_bench.card import release, seconds_per_call
from benchmarks.gpu_bench.shapes import ModelShape, Plan


class TransformersPeer:
    """A model of `shape` with random weights, as `transformers` makes it."""

    def __init__(self, shape: ModelShape, plan: Plan, folder: Path, device: torch.device) -> None:
        # Slow to import, and not needed with --skip-transformers.
        from transformers import AutoConfig, AutoModelForCausalLM

        self.plan = plan
        self.device = device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        config = AutoConfig.from_pretrained(shape.write(folder, str(dtype).removeprefix("torch.")))
        with device:
            self.model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="sdpa"
            )
        self.model.eval()

    @torch.inference_mode()
    def decode_ms(self, batch: int) -> float:
        """Mean time of a greedy step of `batch` rows, over the steps that count for Manta."""
        plan = self.plan
        vocab = self.model.config.vocab_size
        prompt = torch.randint(2, vocab, (batch, plan.decode_prompt), device=self.device)
        output = self.model(prompt, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        del output

        def step() -> None:
            nonlocal token
            out = self.model(token, past_key_values=cache, use_cache=True)
            token = out.logits[:, -1].argmax(-1, keepdim=True)

        for _ in range(plan.warmup):
            step()
        return seconds_per_call(step, plan.steps, self.device) * 1e3

    def close(self) -> None:
        """Free its memory."""
        del self.model
        release(self.device)
