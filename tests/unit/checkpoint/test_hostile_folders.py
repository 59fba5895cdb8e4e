"""Folders that are made to do harm, or broken, of models that transformers' code computes: each is
refused in one sentence, and nothing of theirs is run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deploy.start.preflight import check_weights
from engine.checkpoint.model_config import ModelConfig
from engine.errors import ConfigError
from engine.models import recording
from tests.support.models import make_model
from tests.support.step_driver import make_runner

MEMORY_BYTES = 64 << 20
"""By which a process may grow when it reads a configuration."""
INDEX = "model.safetensors.index.json"
ABSENT = "(absent)"


@pytest.fixture
def in_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.checkpoint.model_config.read_layout", recording.record)
        yield


@pytest.fixture
def folder(tmp_path: Path, in_process: None) -> Path:
    """A Granite in several files, for a test to spoil."""
    return make_model(
        tmp_path / "granite", "GraniteForCausalLM", num_hidden_layers=2, max_shard_size="20KB"
    )


def change(folder: Path, name: str = "config.json", **keys: Any) -> None:
    values = json.loads((folder / name).read_text()) | keys
    values = {key: value for key, value in values.items() if value != ABSENT}
    (folder / name).write_text(json.dumps(values))


def refusal(read: Callable[[Path], object], folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder)
    sentence = str(caught.value)
    assert "Traceback" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"num_hidden_layers": 10**9}, "names 1000000000 layers; 1 to 2000 are allowed"),
        ({"num_hidden_layers": 0}, "names 0 layers"),
        ({"num_hidden_layers": -1}, "names -1 layers"),
        ({"num_hidden_layers": [4]}, r"names \[4\] layers"),
        ({"num_hidden_layers": None}, "names None layers"),
        ({"hidden_size": 10**12}, "can't build the model"),
        ({"hidden_size": 10**30}, "can't build the model"),
        ({"hidden_size": None}, "'hidden_size' expected int"),
        ({"vocab_size": "many"}, "'vocab_size' expected int"),
        ({"vocab_size": -1}, "can't build the model"),
        ({"num_attention_heads": 0}, "can't build the model"),
        ({"max_position_embeddings": -5}, "names -5 positions; 1 or more are needed"),
        ({"rope_parameters": "none"}, "'rope_parameters' with value 'none'"),
        ({"rope_parameters": {"rope_type": "unheard of"}}, "can't build the model"),
        ({"eos_token_id": "last"}, "'eos_token_id' with value 'last'"),
        ({"dtype": "float99"}, "can't read"),
        ({"dtype": 7}, "can't build the model"),
        ({"model_type": ABSENT}, "architecture GraniteForCausalLM .* is not supported"),
        ({"model_type": ["granite"]}, "is not supported"),
        ({"model_type": "gemma3", "text_config": 7}, "'text_config' with value 7"),
        (
            {"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}},
            "names 1000000000 layers",
        ),
    ],
)
def test_configurations(folder: Path, keys: dict[str, Any], says: str) -> None:
    change(folder, **keys)
    sentence = refusal(ModelConfig.from_pretrained, folder)
    with pytest.raises(ConfigError, match=says):
        raise ConfigError(sentence)


def test_a_configuration_that_is_no_object(folder: Path) -> None:
    for text in ("[]", "7", "null", "{", '"granite"', "\xff"):
        (folder / "config.json").write_bytes(text.encode("latin-1"))
        assert "config.json" in refusal(ModelConfig.from_pretrained, folder)
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(ModelConfig.from_pretrained, folder)


@pytest.mark.parametrize(
    "keys",
    [
        {"hidden_size": 1 << 20, "intermediate_size": 1 << 22},
        {"vocab_size": 10**12},
        {"max_position_embeddings": 10**12},
        {"model_type": "olmoe", "num_experts": 10**9},
    ],
)
def test_sizes_without_bounds_take_no_memory(folder: Path, keys: dict[str, Any]) -> None:
    """They are for the check of memory to refuse, which needs the number of parameters."""
    change(folder, **keys)
    before = peak_bytes()
    layout = ModelConfig.from_pretrained(folder).layout
    assert layout is not None
    numbers = layout.rank_parameters(1, range(layout.num_layers))
    assert numbers > 10**12 or "max_position_embeddings" in keys
    assert peak_bytes() - before < MEMORY_BYTES


def peak_bytes() -> int:
    """The most memory that this process has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


OWN_CODE = """
from pathlib import Path
Path({marker!r}).write_text("run")
from transformers import GraniteConfig as OwnConfig, GraniteForCausalLM as OwnModel
"""


@pytest.mark.parametrize("kind", ["granite", "own"])
@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_code_of_a_folder_is_never_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, impl: str
) -> None:
    marker = tmp_path / "marker"
    (folder / "own.py").write_text(OWN_CODE.format(marker=str(marker)))
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    change(folder, model_type=kind, auto_map=names)
    monkeypatch.chdir(folder)  # where a module would be found first
    if kind == "own":
        sentence = refusal(lambda path: ModelConfig.from_pretrained(path, impl), folder)
        assert "'auto_map'), which Manta never does" in sentence
    else:
        make_runner(folder, model_impl=impl)
    assert not marker.exists()


def test_the_code_would_run_if_it_were_allowed(folder: Path, tmp_path: Path) -> None:
    """What the test above looks for does happen elsewhere."""
    marker = tmp_path / "marker"
    exec(OWN_CODE.format(marker=str(marker)), {})
    assert marker.read_text() == "run"


def shards(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    assert len(found) > 2
    return found


def test_a_tensor_in_two_files(folder: Path) -> None:
    first, second, *_ = shards(folder)
    mine = load_file(first)
    save_file(mine | load_file(second), second)
    name = min(mine)
    sentence = refusal(check_weights, folder)
    assert f"in both {first.name} and {second.name}" in sentence and name.split(".")[0] in sentence


def test_an_index_that_names_a_file_that_is_not_there(folder: Path) -> None:
    shards(folder)[1].unlink()
    assert "which model.safetensors.index.json names" in refusal(check_weights, folder)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "", ".", 7, None])
def test_an_index_that_leads_out_of_the_folder(folder: Path, name: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    tensor = min(index["weight_map"])
    change(folder, INDEX, weight_map=index["weight_map"] | {tensor: name})
    assert "isn't plainly in its folder" in refusal(check_weights, folder)


@pytest.mark.parametrize("weight_map", [ABSENT, {}, [], 7])
def test_an_index_without_files(folder: Path, weight_map: Any) -> None:
    change(folder, INDEX, weight_map=weight_map)
    assert INDEX in refusal(check_weights, folder)


def spoil(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Edit the file that holds a projection of the first layer."""
    for file in shards(folder):
        tensors = load_file(file)
        if "model.layers.0.mlp.up_proj.weight" in tensors:
            edit(tensors)
            save_file(tensors, file, {"format": "pt"})
            return
    raise AssertionError


def test_a_tensor_of_another_shape(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    spoil(folder, lambda tensors: tensors.update({name: torch.zeros(3, 5)}))
    sentence = refusal(make_runner, folder)
    assert "up_proj" in sentence and ("[3, 5]" in sentence or "3, 5" in sentence)


def test_a_tensor_that_is_missing(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    spoil(folder, lambda tensors: tensors.update({"other": tensors.pop(name)}))
    assert "up_proj" in refusal(make_runner, folder)
    assert "up_proj" in refusal(check_weights, folder)


def test_a_file_that_is_cut(folder: Path) -> None:
    file = shards(folder)[1]
    file.write_bytes(file.read_bytes()[:100])
    assert file.name in refusal(check_weights, folder)
