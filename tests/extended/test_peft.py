"""Adapters that PEFT itself has written give the tokens that it gives once it has merged them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import REPO_ROOT
from engine.errors import RequestError
from engine.llm import LLM
from engine.protocol.sampling_params import SamplingParams
from tests.support.models import make_model

PACKAGES = ("peft==0.21.2", "accelerate==1.15.0")
SERVED: dict[str, dict[str, Any]] = {
    "two": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": "all-linear"},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj", "o_proj", "down_proj", "gate_proj"],
        "rank_pattern": {"q_proj": 12, "^model.layers.1.self_attn.k_proj": 32},
        "alpha_pattern": {"model.layers.2.mlp.down_proj": 64},
        "layers_to_transform": [0, 1, 2],
    },
    "orthogonal": {"r": 4, "target_modules": ["up_proj"], "init_lora_weights": "orthogonal"},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "DoRA"),
    "modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "bias": ({"bias": "lora_only"}, "biases"),
    "embedding": ({"target_modules": ["embed_tokens", "up_proj"]}, "embeddings"),
    "head": ({"target_modules": ["lm_head", "up_proj"]}, "output head"),
}
PROMPTS = [[5, 7, 11, 13], list(range(20, 60))]
MAX_NEW = 12
WRITE = """
import json, sys
from pathlib import Path
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tests.support.engines import greedy_reference, load_reference
folder, kinds, prompts, count = json.loads(sys.argv[1])
model, generator = Path(folder) / "model", torch.Generator().manual_seed(0)
found = {"": greedy_reference(load_reference(model), prompts, count)}
for name, keys in kinds.items():
    made = get_peft_model(load_reference(model), LoraConfig(task_type="CAUSAL_LM", **keys))
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if "lora_" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    made.save_pretrained(Path(folder) / "adapters" / name)
    if name in sys.argv[2:]:
        read = PeftModel.from_pretrained(load_reference(model), Path(folder) / "adapters" / name)
        found[name] = greedy_reference(read.merge_and_unload(), prompts, count)
(Path(folder) / "found.json").write_text(json.dumps(found))
"""


@pytest.mark.timeout(300)
def test_adapters_of_peft(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "LlamaForCausalLM", num_hidden_layers=4)
    packages = tmp_path / "packages"
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), *PACKAGES]
    subprocess.run([sys.executable, *words], check=True, timeout=200)
    kinds = SERVED | {
        name: {"r": 4, "target_modules": ["up_proj"], **keys} for name, (keys, _) in REFUSED.items()
    }
    given = json.dumps([str(tmp_path), kinds, PROMPTS, MAX_NEW])
    env = {**os.environ, "PYTHONPATH": f"{REPO_ROOT}{os.pathsep}{packages}"}
    subprocess.run([sys.executable, "-c", WRITE, given, *SERVED], env=env, check=True, timeout=200)
    expected = json.loads((tmp_path / "found.json").read_text())
    params = SamplingParams(temperature=0.0, max_tokens=MAX_NEW, ignore_eos=True)
    sizes: dict[str, Any] = {"max_total_tokens": 2048, "max_model_len": 256, "cpu_threads": 1}
    folder = str(tmp_path / "adapters")
    with LLM(str(tmp_path / "model"), lora_folder=folder, dtype="float32", **sizes) as llm:
        for name in SERVED:
            outputs = llm.generate(PROMPTS, params, lora=name, use_tqdm=False)
            tokens = [out.outputs[0].token_ids for out in outputs]
            assert tokens == expected[name], name
            assert tokens != expected[""], name
        for name, (_, says) in REFUSED.items():
            with pytest.raises(RequestError, match=says):
                llm.generate(PROMPTS, params, lora=name, use_tqdm=False)
