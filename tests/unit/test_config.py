"""Configuration: every refusal names the key and the remedy; the reference lists every key."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from huggingface_hub import errors

from deploy.launch import main
from deploy.options import AutoscalingOptions, ServerOptions
from deploy.start import cli
from deploy.start.config import AppConfig
from deploy.start.preflight import check_weights
from deploy.start.target import load_target
from engine.checkpoint.folder import resolve_model_path
from engine.config import MAX_MICRO_BATCHES, EngineConfig, load_config
from engine.device.distributed import MAX_PENDING_SENDS
from engine.errors import ConfigError
from engine.layers.weights import SafetensorsSource
from engine.other_names import OTHER_NAMES
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.worker.auto_config import make_worker_config

ROOT = Path(__file__).resolve().parents[2]
LLAMA = str(ROOT / "configs" / "llama.yaml")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"tp_sise": 2}, ["tp_sise", "did you mean 'tp_size'"]),
        ({"zzz": 1}, ["zzz", "docs/configuration.md"]),
        ({"tp_size": 3}, ["tp_size (3)", "8 attention heads"]),
        ({"tp_size": 0}, ["tp_size", "greater than or equal to 1"]),
        ({"pp_size": 5}, ["pp_size (5)", "4 layers"]),
        ({"page_size": "big"}, ["page_size", "big"]),
        ({"page_size": 0}, ["page_size"]),
        ({"chunked_prefill_size": 8}, ["chunked_prefill_size (8)", "page_size (16)"]),
        ({"max_model_len": 5000}, ["max_model_len (5000)", "4096"]),
        ({"max_total_tokens": 16}, ["max_total_tokens (16)"]),
        ({"max_total_tokens": 512, "max_model_len": 1024}, ["max_total_tokens (512)", "1024"]),
        ({"pp_async_depth": 1}, ["pp_async_depth", "pp_size > 1"]),
        (
            {"pp_size": 2, "pp_async_depth": 1, "enable_overlap": False},
            ["pp_async_depth", "enable_overlap: true"],
        ),
        ({"simulated": {"step_ms": 5}}, ["device: simulated"]),
        ({"pp_max_micro_batch_size": 4}, ["pp_max_micro_batch_size", "pp_size > 1"]),
        (
            {"pp_size": 2, "pp_async_depth": 2, "max_running_requests": 3},
            ["max_running_requests (3)", "micro-batches (4"],
        ),
        (
            {"enable_dynamic_chunking": True, "chunked_prefill_size": -1},
            ["enable_dynamic_chunking", "chunked_prefill_size (-1)", "two pages (32)"],
        ),
        (
            {"enable_dynamic_chunking": True, "chunked_prefill_size": 31},
            ["enable_dynamic_chunking", "chunked_prefill_size (31)", "switch it off"],
        ),
        ({"max_total_tokens": 2**31}, ["max_total_tokens", "1073741824"]),
        (
            {"chunked_prefill_size": -1, "max_prefill_tokens": 99, "max_model_len": 100},
            ["max_prefill_tokens (99)", "max_model_len (100)", "set chunked_prefill_size"],
        ),
        ({"enable_priority_preemption": True}, ["schedule_policy: priority"]),
        ({"schedule_policy": "sjf"}, ["schedule_policy", "lpm"]),
        ({"model": "models/nothing-here"}, ["models/nothing-here", "does not exist"]),
        ({"autoscaling": {"min_replicas": 3, "max_replicas": 2}}, ["max_replicas (2)"]),
        ({"autoscaling": {}, "num_replicas": 2}, ["either num_replicas or autoscaling"]),
        ({"num_replicas": 0}, ["num_replicas"]),
        ({"device": "tpu"}, ["device", "tpu"]),
        ({"attention_backend": "xformers"}, ["attention_backend", "flashinfer"]),
        ({"kv_cache_dtype": "int4"}, ["kv_cache_dtype", "fp8_e4m3"]),
        ({"quantization": "int3"}, ["quantization", "'auto', 'int8' or 'int4'"]),
        ({"quantization": "int8", "device": "cuda"}, ["quantization int8", "device: cpu"]),
        (
            {"activation_quantization": "int8", "device": "cuda"},
            ["activation_quantization int8", "device: cpu"],
        ),
        ({"quantization": "int8", "device": "simulated"}, ["device: cpu", "not simulated"]),
        (
            {"quantization": "int8", "attention_backend": "torch"},
            ["quantization int8", "attention_backend: auto or cpu", "not torch"],
        ),
    ],
)
def test_refusals_say_what_to_do(args: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        AppConfig.from_args(args)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def deep_model(folder: Path, num_layers: int) -> str:
    """The small model's configuration with more layers."""
    config = json.loads((ROOT / "models" / "manta-small" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
    return str(folder)


def test_more_micro_batches_than_stages_can_hand_on_are_refused(tmp_path: Path) -> None:
    model = deep_model(tmp_path, 32)
    most = EngineConfig(model=model, pp_size=8, pp_async_depth=8).resolve()
    assert most.engine.num_micro_batches == MAX_MICRO_BATCHES <= MAX_PENDING_SENDS
    with pytest.raises(ConfigError, match=r"pp_size \+ pp_async_depth \(17\).*lower one of them"):
        EngineConfig(model=model, pp_size=16, pp_async_depth=1).resolve()


def test_running_requests_are_limited_by_the_micro_batches(tmp_path: Path) -> None:
    resolved = EngineConfig(
        model=deep_model(tmp_path, 4),
        pp_size=2,
        pp_async_depth=1,
        pp_max_micro_batch_size=4,
        max_running_requests=100,
    ).resolve()
    config = SchedulerConfig(resolved, 65536)
    assert (config.max_rows, config.max_micro_batch_size) == (12, 4)


@pytest.mark.parametrize(("page_size", "longest"), [(16, 100), (256, 100), (1, 100)])
def test_the_default_kv_cache_holds_a_request_of_any_page_size(
    page_size: int, longest: int
) -> None:
    resolved = EngineConfig(
        device="cpu", page_size=page_size, max_model_len=longest, max_running_requests=1
    ).resolve()
    num_kv_tokens = make_worker_config(resolved).num_kv_tokens
    assert num_kv_tokens == -(-longest // page_size) * page_size
    assert SchedulerConfig(resolved, num_kv_tokens).max_model_len == longest


def test_a_kv_cache_below_one_request_is_refused() -> None:
    resolved = EngineConfig(max_model_len=100).resolve()
    with pytest.raises(ConfigError, match="raise max_total_tokens or lower max_model_len"):
        SchedulerConfig(resolved, 96)


def test_int8_weights_say_what_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = EngineConfig(quantization="int8", max_total_tokens=1024).resolve()
    odd = replace(resolved, model=replace(resolved.model, intermediate_size=1023))
    with monkeypatch.context() as patch:
        patch.setattr("engine.worker.auto_config.detect_device", lambda: "cuda")
        with pytest.raises(ConfigError, match="needs device: cpu, not cuda"):
            make_worker_config(resolved)
    monkeypatch.setattr("engine.worker.auto_config.detect_device", lambda: "cpu")
    with pytest.raises(ConfigError, match="has no kernels for this model's sizes"):
        make_worker_config(odd)
    monkeypatch.setattr("engine.native.library.load", lambda: None)
    monkeypatch.setattr("engine.native.library.reason", lambda: "there is no C++ compiler")
    with pytest.raises(ConfigError, match="needs the library of CPU kernels: there is no C"):
        make_worker_config(resolved)
    monkeypatch.setattr("engine.native.library.load", lambda: object())
    worker = make_worker_config(resolved)
    assert (worker.engine.quantization, worker.kernels.attention) == ("int8", "cpu")


LLAMA_SHAPES = {
    "meta-llama/Llama-3.1-8B-Instruct": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
    },
    "meta-llama/Llama-3.3-70B-Instruct": {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 28672,
        "max_position_embeddings": 131072,
    },
    "meta-llama/Llama-3.1-405B-Instruct": {
        "vocab_size": 128256,
        "hidden_size": 16384,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 53248,
        "max_position_embeddings": 131072,
    },
}


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configs_are_valid(path: Path, tmp_path: Path) -> None:
    overrides = []
    model = yaml.safe_load(path.read_text())["applications"][0]["args"]["model"]
    if model in LLAMA_SHAPES:
        # The checkpoint isn't here: a folder that describes one of its shape.
        small = json.loads((ROOT / "models" / "manta-small" / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**small, **LLAMA_SHAPES[model]}))
        overrides = [f"model={tmp_path}"]
    config = load_target(str(path), overrides).config
    assert config["applications"][0]["import_path"] == "serve_app:build_app"


def test_default_config_names_every_promised_key() -> None:
    args = load_target(LLAMA, []).config["applications"][0]["args"]
    promised = (
        "model served_model_name dtype device tp_size pp_size num_replicas page_size "
        "max_total_tokens max_running_requests chunked_prefill_size max_prefill_tokens "
        "schedule_policy enable_mixed_chunk enable_overlap enable_prefix_cache "
        "attention_backend sampling_backend"
    )
    assert set(promised.split()) <= set(args)


def test_reference_documents_every_key() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    for kind in (EngineConfig, ServerOptions, AutoscalingOptions):
        for name, field in kind.model_fields.items():
            assert f"`{name}`" in text, f"{name} is missing in docs/configuration.md"
            row = next(line for line in text.splitlines() if line.startswith(f"| `{name}`"))
            default = field.get_default()
            if isinstance(default, int | float | str) and not isinstance(default, bool):
                assert str(default) in row, row


def test_overrides_and_typos_of_the_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_target(LLAMA, ["page_size=1", "tp_size=2"], port=1234).config
    assert config["applications"][0]["args"]["page_size"] == 1
    assert config["http_options"]["port"] == 1234
    assert main([LLAMA, "--set", "tp_size=3"]) == 2
    assert "tp_size (3) must divide" in capsys.readouterr().err
    assert main([str(ROOT / "configs" / "missing.yaml")]) == 2


def test_launcher_refuses_a_misspelt_application_key(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("applications: [{name: x, import_path: 'serve_app:build_app', argz: {}}]")
    with pytest.raises(ConfigError, match="argz"):
        load_target(str(path), [])


def test_a_revision_reaches_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One download, of one folder: everything is read from that (CVE-2026-47155)."""
    asked: list[tuple[str, str | None]] = []

    def download(model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((model, revision))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model_path("someone/model", "abc123") == tmp_path
    assert resolve_model_path("someone/model") == tmp_path
    assert asked == [("someone/model", "abc123"), ("someone/model", None)]


def test_a_folder_has_no_revision() -> None:
    with pytest.raises(ConfigError, match="revision is only for models of the hub"):
        EngineConfig(model="models/manta-small", revision="main").resolve()


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/etc/a.safetensors", "b/a.safetensors", ".."]
)
def test_index_files_stay_in_their_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    (folder / "b").mkdir(parents=True)
    for place in (tmp_path, folder, folder / "b"):
        (place / "a.safetensors").write_bytes(b"")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ConfigError, match="isn't plainly in its folder"):
        SafetensorsSource(folder, torch.float32, torch.device("cpu"))
    with pytest.raises(ConfigError, match="names"):
        check_weights(folder)


@pytest.mark.parametrize(("name", "sentence"), OTHER_NAMES.items())
def test_names_of_other_servers_name_ours(name: str, sentence: str) -> None:
    known = {*EngineConfig.model_fields, *ServerOptions.model_fields}
    assert name not in known, "we have it ourselves"
    named = re.match(r"Manta (?:calls it '|has )(\w+)", sentence)
    assert named is None or named[1] in known
    for written in {name, name.replace("_", "-")}:
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            load_config(EngineConfig, {written: 1})


def test_the_command_line_says_how_a_flag_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--tensor-parallel-size", "2", "--gpu-memory-utilization=0.9"])
    told = capsys.readouterr().err
    assert "usage: manta serve" in told
    assert "'tp_size'" in told and "'memory_fraction'" in told and "--set key=value" in told


@pytest.mark.parametrize(
    "flag", ["--kv-cache-dtype=fp8", "--tool-call-parser", "--revision", "--served-model-name"]
)
def test_the_command_line_says_that_a_flag_is_a_key(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM and SGLang have flags of the same name."""
    with pytest.raises(SystemExit):
        cli.main(["serve", flag, "x"])
    told = capsys.readouterr().err
    assert f"'{flag[2:].partition('=')[0].replace('-', '_')}'" in told
    assert "--set key=value" in told


@pytest.mark.parametrize("command", ["serve", "check", "chat"])
def test_a_misspelt_option_shows_the_usage_of_its_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--prots", "1"])
    told = capsys.readouterr().err
    assert end.value.code == 2 and "--prots" in told
    assert f"usage: manta {command}" in told


def _of_hub(kind: type[Exception]) -> Exception:
    return kind("x", response=httpx.Response(404, request=httpx.Request("GET", "http://hub")))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (httpx.ConnectError("x"), "the hub can't be reached"),
        (errors.LocalEntryNotFoundError("x"), "the hub can't be reached"),
        (TimeoutError(), "the hub can't be reached"),
        (errors.OfflineModeIsEnabled("x"), "HF_HUB_OFFLINE"),
        (_of_hub(errors.RepositoryNotFoundError), "the hub has no such model"),
        (_of_hub(errors.RevisionNotFoundError), "no such revision"),
        (_of_hub(errors.GatedRepoError), "accept its conditions"),
        (OSError(28, "No space left on device"), "the disk has no room"),
    ],
)
def test_why_a_model_is_not_fetched_is_a_sentence(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ConfigError, match=words) as told:
        resolve_model_path("someone/model")
    assert type(error).__name__ not in str(told.value)
