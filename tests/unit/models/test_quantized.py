"""Quantized checkpoints that can't be read are refused by name, whichever way they can be told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deploy.start.preflight import check_weights
from engine.checkpoint.model_config import ModelConfig
from engine.errors import ConfigError
from engine.layers.weights import SafetensorsSource
from engine.models.load_progress import LINE_PERIOD_S, LoadProgress
from tests.support.models import make_model

CPU = torch.device("cpu")
NAME = "model.layers.0.mlp.up_proj.weight"
SHAPE = (48, 32)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("plain") / "model", "LlamaForCausalLM")


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    for file in plain.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def replace(folder: Path, **tensors: torch.Tensor) -> None:
    """Put these in the place of the weight's tensors, keys are what follows "up_proj."."""
    weights = load_file(folder / "model.safetensors")
    del weights[NAME]
    beside = NAME.removesuffix("weight")
    weights.update({beside + key.replace("__", "."): value for key, value in tensors.items()})
    save_file(weights, folder / "model.safetensors")


COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 128}}


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ({"quant_method": "fp8", "fmt": "e5m2"}, "FP8 (e5m2), with fmt: e5m2"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ (4 bits), with version: gemv"),
        ({"quant_method": "awq", "bits": 8, "version": "gemm"}, "with bits: 8"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ (3 bits), with bits: 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*a": {"bits": 8}}}, "their own"),
        ({**COMPRESSED, "config_groups": {"a": {**GROUP, "format": "marlin-24"}}}, "marlin-24"),
        ({**COMPRESSED, "quantization_status": "frozen"}, "frozen"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (
            {
                **COMPRESSED,
                "config_groups": {"a": {**GROUP, "weights": {"num_bits": 3, "type": "int"}}},
            },
            "whose a has 3 bits (int, pack-quantized)",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
        ({"quant_method": "hqq"}, "HQQ"),
        ({"quant_method": "auto-round", "bits": 4}, "AutoRound (4 bits)"),
        ({"quant_method": "of_tomorrow"}, "'of_tomorrow'"),
        ({"bits": 4}, "unknown method"),
    ],
)
def test_config_names_the_method(folder: Path, described: dict[str, Any], words: str) -> None:
    """Of what can't be read."""
    for key in ("quantization_config", "compression_config"):
        config = json.loads((folder / "config.json").read_text())
        changed = json.dumps({**config, key: described})
        (folder / "config.json").write_text(changed)
        with pytest.raises(ConfigError) as caught:
            ModelConfig.from_pretrained(folder)
        for part in (words, "not supported yet", "bfloat16"):
            assert part in str(caught.value), str(caught.value)
        (folder / "config.json").write_text(json.dumps(config))
    assert ModelConfig.from_pretrained(folder).quantized is None


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": -2}, "group_size must be a whole"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size must be a whole"),
        ({"quant_method": "gptq"}, "lacks the key 'bits'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size must be two"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size must be two"),
        ({**COMPRESSED, "config_groups": [GROUP]}, "config_groups must be a mapping"),
        ({**COMPRESSED, "config_groups": {"a": {**GROUP, "targets": ["re:("]}}}, "regular expr"),
        ({**COMPRESSED, "config_groups": {"a": {**GROUP, "targets": "Linear"}}}, "list of names"),
    ],
)
def test_odd_descriptions_are_named(folder: Path, described: dict[str, Any], words: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
    for read in (ModelConfig.from_pretrained, check_weights):
        with pytest.raises(ConfigError, match=words):
            read(folder)


@pytest.mark.parametrize(
    ("described", "title"),
    [
        (
            {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
            "FP8 (blocks of 128 x 128, e4m3)",
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "AWQ (4 bits)"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "GPTQ (8 bits)"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            "bitsandbytes (nf4, 4 bits)",
        ),
        ({"quant_method": "compressed_tensors"}, "compressed-tensors"),
        ({"quant_method": "fbgemm_fp8"}, "FBGEMM FP8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt (NVFP4)"),
        ({"quant_method": "mxfp4"}, "MXFP4"),
    ],
)
def test_what_can_be_read_has_a_title(folder: Path, described: dict[str, Any], title: str) -> None:
    """Also where the description is that of the text model in a larger one."""
    config = json.loads((folder / "config.json").read_text())
    own = {"quantization_config": described}
    for more in (own, {"text_config": own}):
        (folder / "config.json").write_text(json.dumps({**config, **more}))
        quantized = ModelConfig.from_pretrained(folder).quantized
        assert quantized is not None and quantized.title == title


def test_modelopt_has_a_file_of_its_own(folder: Path) -> None:
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "INT4_AWQ"}}')
    with pytest.raises(
        ConfigError, match=r"ModelOpt \(INT4_AWQ\), whose algorithm is INT4_AWQ: not supp"
    ):
        ModelConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"weight": torch.zeros(SHAPE).to(torch.float8_e4m3fn)}, "quantized type float8_e4m3fn"),
        (
            {
                "weight": torch.zeros(SHAPE).to(torch.float8_e4m3fn),
                "weight_scale_inv": torch.ones(1, 1),
            },
            "float8_e4m3fn (FP8 in blocks)",
        ),
        (
            {"weight": torch.zeros(SHAPE, dtype=torch.int8), "weight_scale": torch.ones(48, 1)},
            "int8 (FP8 or compressed-tensors)",
        ),
        (
            {"weight": torch.zeros(24 * 32, 1, dtype=torch.uint8), "weight__absmax": torch.ones(2)},
            "uint8 (bitsandbytes)",
        ),
        ({"qweight": torch.zeros(4, 48, dtype=torch.int32)}, "(GPTQ or AWQ)"),
        ({"weight_packed": torch.zeros(48, 4, dtype=torch.int32)}, "compressed-tensors, packed"),
    ],
)
def test_tensors_give_it_away(folder: Path, tensors: dict[str, torch.Tensor], words: str) -> None:
    """Also where config.json says nothing: a float8 tensor would be read without its scale."""
    replace(folder, **tensors)
    for read in (
        lambda: SafetensorsSource(folder, torch.float32, CPU),
        lambda: check_weights(folder),
    ):
        with pytest.raises(ConfigError) as caught:
            read()
        for part in (words, NAME, "config.json doesn't describe", "not supported yet", "bfloat16"):
            assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_types_are_read(folder: Path, dtype: torch.dtype) -> None:
    replace(folder, weight=torch.full(SHAPE, 0.5).to(dtype))
    part = SafetensorsSource(folder, torch.bfloat16, CPU).get(NAME, SHAPE, start=8, count=4)
    assert part.dtype == torch.bfloat16 and torch.equal(part, torch.full((4, 32), 0.5).bfloat16())


def test_files_are_opened_for_the_device(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors then moves each slice itself: no copy of the model on the host."""
    opened = []

    def fake_open(path: str, framework: str, device: str) -> Any:
        opened.append((Path(path).name, framework, device))
        return type("File", (), {"keys": lambda self: []})()

    monkeypatch.setattr("engine.layers.weights.safe_open", fake_open)
    SafetensorsSource(plain, torch.bfloat16, torch.device("cuda"))
    assert opened == [("model.safetensors", "pt", "cuda")]


class Terminal:
    """stderr that says whether it is one."""

    def __init__(self, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self.text = ""

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_a_bar_or_lines(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stderr, now = Terminal(is_terminal), 100.0
    monkeypatch.setattr("sys.stderr", stderr)
    progress = LoadProgress(clock=lambda: now)
    with caplog.at_level("INFO", "engine.models.load_progress"):
        for done in range(1, 9):
            now += LINE_PERIOD_S / 2
            progress(done, 8)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[-1] == f"weights loaded: 8 layers in {4 * LINE_PERIOD_S:.1f} s"
    assert ("loading weights" in stderr.text) == is_terminal
    assert lines[:-1] == (
        [] if is_terminal else [f"loading weights: {n} of 8 layers" for n in (2, 4, 6)]
    )
