"""The types whose attention runs over latents: what their caches keep of a token."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.models import recording
from tests.models.tiny_model import tiny_config


@pytest.mark.parametrize(
    "kind",
    (
        *("axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
        *("kimi_linear", "longcat_flash", "minicpm3", "youtu"),
    ),
)
def test_a_token_takes_its_latent_and_its_rotated_key(kind: str, tmp_path: Path) -> None:
    config = tiny_config(kind)
    config.save_pretrained(tmp_path)
    layout = recording.record(tmp_path)
    assert {call.kv_size for call in layout.calls} == {
        config.kv_lora_rank + config.qk_rope_head_dim
    }
