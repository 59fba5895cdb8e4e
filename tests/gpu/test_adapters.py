"""Adapters on a GPU, in captured graphs and eagerly, against transformers on merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from tests.support.adapters import make_adapter, merge
from tests.support.engines import greedy_reference, load_reference
from tests.support.models import THROUGH_TRANSFORMERS, make_model

NEW = 16


LLAMA: tuple[str, dict[str, Any]] = ("LlamaForCausalLM", {"hidden_size": 256, "head_dim": 64})
MIXTURE = THROUGH_TRANSFORMERS["qwen3_moe"]


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (LLAMA, {}),
        (LLAMA, {"enable_cuda_graphs": False}),
        (LLAMA, {"kernels": "torch"}),
        (MIXTURE, {"enable_cuda_graphs": False}),
    ],
)
def test_tokens_are_those_of_merged_weights(
    tmp_path: Path, kind: tuple[str, dict[str, Any]], keys: dict[str, object]
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make_model(tmp_path / "model", kind[0], **kind[1])
    own = load_reference(model)
    experts = "all" if kind is MIXTURE else ""
    folders = {
        name: make_adapter(tmp_path / name, own, rank=rank, seed=rank, size=0.8, experts=experts)
        for name, rank in (("a", 4), ("b", 16), ("c", 64))
    }
    names = [None, "a", "b", "c"] * 4
    prompts = [[3 + (7 * n + i) % 200 for i in range(5 + 3 * n)] for n in range(len(names))]
    wanted = {
        name: greedy_reference(
            own if name is None else merge(load_reference(model), folders[name]),
            [ids for ids, mine in zip(prompts, names, strict=True) if mine == name],
            NEW,
        )
        for name in dict.fromkeys(names)
    }
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    with LLM(
        str(model),
        device="cuda",
        dtype="float32",
        attention_backend="torch" if "kernels" in keys else "auto",
        lora_adapters={name: str(folder) for name, folder in folders.items()},
        max_total_tokens=4096,
        **keys,
    ) as llm:
        outs = llm.generate(prompts, params, lora=names, use_tqdm=False)
    for name, mine in wanted.items():
        got = [out.outputs[0].token_ids for out, n in zip(outs, names, strict=True) if n == name]
        assert [list(ids) for ids in got] == mine
