"""Configuration: every refusal names the key and the remedy; the reference lists every key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.config import AppConfig, AutoscalingOptions, ServerOptions
from deploy.launch import load, main
from engine.config import EngineConfig, load_config
from engine.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


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
        ({"pp_max_micro_batch_size": 4}, ["pp_max_micro_batch_size", "pp_size > 1"]),
        (
            {"pp_size": 2, "pp_async_depth": 2, "max_running_requests": 3},
            ["max_running_requests (3)", "micro-batches (4"],
        ),
        ({"enable_priority_preemption": True}, ["schedule_policy: priority"]),
        ({"schedule_policy": "sjf"}, ["schedule_policy", "lpm"]),
        ({"model": "models/nothing-here"}, ["models/nothing-here", "does not exist"]),
        ({"autoscaling": {"min_replicas": 3, "max_replicas": 2}}, ["max_replicas (2)"]),
        ({"autoscaling": {}, "num_replicas": 2}, ["either num_replicas or autoscaling"]),
        ({"num_replicas": 0}, ["num_replicas"]),
        ({"device": "tpu"}, ["device", "tpu"]),
        ({"attention_backend": "flashinfer"}, ["attention_backend", "flashinfer"]),
    ],
)
def test_refusals_say_what_to_do(args: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        AppConfig.from_args(args)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configs_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "gpu" in path.name:
        # The checkpoint isn't here; everything but the model must still be right.
        args = yaml.safe_load(path.read_text())["applications"][0]["args"]
        server = set(ServerOptions.model_fields)
        load_config(EngineConfig, {k: v for k, v in args.items() if k not in server})
        load_config(ServerOptions, {k: v for k, v in args.items() if k in server})
        return
    config = load(path, [])
    assert config["applications"][0]["import_path"] == "serve_app:build_app"


def test_default_config_names_every_promised_key() -> None:
    args = load(ROOT / "configs" / "llama.yaml", [])["applications"][0]["args"]
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
    config = load(ROOT / "configs" / "llama.yaml", ["page_size=1", "tp_size=2"], port=1234)
    assert config["applications"][0]["args"]["page_size"] == 1
    assert config["http_options"]["port"] == 1234
    assert main([str(ROOT / "configs" / "llama.yaml"), "--set", "tp_size=3"]) == 2
    assert "tp_size (3) must divide" in capsys.readouterr().err
    assert main([str(ROOT / "configs" / "missing.yaml")]) == 2


def test_launcher_refuses_a_misspelt_application_key(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("applications: [{name: x, import_path: 'serve_app:build_app', argz: {}}]")
    with pytest.raises(ConfigError, match="argz"):
        load(path, [])
