"""Folders as other people have them: transformers' tokens, or a refusal in one sentence."""

from __future__ import annotations

import codecs
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from deploy.start.preflight import check_weights
from engine import LLM, SamplingParams
from engine.errors import ConfigError
from tests.support.models import LLAMA3_ROPE, make_model

PROMPTS = [[5, 9, 100, 7, 31, 8], [3, 77, 12]]
NUM_NEW = 16
LLAMA, MISTRAL, QWEN2, QWEN3 = (
    f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
)
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
UP = "model.layers.1.mlp.up_proj.weight"
SHARDED = {"max_shard_size": "40KB"}
ABSENT = "(absent)"
Edit = Callable[[Path], None]


class Odd(NamedTuple):
    """A folder made as `arch` with `made`, and what is odd about it."""

    name: str
    edit: Edit
    refusal: str = ""
    """What the one sentence says; "": the folder is served."""
    arch: str = LLAMA
    made: Mapping[str, Any] = MappingProxyType({})
    unread: bool = False
    """transformers can't read the folder: the tokens are those of the folder before the edit."""


def config(**changes: Any) -> Edit:
    return lambda folder: change_json(folder / "config.json", **changes)


def change_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_bytes()) if path.exists() else {}
    content = {k: v for k, v in (content | changes).items() if v != ABSENT}
    path.write_text(json.dumps(content))


def write(name: str, content: bytes) -> Edit:
    return lambda folder: (folder / name).write_bytes(content) and None


def generation(**values: Any) -> Edit:
    return write("generation_config.json", json.dumps(values).encode())


def bom(*names: str) -> Edit:
    def edit(folder: Path) -> None:
        for name in names:
            (folder / name).write_bytes(codecs.BOM_UTF8 + (folder / name).read_bytes())

    return edit


def tensors(change: Callable[[dict[str, torch.Tensor]], object], file: str = SINGLE) -> Edit:
    def edit(folder: Path) -> None:
        held = load_file(folder / file)
        change(held)
        save_file({k: v.contiguous() for k, v in held.items()}, folder / file, {"format": "pt"})

    return edit


def copy_with_noise(file: str) -> Edit:
    """The same tensors, from an earlier state of training."""

    def edit(folder: Path) -> None:
        held = {k: v + 0.3 * torch.randn_like(v) for k, v in load_file(folder / SINGLE).items()}
        save_file(held, folder / file, {"format": "pt"})

    return edit


def both(*edits: Edit) -> Edit:
    def edit(folder: Path) -> None:
        for one in edits:
            one(folder)

    return edit


def rename(old: str, new: str) -> Edit:
    return lambda folder: (folder / old).rename(folder / new) and None


def index(change: Callable[[dict[str, str]], object]) -> Edit:
    def edit(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        change(content["weight_map"])
        (folder / INDEX).write_text(json.dumps(content))

    return edit


def shard(folder: Path, number: int) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[number]


def wrong_file(weight_map: dict[str, str]) -> None:
    weight_map[UP] = next(file for file in weight_map.values() if file != weight_map[UP])


def stale_index(folder: Path) -> None:
    """A whole file beside the shards of another model, as after merging them."""
    shards = make_model(folder / "other", LLAMA, seed=5, **SHARDED)
    for path in shards.glob("model*"):
        path.rename(folder / path.name)
    shutil.rmtree(shards)


def in_hub_cache(folder: Path) -> None:
    """Files are links to blobs, as huggingface_hub's cache has them."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("..") / "blobs" / str(number))


def broken_link(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / SINGLE).symlink_to(folder / "gone")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def unlisted_shard(folder: Path) -> None:
    """A file that only looks like a shard."""
    held = load_file(shard(folder, 0))
    save_file({k: v * 3 for k, v in held.items()}, folder / "model-old.safetensors")


def twice_in_shards(folder: Path) -> None:
    first, second = shard(folder, 0), shard(folder, 1)
    name, tensor = next(iter(load_file(first).items()))
    tensors(lambda held: held.update({name: tensor * 2}), second.name)(folder)


def drop(*names: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda held: [held.pop(name) for name in names]


def other_head(held: dict[str, torch.Tensor]) -> None:
    held[HEAD] = held[EMBEDDING].flip(0)


def same_head(held: dict[str, torch.Tensor]) -> None:
    held[HEAD] = held[EMBEDDING].clone()


def only_head(held: dict[str, torch.Tensor]) -> None:
    held[HEAD] = held.pop(EMBEDDING)


def in_type(dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda held: held.update({k: v.to(dtype) for k, v in held.items()})


TIED = {"tie_word_embeddings": True}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
THETA = {"rope_theta": 500.0, "rope_type": "default"}
LINEAR = {"type": "linear", "factor": 2.0}
ODD = [
    # --- files
    Odd("an old copy beside the file", copy_with_noise("old.safetensors")),
    Odd("an old copy whose name comes later", copy_with_noise("model_old.safetensors")),
    Odd("a variant beside the file", copy_with_noise("model.fp16.safetensors")),
    Odd("another format beside the file", copy_with_noise("consolidated.safetensors")),
    Odd("a damaged file beside the file", write("a.safetensors", b"\0" * 64)),
    Odd("pickled weights beside the file", write("pytorch_model.bin", b"no weights")),
    Odd("a whole file and an index", stale_index),
    Odd("a file and a broken index", write(INDEX, b"{")),
    Odd("shards and a file that isn't listed", unlisted_shard, made=SHARDED),
    Odd("links into the hub's cache", in_hub_cache),
    Odd("links of shards", in_hub_cache, made=SHARDED),
    Odd("a link to nothing", broken_link, "is a link to nothing"),
    Odd("another name", rename(SINGLE, "weights.safetensors"), unread=True),
    Odd(
        "two files, neither of them named as usual",
        both(copy_with_noise("b.safetensors"), rename(SINGLE, "a.safetensors")),
        r"has the weight .* in both a\.safetensors and b\.safetensors",
    ),
    Odd("truncated", lambda folder: truncate(folder / SINGLE), "can't be read"),
    Odd("empty file", write(SINGLE, b""), "can't be read"),
    # --- index
    Odd(
        "index with the wrong file",
        index(wrong_file),
        rf"says that .* '{UP}', which is in",
        made=SHARDED,
    ),
    Odd(
        "index with a tensor that isn't there",
        index(lambda m: m.update({"model.x.weight": m[UP]})),
        r"'model\.x\.weight', which no file of the index has",
        made=SHARDED,
    ),
    Odd("index that lacks a tensor of its files", index(lambda m: m.pop(UP)), made=SHARDED),
    Odd(
        "index with a path upwards",
        index(lambda m: m.update({UP: "../a.safetensors"})),
        "isn't plainly in its folder",
        made=SHARDED,
    ),
    Odd(
        "index with an absolute path",
        index(lambda m: m.update({UP: "/a.safetensors"})),
        "isn't plainly in its folder",
        made=SHARDED,
    ),
    Odd(
        "index with a number",
        index(lambda m: m.update({UP: 7})),
        "isn't plainly in its folder",
        made=SHARDED,
    ),
    Odd("index without tensors", index(lambda m: m.clear()), "names no files", made=SHARDED),
    Odd("index without a map", write(INDEX, b"{}"), "can't be read", made=SHARDED),
    Odd("index with a list", write(INDEX, b'{"weight_map": []}'), "can't be read", made=SHARDED),
    Odd(
        "missing shard", lambda folder: shard(folder, 1).unlink(), "lacks model-00002", made=SHARDED
    ),
    Odd(
        "truncated shard", lambda folder: truncate(shard(folder, 1)), "can't be read", made=SHARDED
    ),
    Odd("a tensor in two shards", twice_in_shards, "in both", made=SHARDED),
    Odd("index with a BOM", bom(INDEX), made=SHARDED, unread=True),
    # --- tensors
    Odd("more tensors", tensors(lambda held: held.update({"extra.weight": torch.ones(3)}))),
    Odd(
        "frequencies of rotation",
        tensors(
            lambda held: held.update(
                {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
            )
        ),
    ),
    Odd("missing tensor", tensors(drop(UP)), rf"lacks the weight '{UP}'"),
    Odd("wrong shape", tensors(lambda held: held.update({UP: torch.ones(48, 31)})), r"\[48, 31\]"),
    Odd("transposed", tensors(lambda held: held.update({UP: held[UP].T})), r"\[32, 48\]"),
    Odd("vocabulary larger than config.json's", config(vocab_size=200), r"\[211, 32\]"),
    Odd("float64", tensors(in_type(torch.float64))),
    Odd("bfloat16", tensors(in_type(torch.bfloat16))),
    Odd("int32", tensors(lambda held: held.update({UP: held[UP].int()})), "int32"),
    Odd(
        "float8",
        tensors(lambda held: held.update({UP: held[UP].to(torch.float8_e4m3fn)})),
        "float8",
    ),
    # --- ties
    Odd("tied, and another head in the file", tensors(other_head), made=TIED),
    Odd("tied, and the same head in the file", tensors(same_head), made=TIED),
    Odd("tied, and only the head in the file", tensors(only_head), made=TIED),
    Odd("tied Qwen2, and another head", tensors(other_head), arch=QWEN2, made=TIED),
    Odd("tied Qwen3, and only the head", tensors(only_head), arch=QWEN3, made=TIED),
    Odd("tied by mistake", config(tie_word_embeddings=True)),
    Odd("untied without a head", tensors(drop(HEAD)), rf"lacks the weight '{HEAD}'"),
    Odd("tied by config.json without a word", config(tie_word_embeddings=ABSENT)),
    # --- keys of config.json
    Odd("no longest length", config(max_position_embeddings=ABSENT)),
    Odd("no longest length, Mistral", config(max_position_embeddings=ABSENT), arch=MISTRAL),
    Odd("no longest length, Qwen2", config(max_position_embeddings=ABSENT), arch=QWEN2),
    Odd("no longest length, Qwen3", config(max_position_embeddings=ABSENT), arch=QWEN3),
    Odd(
        "no longest length, llama3",
        config(max_position_embeddings=ABSENT),
        made={"rope_parameters": LLAMA3_ROPE},
    ),
    Odd("longest length null", config(max_position_embeddings=None), unread=True),
    Odd("epsilon absent", config(rms_norm_eps=ABSENT)),
    Odd("epsilon null", config(rms_norm_eps=None), made={"rms_norm_eps": 1e-6}, unread=True),
    Odd(
        "activation, biases and ties null",
        config(hidden_act=None, attention_bias=None, mlp_bias=None, tie_word_embeddings=None),
        unread=True,
    ),
    Odd("key/value heads null", config(num_key_value_heads=None), made={"num_key_value_heads": 4}),
    Odd(
        "key/value heads absent",
        config(num_key_value_heads=ABSENT),
        made={"num_key_value_heads": 4},
    ),
    Odd(
        "key/value heads absent, Mistral",
        config(num_key_value_heads=ABSENT),
        arch=MISTRAL,
        made={"num_attention_heads": 16, "num_key_value_heads": 8},
    ),
    Odd(
        "key/value heads absent, too many by default",
        config(num_key_value_heads=ABSENT),
        "don't divide",
        arch=QWEN2,
    ),
    Odd("head size null", config(head_dim=None)),
    Odd("head size absent, Qwen3", config(head_dim=ABSENT), arch=QWEN3, made={"head_dim": 128}),
    Odd("head size null, Qwen2", config(head_dim=None), arch=QWEN2, unread=True),
    Odd("unknown keys", config(pretraining_tp=4, use_cache=False, something={"a": 1})),
    Odd("BOM", bom("config.json", "generation_config.json"), unread=True),
    Odd("trailing comma", write("config.json", b'{"model_type": "llama",}'), "not valid JSON"),
    Odd("a list as config.json", write("config.json", b"[]"), "must hold a JSON object"),
    Odd(
        "a text for a size", config(hidden_size="thirty-two"), "hidden_size must be a whole number"
    ),
    Odd("a size of zero", config(num_hidden_layers=0), "num_hidden_layers must be"),
    Odd("a negative epsilon", config(rms_norm_eps=-1.0), "rms_norm_eps must be"),
    Odd("a text for a tie", config(tie_word_embeddings="yes"), "tie_word_embeddings must be"),
    Odd("biases of Mistral mean nothing", config(attention_bias=True, mlp_bias=True), arch=MISTRAL),
    Odd("MLP biases of Qwen3 mean nothing", config(mlp_bias=True), arch=QWEN3),
    Odd("another activation", config(hidden_act="gelu"), "hidden_act 'gelu'"),
    # --- types
    Odd("torch_dtype", config(dtype=ABSENT, torch_dtype="float32")),
    Odd("both spellings of the type", config(dtype="float32", torch_dtype="bfloat16")),
    Odd("torch.float32", config(dtype="torch.float32"), unread=True),
    Odd("no type", config(dtype=ABSENT)),
    Odd("a number for a type", config(dtype=16), "torch_dtype must be a text|dtype must be a text"),
    # --- architecture
    Odd("no architectures", config(architectures=ABSENT)),
    Odd("architectures null", config(architectures=None), arch=MISTRAL),
    Odd("architectures empty", config(architectures=[]), arch=QWEN3),
    Odd("a base model's name", config(architectures=["LlamaModel"])),
    Odd("the old name", config(architectures=["LLaMAForCausalLM"])),
    Odd("no model_type", config(model_type=ABSENT), unread=True),
    Odd("model_type of another", config(model_type="qwen2"), "don't belong together"),
    Odd("neither", config(model_type=ABSENT, architectures=ABSENT), "none named"),
    Odd("own code for what is built in", config(auto_map={"AutoModelForCausalLM": "modeling.Own"})),
    Odd("own code", config(auto_map={"AutoConfig": "a.B"}, model_type="own"), "auto_map"),
    Odd(
        "weights under another name",
        config(transformers_weights="a.safetensors"),
        "transformers_weights",
    ),
    # --- RoPE
    Odd("theta at the top", config(rope_parameters=ABSENT, rope_theta=500.0)),
    Odd("theta in both places", config(rope_parameters=THETA, rope_theta=77.0)),
    Odd(
        "theta at the top beside parameters",
        config(rope_parameters={"rope_type": "default"}, rope_theta=500.0),
    ),
    Odd("an integer as theta", config(rope_parameters=ABSENT, rope_theta=500)),
    Odd("parameters null", config(rope_parameters=None)),
    Odd("no RoPE at all", config(rope_parameters=ABSENT)),
    Odd("scaling null", config(rope_parameters=ABSENT, rope_scaling=None, rope_theta=500.0)),
    Odd("scaling by its old name", config(rope_parameters=ABSENT, rope_scaling=LINEAR)),
    Odd("scaling before parameters", config(rope_parameters=THETA, rope_scaling=LINEAR)),
    Odd(
        "linear without a factor",
        config(rope_parameters={"rope_type": "linear"}),
        "lacks the key 'factor'",
    ),
    Odd(
        "llama3 with the context at the top",
        config(original_max_position_embeddings=32),
        made={"rope_parameters": LLAMA3_ROPE},
    ),
    Odd(
        "llama3 without a context",
        config(
            rope_parameters={
                k: v for k, v in LLAMA3_ROPE.items() if k != "original_max_position_embeddings"
            }
        ),
    ),
    Odd("part of a head rotated", config(partial_rotary_factor=0.5), "partial_rotary_factor"),
    Odd(
        "RoPE of each kind of layer",
        config(rope_parameters={"full_attention": THETA}),
        "one mapping for all layers",
    ),
    Odd("yarn", config(rope_parameters={"rope_type": "yarn", "factor": 2.0}), "yarn"),
    # --- windows
    Odd("window null", config(sliding_window=None), arch=MISTRAL),
    Odd("window absent", config(sliding_window=ABSENT), arch=MISTRAL),
    Odd("a window of Llama", config(sliding_window=2), "sliding_window"),
    Odd("a window of Llama that holds all", config(sliding_window=512)),
    Odd("window that isn't used", config(sliding_window=2, use_sliding_window=False), arch=QWEN2),
    Odd("window by layers", config(**WINDOW, layer_types=ABSENT), arch=QWEN2),
    Odd(
        "window without a first layer",
        config(
            use_sliding_window=True, sliding_window=2, max_window_layers=ABSENT, layer_types=ABSENT
        ),
        arch=QWEN3,
    ),
    Odd(
        "too few kinds of layers",
        config(**WINDOW, layer_types=["full_attention"]),
        "layer_types must be",
        arch=QWEN2,
    ),
    # --- the end of an output
    Odd("no generation_config.json", lambda folder: (folder / "generation_config.json").unlink()),
    Odd(
        "generation_config.json is broken", write("generation_config.json", b"{"), "not valid JSON"
    ),
    Odd("ends as texts", generation(eos_token_id=["a"]), "eos_token_id must be"),
    Odd("ends as a fraction", config(eos_token_id=2.5), "eos_token_id must be"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Odd], Path]:
    """The folder before it is odd. Those of equal models are the same."""
    folders: dict[str, Path] = {}

    def make(odd: Odd) -> Path:
        key = f"{odd.arch} {dict(odd.made)}"
        if key not in folders:
            folders[key] = make_model(tmp_path_factory.mktemp("made"), odd.arch, **odd.made)
        return folders[key]

    return make


def transformers_tokens(folder: Path) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    outs = []
    for ids in PROMPTS:
        prompt = torch.tensor([ids])
        mask = torch.ones_like(prompt)
        with torch.inference_mode():
            out = model.generate(
                prompt, attention_mask=mask, do_sample=False, max_new_tokens=NUM_NEW
            )
        outs.append(out[0, len(ids) :].tolist())
    return outs


def our_tokens(folder: Path, pp_size: int = 1) -> list[list[int]]:
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "cpu_threads": 1}
    with LLM(str(folder), max_total_tokens=512, pp_size=pp_size, **settings) as llm:
        params = SamplingParams(max_tokens=NUM_NEW, temperature=0)
        results = llm.generate(PROMPTS, params, use_tqdm=False)
    return [result.outputs[0].token_ids for result in results]


def is_one_sentence(message: str) -> bool:
    return "\n" not in message and "Traceback" not in message and message.endswith((".", "?"))


@pytest.mark.parametrize("odd", ODD, ids=[odd.name for odd in ODD])
def test_odd_folders(odd: Odd, made: Callable[[Odd], Path], tmp_path: Path) -> None:
    plain = made(odd)
    folder = Path(shutil.copytree(plain, tmp_path / "model"))
    odd.edit(folder)
    if odd.refusal:
        with pytest.raises(ConfigError, match=odd.refusal) as refused:
            our_tokens(folder)
        assert is_one_sentence(str(refused.value))
        return
    check_weights(folder)
    assert our_tokens(folder) == transformers_tokens(plain if odd.unread else folder)


@pytest.mark.parametrize("where", ["config.json", "generation_config.json", "both", "null"])
@pytest.mark.parametrize("as_list", [False, True])
def test_the_end_of_an_output_is_transformers(tmp_path: Path, where: str, as_list: bool) -> None:
    folder = make_model(tmp_path / "model", LLAMA)
    tokens = transformers_tokens(folder)[0]
    first, second = (next(t for t in tokens[n:] if tokens.count(t) == 1) for n in (3, 6))
    ends: Any = [209, second] if as_list else second
    change_json(folder / "config.json", eos_token_id=first if where != "config.json" else ends)
    if where == "config.json":
        (folder / "generation_config.json").unlink()
    else:
        change_json(
            folder / "generation_config.json", eos_token_id=None if where == "null" else ends
        )
    assert our_tokens(folder) == transformers_tokens(folder)


def test_an_other_head_on_a_stage_of_its_own(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", LLAMA, **TIED)
    tensors(other_head)(folder)
    assert our_tokens(folder, pp_size=2) == transformers_tokens(folder)
