"""An architecture that the caller has registered with transformers: it needs no change of ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine import LLM, SamplingParams
from engine.checkpoint.tried_types import model_line, read_tried_types
from tests.support.engines import engine_for, greedy_reference

KIND = "manta_test_own"
MAX_NEW = 10
PROMPTS = [[5], list(range(7, 60)), [*range(7, 40), 3, 4], [3, 4] * 9]


class OwnConfig(transformers.PreTrainedConfig):
    model_type = KIND
    vocab_size: int = 128
    hidden_size: int = 32
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 256
    tie_word_embeddings: bool = False


class OwnLayer(nn.Module):
    """Attention whose queries are turned by the position, and a gate; by no other model."""

    def __init__(self, config: OwnConfig, number: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, number, True
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.size = config.hidden_size // config.num_attention_heads
        self.q = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.kv = nn.Linear(
            config.hidden_size, 2 * config.num_key_value_heads * self.size, bias=False
        )
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.norm = nn.LayerNorm(config.hidden_size)

    def forward(self, x: Tensor, positions: Tensor, mask: Any, cache: Any, **kwargs: Any) -> Tensor:
        inner = self.norm(x)
        turned = torch.cos(positions[..., None] / 7.0 + self.layer_idx)
        q = (self.q(inner) * turned).unflatten(-1, (-1, self.size)).transpose(1, 2)
        k, v = self.kv(inner).unflatten(-1, (-1, self.size)).transpose(1, 2).chunk(2, 1)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        found, _ = attend(self, q, k, v, mask, dropout=0.0, scaling=0.5, **kwargs)
        gated: Tensor = x + self.out(found.flatten(2)) * torch.sigmoid(inner)
        return gated


class OwnModel(transformers.PreTrainedModel):
    config_class = OwnConfig
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OwnLayer(config, i) for i in range(config.num_hidden_layers))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        x = self.embed(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = transformers.DynamicCache(config=self.config)
        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        if position_ids is None:
            position_ids = torch.arange(seen, seen + x.shape[1], device=x.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        for layer in self.layers:
            x = layer(x, position_ids, mask, past_key_values, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=past_key_values)


class OwnForCausalLM(transformers.PreTrainedModel, transformers.GenerationMixin):
    config_class = OwnConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.model = OwnModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor, logits_to_keep: int | Tensor = 0, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        out = self.model(input_ids, **kwargs)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, keep]).flip(-1) / 2
        return CausalLMOutputWithPast(logits=logits, past_key_values=out.past_key_values)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a model of the class above. Nothing else is prepared: no layout, no other process."""
    monkeypatch.setattr("engine.checkpoint.layout.cache_folder", lambda: tmp_path / "cache")
    transformers.AutoConfig.register(KIND, OwnConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM, exist_ok=True)
    torch.manual_seed(0)
    model = OwnForCausalLM(OwnConfig())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 1.2 / parameter.shape[1] ** 0.5)
    model.save_pretrained(tmp_path / "own")
    yield tmp_path / "own"


def reference(folder: Path) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = greedy_reference(model, PROMPTS, MAX_NEW)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    return expected


def test_it_runs_in_this_process(folder: Path) -> None:
    expected = reference(folder)
    params = SamplingParams(max_tokens=MAX_NEW, temperature=0, ignore_eos=True)
    with engine_for(folder, page_size=4) as engine:
        for keys in ({"chunked_prefill_size": 16, "warm": PROMPTS}, {"retract_every": 3}):
            assert engine.run(PROMPTS, params, **keys) == expected
        line = model_line(engine.resolved.model)
    assert line.startswith("computed by the code of transformers")
    assert f"type {KIND} is untested" in line and read_tried_types().get(KIND) is None
    assert not (folder.parent / "cache" / "layouts").exists(), "its code may change"


def test_the_offline_engine_runs_it(folder: Path) -> None:
    params = SamplingParams(max_tokens=MAX_NEW, temperature=0, ignore_eos=True)
    with LLM(str(folder), dtype="float32", max_total_tokens=512, max_model_len=128) as llm:
        outputs = llm.generate(PROMPTS, params)
    assert [output.outputs[0].token_ids for output in outputs] == reference(folder)
