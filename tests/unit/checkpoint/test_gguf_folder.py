"""The model folder that is made of a GGUF file: once, whole, and anew if the file is another."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deploy.start import preflight
from deploy.start.config import AppConfig
from deploy.start.target import load_target
from engine.checkpoint.folder import resolve_model_path
from engine.checkpoint.gguf import hub
from engine.checkpoint.gguf.checkpoint import read_checkpoint
from engine.checkpoint.gguf.folder import folder_contents, is_gguf_folder, model_folder
from engine.checkpoint.gguf.header import read_header
from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.layers.gguf_source import GgufSource
from engine.tokenizer.tokenizer import Tokenizer
from tests.support.gguf_files import keep_folders_in, write_gguf
from tests.support.models import LLAMA3_ROPE, make_model
from tests.support.tiny_tokenizers import write_byte_level

SIZES: dict[str, Any] = {"num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 430}
KEYS = {"tokenizer.ggml.pre": "llama-bpe"}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def made(tmp_path: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        keep_folders_in(tmp_path / "cache", patch)
        yield tmp_path / "cache" / "gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.Q8_0.gguf", **KEYS)


def write(file: Path, arch: str = "LlamaForCausalLM", seed: int = 0, **metadata: Any) -> Path:
    folder = file.parent / f"of {file.stem}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(file.with_suffix(".reference"), ignore_errors=True)
    model = make_model(folder / "model", arch, seed=seed, **SIZES)
    write_gguf(file, model, tokenizer=write_byte_level(folder / "tokenizer"), metadata=metadata)
    return file


def test_the_folder_is_that_of_a_model(file: Path, made: Path) -> None:
    folder = resolve_model_path(str(file))
    assert folder.parent == made and folder.name.startswith("tiny.Q8_0-")
    assert is_gguf_folder(folder)
    model = ModelConfig.from_pretrained(folder)
    assert (model.architecture, model.num_layers, model.vocab_size) == ("LlamaForCausalLM", 1, 430)
    assert model.eos_token_ids == (1,) and model.rms_norm_eps == 1e-5
    tokenizer = Tokenizer.from_pretrained(str(folder))
    text = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert "<|user|>user\nhi" in str(text)
    assert resolve_model_path(str(file)) == folder
    assert os.listdir(made) == [folder.name]
    preflight.check_weights(folder)


def test_a_replaced_file_is_another_model(file: Path) -> None:
    first = resolve_model_path(str(file))
    source = GgufSource(first, torch.float32, CPU)
    name = "model.layers.0.mlp.up_proj.weight"
    before = source.read(name)
    new = write(file.with_name("new.gguf"), seed=1, **KEYS)
    new.rename(file)
    assert torch.equal(source.read(name), before)  # what runs goes on with the old one
    with pytest.raises(ConfigError, match="was replaced meanwhile; start again"):
        GgufSource(first, torch.float32, CPU)
    with pytest.raises(ConfigError, match="was replaced meanwhile"):
        preflight.check_weights(first)
    second = resolve_model_path(str(file))
    assert second != first
    assert not torch.equal(GgufSource(second, torch.float32, CPU).read(name), before)


def make_in(cache: Path, file: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        keep_folders_in(cache, patch)
        model_folder(file)


def test_processes_at_once_make_one_folder(file: Path, tmp_path: Path, made: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=make_in, args=(tmp_path / "cache", file)) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert os.listdir(made) == [model_folder(file).name]


def test_no_place_for_the_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = file.with_name("blocked")
    blocked.write_text("a file")
    monkeypatch.setattr("engine.checkpoint.gguf.folder.cache_folder", lambda: blocked)
    with pytest.raises(ConfigError, match=r"can't be written.*set MANTA_CACHE_DIR"):
        resolve_model_path(str(file))

    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr("engine.checkpoint.gguf.folder.cache_folder", no_home)
    with pytest.raises(ConfigError, match=r"there is no home folder.*set MANTA_CACHE_DIR"):
        resolve_model_path(str(file))


def test_another_machine_makes_its_own(file: Path) -> None:
    """A worker gets the path of a folder that another machine has."""
    resolved = EngineConfig(model=str(file)).resolve()
    assert resolved.here() is resolved
    shutil.rmtree(resolved.model.path)
    again = resolved.here()
    assert again.model.path.is_dir() and again == resolved


def test_commands_take_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    (app,) = load_target(file.name, ["device=cpu"]).applications
    assert isinstance(app, AppConfig)
    assert app.engine.model == str(file) and app.model_name == "tiny.Q8_0"
    with pytest.raises(ConfigError, match="revision is only for models of the hub"):
        load_target(file.name, ["revision=main"])
    with pytest.raises(ConfigError, match=r"holds GGUF files; set `model` to the one to serve"):
        resolve = EngineConfig(model=str(file.parent))
        resolve.resolve()


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"general.architecture": "rwkv7"}, "architecture 'rwkv7', which Manta can't read"),
        ({"llama.embedding_length": None}, "lacks the key 'llama.embedding_length'"),
        ({"llama.block_count": 2**31}, "llama.block_count must be the number of its layers"),
        ({"llama.rope.dimension_count": 4}, "4 of 8 numbers of a head are rotated"),
        ({"llama.attention.value_length": 4}, "keys of 8 numbers and values of 4"),
        ({"llama.rope.scaling.type": "su"}, "scales positions in the way 'su'"),
        ({"llama.attention.head_count": 3}, "3 heads don't divide"),
        ({"tokenizer.ggml.model": "bert"}, "a tokenizer of the kind 'bert'"),
        ({"llama.rope.freq_base": float("inf")}, "is damaged: Out of range float"),
        ({"general.sampling.temp": float("nan")}, "is damaged: Out of range float"),
        ({"general.sampling.top_k": "40"}, "general.sampling.top_k must be a number, not '40'"),
    ],
)
def test_what_is_refused(metadata: dict[str, Any], says: str, tmp_path: Path, made: Path) -> None:
    file = write(tmp_path / "model.gguf", **{**KEYS, **metadata})
    with pytest.raises(ConfigError, match=says):
        resolve_model_path(str(file))
    assert not made.exists()


SAMPLING = {"temp": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "penalty_repeat": 1.1}


def test_its_sampling_is_the_default(tmp_path: Path) -> None:
    keys = {f"general.sampling.{key}": value for key, value in SAMPLING.items()}
    file = write(tmp_path / "model.gguf", **KEYS, **keys)
    model = ModelConfig.from_pretrained(resolve_model_path(str(file)))
    found = EngineConfig(model=str(file)).sampling_defaults(model)
    assert list(found.values()) == list(SAMPLING.values())
    assert list(found) == ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]
    assert not EngineConfig(model=str(file), generation_config="none").sampling_defaults(model)


def test_sampling_out_of_range(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", **KEYS, **{"general.sampling.top_p": 1.5})
    model = ModelConfig.from_pretrained(resolve_model_path(str(file)))
    with pytest.raises(ConfigError, match=r"top_p.*set generation_config: none"):
        EngineConfig(model=str(file)).sampling_defaults(model)


@pytest.mark.parametrize(
    ("arch", "changes", "keys", "says"),
    [
        ("Qwen3ForCausalLM", {"head_dim": 16}, {}, "'blk.0.attn_k_norm.weight', which Manta"),
        ("LlamaForCausalLM", {"attention_bias": True}, {}, "'blk.0.attn_output.bias', which Manta"),
        ("LlamaForCausalLM", {"num_hidden_layers": 2}, {"qwen2.block_count": 1}, "'blk.1."),
        ("LlamaForCausalLM", {}, {"qwen2.logit_scale": 0.5}, "the key 'qwen2.logit_scale'"),
    ],
)
def test_what_the_architecture_has_not_is_refused(
    arch: str, changes: dict[str, Any], keys: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """Nothing of a file is passed over: Qwen2 has no such tensors."""
    model = make_model(tmp_path / "model", arch, **{**SIZES, **changes})
    own = "qwen3" if arch.startswith("Qwen3") else "llama"
    write_gguf(tmp_path / "plain.gguf", model)
    found = read_header(tmp_path / "plain.gguf").metadata.items()
    same = {f"qwen2.{k.removeprefix(own + '.')}": v for k, v in found if k.startswith(f"{own}.")}
    metadata = {**same, "general.architecture": "qwen2", **keys}
    write_gguf(tmp_path / "model.gguf", model, metadata=metadata)
    with pytest.raises(ConfigError, match=says):
        resolve_model_path(str(tmp_path / "model.gguf"))


ODD: tuple[Any, ...] = (
    None,
    [],
    ["x", "y"],
    [["x"]],
    np.array([], np.int32),
    np.array([1, 2]),
    np.array([0.5, np.nan], np.float32),
    "",
    "x",
    True,
    -1,
    0,
    1,
    3,
    2**32 - 1,
    2**64 - 1,
    0.0,
    -1.5,
    1e300,
    float("inf"),
    float("nan"),
)
"""Values that a key may have instead of its own."""


@pytest.mark.parametrize("arch", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM"])
def test_any_value_of_any_key_is_read_or_refused(arch: str, tmp_path: Path) -> None:
    checkpoint = read_checkpoint((write(tmp_path / "model.gguf", arch, **KEYS),))
    given = checkpoint.metadata.given
    name = given["general.architecture"]
    more = ("rope.scaling.type", "rope.scaling.factor", "rope.dimension_count", "logit_scale")
    keys = [*given, *(f"{name}.{key}" for key in more), f"{name}.expert_count"]
    keys += [f"{name}.rope.scaling.original_context_length", f"{name}.attention.sliding_window"]
    keys += [f"{name}.attention.causal", "tokenizer.ggml.add_bos_token", "split.count"]
    refused = 0
    for key in keys:
        for value in ODD:
            metadata = checkpoint.metadata._replace(given={**given, key: value})
            try:
                contents = folder_contents(checkpoint._replace(metadata=metadata))
            except ConfigError as error:
                assert "model.gguf" in str(error) and len(str(error)) < 1000
                refused += 1
            else:
                assert set(contents) > {"config.json", "tokenizer.json"}
    assert refused > 100


def test_llama3_scaling_is_recognized(tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 256, "num_attention_heads": 4}
    for factor, context in ((8.0, 8192), (32.0, 8192), (4.0, 4096)):
        rope = LLAMA3_ROPE | {"factor": factor, "original_max_position_embeddings": context}
        folder = tmp_path / str(factor)
        model = make_model(
            folder / "model",
            "LlamaForCausalLM",
            rope_parameters=rope | {"rope_theta": 500000.0},
            **sizes,
        )
        write_gguf(folder / "model.gguf", model)
        found = ModelConfig.from_pretrained(resolve_model_path(str(folder / "model.gguf"))).rope
        assert found.rope_type == "llama3" and found.theta == 500000.0
        assert found.params["factor"] == factor
        assert found.params["original_max_position_embeddings"] == context


def test_other_scaling_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.support.gguf_files.llama3_factors", lambda *_: np.linspace(1.0, 3.0, 4)
    )
    model = make_model(tmp_path / "model", "LlamaForCausalLM", rope_parameters=LLAMA3_ROPE, **SIZES)
    write_gguf(tmp_path / "model.gguf", model)
    with pytest.raises(ConfigError, match="aren't those of Llama 3"):
        resolve_model_path(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("files", "tag", "found"),
    [
        (["a-Q4_K_M.gguf", "a-Q4_K_S.gguf", "a-Q8_0.gguf"], "Q4_K_M", "a-Q4_K_M.gguf"),
        (["a.q8_0.gguf", "mmproj-Q8_0.gguf"], "Q8_0", "a.q8_0.gguf"),
        (["a-UD-Q4_K_XL.gguf"], "UD-Q4_K_XL", "a-UD-Q4_K_XL.gguf"),
        (
            ["BF16/a-BF16-00001-of-00002.gguf", "BF16/a-BF16-00002-of-00002.gguf"],
            "BF16",
            "BF16/a-BF16-00001-of-00002.gguf",
        ),
    ],
)
def test_the_file_of_a_hub_name(files: list[str], tag: str, found: str, tmp_path: Path) -> None:
    from huggingface_hub.utils import filter_repo_objects

    fetched = set(filter_repo_objects(files, allow_patterns=hub.patterns(tag)))
    for name in fetched:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert hub.find_file(tmp_path, "owner/name", tag) == tmp_path / found


def test_hub_names(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, list[str]]] = []

    def download(model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((model, revision, allow_patterns))
        return str(file.parent)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model_path("owner/name:Q8_0", "abc") == model_folder(file)
    assert [(model, revision) for model, revision, _ in asked] == [("owner/name", "abc")]
    assert all(pattern.endswith(".gguf") for pattern in asked[0][2])
    with pytest.raises(ConfigError, match="has no GGUF file of the type Q4_K_M"):
        resolve_model_path("owner/name:Q4_K_M")
    (file.parent / "other-Q8_0.gguf").touch()
    with pytest.raises(ConfigError, match="several files of the type Q8_0"):
        resolve_model_path("owner/name:Q8_0")
