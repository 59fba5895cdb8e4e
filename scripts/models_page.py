"""Write docs/models.md, which shows the table of tried types.

    python scripts/models_page.py

The table is `engine/checkpoint/tried_types.json`; `make test-models WRITE=1` writes both.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.checkpoint.tried_types import TriedType, TriedTypes, read_tried_types

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
FAMILIES: dict[str, str] = {
    "Llama 2, 3": "llama",
    "Llama 4": "llama4 llama4_text",
    "Mistral": "mistral",
    "Ministral": "ministral ministral3",
    "Mixtral": "mixtral",
    "Qwen2, Qwen2.5": "qwen2",
    "Qwen2-MoE": "qwen2_moe",
    "Qwen3": "qwen3",
    "Qwen3-MoE": "qwen3_moe",
    "Qwen3-Next": "qwen3_next",
    "Qwen3.5": "qwen3_5 qwen3_5_moe",
    "Gemma": "gemma",
    "Gemma 2": "gemma2",
    "Gemma 3": "gemma3 gemma3_text",
    "Gemma 3n": "gemma3n gemma3n_text",
    "Gemma 4": "gemma4 gemma4_text",
    "gpt-oss": "gpt_oss",
    "DeepSeek V2": "deepseek_v2",
    "DeepSeek V3, R1": "deepseek_v3",
    "DeepSeek V3.2": "deepseek_v32",
    "DeepSeek V4": "deepseek_v4",
    "GLM-4": "glm glm4",
    "GLM-4.5": "glm4_moe glm4_moe_lite",
    "GLM-5": "glm_moe_dsa",
    "Phi-1, Phi-2": "phi",
    "Phi-3, Phi-4": "phi3",
    "Phi-3.5-MoE": "phimoe",
    "OLMo": "olmo",
    "OLMo 2": "olmo2",
    "OLMo 3": "olmo3",
    "OLMoE": "olmoe",
    "Granite 3": "granite granitemoe",
    "Granite 4": "granitemoehybrid",
    "SmolLM3": "smollm3",
    "Command R": "cohere cohere2",
    "Falcon": "falcon falcon_h1 falcon_mamba",
    "MiniMax": "minimax minimax_m2",
    "Kimi Linear": "kimi_linear",
    "Nemotron": "nemotron nemotron_h",
    "LFM2": "lfm2 lfm2_moe",
    "Mamba": "mamba mamba2",
    "Jamba": "jamba",
    "EXAONE 4": "exaone4",
    "ERNIE 4.5": "ernie4_5 ernie4_5_moe",
    "Hunyuan": "hunyuan_v1_dense hunyuan_v1_moe",
    "Seed-OSS": "seed_oss",
    "dots.llm1": "dots1",
    "StableLM": "stablelm",
    "StarCoder2": "starcoder2",
    "GPT-2": "gpt2",
    "GPT-NeoX, Pythia": "gpt_neox",
    "GPT-J": "gptj",
    "OPT": "opt",
    "BLOOM": "bloom",
}
"""Types by the names under which people know them."""
FEATURES = {
    "tp2": ("tp_size", "two tensor parallel ranks"),
    "pp2": ("pp_size", "two pipeline stages"),
    "speculation": ("speculative_config", "speculation"),
    "embeddings": ("/v1/embeddings", "embeddings"),
    "int8": ("quantization", "`quantization: int8`"),
    "bfloat16": ("dtype", "`dtype: bfloat16`"),
}
"""By the name of `TriedType`'s field: the key that asks for it, and its words."""
STATES = {
    "native": "yes, Manta's own code",
    "transformers": "yes, the code of transformers",
    "refused": "no, refused",
    "wrong": "no, its tokens differ",
}
TEXT = """\
# Models

<!-- Written by scripts/models_page.py. -->

Manta serves Llama, Mistral, Qwen2 and Qwen3 with its own code. Any other text model that
transformers knows runs on the code of transformers, over Manta's pages, batches and kernels. What
can't be served is refused with one sentence when the server starts.

transformers {version} knows {total} types of text model (`model_type` in `config.json`). A tiny
model with random weights was made of each:

| result | types |
|---|---|
| runs on Manta's own code | {native} |
| runs on the code of transformers | {transformers} |
| refused | {refused} |
| other tokens than transformers | {wrong} |

"Runs" means: five prompts give the tokens that transformers generates greedily, and
log-probabilities within 0.0001 of its own, in float32 on CPU. This holds for whole and chunked
prompts, for steps that mix prompts and decodes, from the prefix cache, after retractions, and with
pages of 1 and 16 tokens. `make test-models` shows it again. It fails if a type gives other tokens,
or if one is refused that ran before. Real checkpoints of these types weren't tried{exception}.

## Well-known families

| family | type | served | why not |
|---|---|---|---|
{families}

## Why types are refused

| reason | types |
|---|---|
{reasons}

## What the types that run can do

{features}

Each was compared with transformers in the same way. Drafts were right and wrong by turns.
Embeddings are the hidden states behind the final norm. int8 weights gave the log-probabilities of
weights that are rounded so, bfloat16 those of float32 but for rounding. Weights that tensor
parallel ranks don't divide each of them has whole. What a type can't do the start refuses:

| | reason | types |
|---|---|---|
{lacking}

## A model of your own

```bash
manta check FOLDER
```

prints whose code computes the model, whether its type is one of those below, and what it can't be
divided by. Nothing is started. A folder that is refused ends the command with the reason.
`manta serve` prints the same line.

A type that is not in the table needs no change of Manta if the installed transformers knows it. It
is looked through when the server starts, and tried when its weights are loaded. For `engine.LLM` on
one device it is enough to register the classes with transformers in the same process
(`AutoConfig.register`, `AutoModelForCausalLM.register`). Code that a checkpoint brings with it
(`auto_map`) is never run.

`model_impl: transformers` takes the code of transformers for the types that Manta has code for,
too. After an update of transformers, `make test-models WRITE=1` tries all types and writes this
page.

## All types

{columns}; no: the start refuses it.

| type | class | served | {names} | remark |
|---|---|---|{line}---|
{rows}
"""


def render(tried: TriedTypes) -> str:
    """The page."""
    by_type = {one.type: one for one in tried.types}
    counts = {state: sum(one.state == state for one in tried.types) for state in STATES}
    forward = [f"`{one.type}`" for one in tried.types if one.reference == "forward"]
    other = (
        f".\nFor {', '.join(forward)} the tokens are those of the model's forward without a cache: "
        "its `generate` gives others"
    )
    return TEXT.format(
        version=tried.transformers,
        total=len(tried.types),
        **counts,
        exception=other if forward else "",
        families="\n".join(
            _row(family if number == 0 else "", f"`{kind}`", STATES[one.state], one.sentence)
            for family, kinds in FAMILIES.items()
            for number, kind in enumerate(kinds.split())
            if (one := by_type.get(kind)) is not None
        ),
        reasons="\n".join(
            _row(*pair)
            for pair in _reasons((one, one.sentence) for one in tried.types if not one.runs)
        ),
        features="\n".join(
            f"- {words}: {sum(getattr(one, name) == '' for one in tried.types)} types"
            for name, (_, words) in FEATURES.items()
        ),
        lacking="\n".join(
            _row(f"`{key}`", *pair)
            for name, (key, _) in FEATURES.items()
            for pair in _reasons((one, getattr(one, name)) for one in tried.types)
        ),
        columns=", ".join(f"`{name}`: {words}" for name, (_, words) in FEATURES.items()),
        names=" | ".join(FEATURES),
        line="---|" * len(FEATURES),
        rows="\n".join(
            _row(
                f"`{one.type}`",
                one.class_name,
                STATES[one.state],
                *(_word(getattr(one, name)) for name in FEATURES),
                one.sentence,
            )
            for one in tried.types
        ),
    )


def _reasons(refusals: Iterable[tuple[TriedType, str | None]]) -> list[tuple[str, str]]:
    """Sentences without the class of the model, and the types that have them; most types first."""
    groups: dict[str, list[str]] = defaultdict(list)
    for one, sentence in refusals:
        if sentence:
            reason = sentence.replace(one.class_name, "the model").replace("a the", "the")
            groups[reason].append(f"`{one.type}`")
    ordered = sorted(groups.items(), key=lambda pair: (-len(pair[1]), pair[0]))
    return [(reason, f"{len(kinds)}: {', '.join(kinds)}") for reason, kinds in ordered]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _word(refusal: str | None) -> str:
    return {None: "", "": "yes"}.get(refusal, "no")


if __name__ == "__main__":
    PAGE.write_text(render(read_tried_types()))
