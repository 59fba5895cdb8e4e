"""`manta check` and the start judge alike whether a machine holds the engines, by their shapes."""

from __future__ import annotations

import json
import re
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from deploy.start import cli, devices, gpus, launch, preflight
from deploy.start.target import load_target
from engine import LLM
from engine.checkpoint.adapter import PeftAdapter
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weight_formats import INT8
from engine.errors import ConfigError
from engine.memory_need import GIB, MemoryNeed, cache_bytes_per_token, crowding, stage_bytes
from engine.native import library
from engine.worker import auto_config
from engine.worker.auto_config import make_worker_config
from tests.support.adapters import make_adapter
from tests.support.engines import load_reference
from tests.support.source_files import ROOT

SMALL = str(ROOT / "models" / "manta-small")
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "tie_word_embeddings": False,
    },
    "70b": {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 28672,
        "tie_word_embeddings": False,
    },
    "405b": {
        "hidden_size": 16384,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 53248,
        "tie_word_embeddings": False,
    },
}
SHORT = r"this needs about ([0-9.]+) GiB of memory, and ([0-9.]+) GiB are free"


def shaped(folder: Path, shape: str, **changes: Any) -> str:
    """A model folder with a config.json of that shape, a tokenizer and no weights."""
    folder.mkdir(exist_ok=True)
    config = json.loads(Path(SMALL, "config.json").read_text())
    config |= {"vocab_size": 128256, "max_position_embeddings": 8192, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config | SHAPES[shape] | changes))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).exists():
            (folder / name).symlink_to(Path(SMALL, name))
    return str(folder)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the machine has: `free` bytes, `cores`, `gpus` (bytes of each)."""
    has: dict[str, Any] = {"free": 16 * GIB, "cores": 4, "gpus": [], "cuda": True, "ray_cpus": 64}
    for module in (devices, auto_config):
        monkeypatch.setattr(module, "available_host_bytes", lambda: has["free"])
        monkeypatch.setattr(module, "num_cores", lambda: has["cores"])
    monkeypatch.setattr("engine.worker.sizing.estimate.available_host_bytes", lambda: has["free"])
    monkeypatch.setattr(devices, "gpu_memory", lambda: has["gpus"])
    monkeypatch.setattr(devices, "get_num_cpus", lambda: has["ray_cpus"])
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: has["cuda"])
    for module in (devices, auto_config):
        monkeypatch.setattr(module, "has_bfloat16", lambda: True)
    monkeypatch.setattr(auto_config, "detect_device", lambda: "cuda" if has["gpus"] else "cpu")
    return has


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def judged(target: str, *overrides: str, port: int = 0) -> list[str]:
    """What `manta check` and `manta serve` say of it before anything starts."""
    values = ["load_format=dummy", *overrides]
    loaded = load_target(target, values, port=port)
    return preflight.check_machine(loaded)


def refused(target: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as told:
        judged(target, *overrides)
    return str(told.value)


# --- figures


@pytest.mark.parametrize(("shape", "gib"), [("1b", 2.3), ("8b", 15.0), ("70b", 131.4)])
def test_weights_are_counted_from_the_shape(tmp_path: Path, shape: str, gib: float) -> None:
    """The figures of docs/gpu.md, in bfloat16."""
    model = ModelConfig.from_pretrained(shaped(tmp_path, shape))
    whole = MemoryNeed(model, None, "bfloat16", "auto", 1, 1)
    assert whole.weights() / GIB == pytest.approx(gib, abs=0.1)
    assert whole.rank_weights() == whole.weights()
    split = MemoryNeed(model, None, "bfloat16", "auto", 4, 1)
    assert split.rank_weights() * 4 == split.weights() == whole.weights()
    stages = MemoryNeed(model, None, "bfloat16", "auto", 4, 2)
    assert whole.weights() / 2 <= stages.rank_weights() * 4 < whole.weights() * 0.7
    assert stages.per_token() * 8 == whole.per_token()
    wide = MemoryNeed(model, None, "float32", "auto", 1, 1)
    assert wide.weights() == 2 * whole.weights()
    small = MemoryNeed(model, None, "bfloat16", "auto", 1, 1, form=INT8)
    assert small.weights() < 0.75 * whole.weights()
    drafts = MemoryNeed(model, model, "bfloat16", "auto", 2, 1)
    assert drafts.weights() > 3 * whole.weights() * 0.99


def test_float8_and_copies_change_the_cache(tmp_path: Path) -> None:
    model = ModelConfig.from_pretrained(shaped(tmp_path, "8b"))
    assert cache_bytes_per_token(model, 2) == 128 << 10
    half = MemoryNeed(model, None, "bfloat16", "fp8_e4m3", 1, 1)
    assert half.per_token() == 64 << 10
    copied = MemoryNeed(model, None, "bfloat16", "auto", 1, 1, has_copies=True)
    assert copied.per_token() == (128 + 256) << 10


def test_replicated_heads_count_on_each_rank(tmp_path: Path) -> None:
    model = ModelConfig.from_pretrained(shaped(tmp_path, "8b", num_key_value_heads=2))
    assert cache_bytes_per_token(model, 2, tp_size=4) == cache_bytes_per_token(model, 2, tp_size=2)
    assert 4 * stage_bytes(model, 2, 4, 1, 0) > stage_bytes(model, 2, 1, 1, 0)


# --- memory of the host


def test_a_model_that_cannot_fit_is_refused_by_all_in_the_same_words(
    tmp_path: Path, machine: dict[str, Any], free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without any weights in the folder: 131 GiB of bfloat16."""
    model = shaped(tmp_path, "70b")
    arguments = [model, "--port", str(free_port), "--set", "load_format=dummy"]
    assert cli.main(["check", *arguments]) == 2
    checked = capsys.readouterr()
    assert "about 132.6 GiB" in checked.out and "ok" not in checked.out.splitlines()
    assert cli.main(["serve", *arguments]) == 2
    served = capsys.readouterr()
    assert served.err == checked.err
    found = re.search(SHORT, served.err)
    assert found and (float(found[1]), found[2]) == (132.6, "16.0")
    with pytest.raises(ConfigError, match=SHORT):
        LLM(model, load_format="dummy", device="cpu")
    resolved = load_target(model, ["load_format=dummy"]).applications[0].resolved
    with pytest.raises(ConfigError, match=SHORT):  # a worker of an engine on a cluster
        make_worker_config(resolved, serving=True)


def test_too_little_memory_is_told_with_figures(machine: dict[str, Any]) -> None:
    """Refused where the model itself can't fit; a warning where it is about to be tight."""
    overrides = ["max_total_tokens=65536", "device=cpu", "attention_backend=torch"]
    (app,) = load_target(SMALL, [*overrides, "dtype=float32"]).applications
    # 4 layers of 4 heads of 32, keys and values: 4 KiB a token, and as much for copies.
    cache = 65536 * 8 * 1024
    assert 0 < devices.memory_bytes(app) - devices.PROCESS_BYTES - cache < 64 << 20
    machine["free"] = 1 << 29
    assert re.search(r"about 1\.[0-9] GiB of memory, and 0\.5 GiB are", refused(SMALL, *overrides))
    machine["free"] = 1 << 30
    (warning,) = judged(SMALL, *overrides)
    assert re.search(SHORT, warning)
    machine["free"] = 8 << 30
    assert judged(SMALL, *overrides) == []


@pytest.mark.parametrize(
    ("overrides", "fits"),
    [
        ([], True),
        (["dtype=float32"], True),
        (["num_replicas=8"], False),
        (["num_replicas=8", "dtype=float32"], False),
        (["max_total_tokens=200000"], True),
        (["max_total_tokens=800000"], False),
        (["max_total_tokens=800000", "kv_cache_dtype=fp8_e4m3"], True),
        (["num_replicas=2", "dtype=float32"], True),
        (["num_replicas=4", "dtype=float32"], False),
        (["autoscaling={min_replicas: 1, max_replicas: 8}"], False),
    ],
)
def test_every_key_that_changes_the_need(
    tmp_path: Path,
    machine: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    fits: bool,
) -> None:
    """A 1B model (2.3 GiB in bfloat16, 32 KiB of KV cache a token) on 16 GiB."""
    monkeypatch.setattr(library, "lack", lambda: "")
    model = shaped(tmp_path, "1b")
    if fits:
        assert not [text for text in judged(model, *overrides) if "can't" in text]
    else:
        assert re.search(SHORT, refused(model, *overrides))


def test_a_cpu_without_bfloat16_needs_twice_as_much(
    tmp_path: Path, machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shaped(tmp_path, "8b")
    machine["free"] = 20 * GIB
    judged(model)
    monkeypatch.setattr(devices, "has_bfloat16", lambda: False)
    assert re.search(SHORT, refused(model))


def test_adapters_in_the_hosts_memory_count(tmp_path: Path, machine: dict[str, Any]) -> None:
    folder = make_adapter(tmp_path / "a", load_reference(ROOT / SMALL), rank=16)
    size = 2 * PeftAdapter.open(folder).num_values
    listed = f"lora_adapters={{a: {folder}, b: {folder}}}"
    common = ["device=cpu", "max_total_tokens=4096", "dtype=bfloat16"]

    def taken(*overrides: str) -> int:
        (app,) = load_target(SMALL, [*common, *overrides]).applications
        return devices.model_bytes(app)

    plain = taken()
    assert taken(listed) == plain + 2 * size
    assert taken(listed, "max_cpu_loras=9") == plain + 2 * size, "there are no others"
    assert taken(listed, "max_loras=1", "max_cpu_loras=1") == plain + size
    others = [listed, f"lora_folder={tmp_path}", "max_cpu_loras=9000"]
    assert taken(*others) == plain + 9000 * size
    machine["free"] = 4 << 30
    assert "for adapters: lower max_cpu_loras" in refused(SMALL, *common, *others)


def test_a_draft_model_counts(tmp_path: Path, machine: dict[str, Any]) -> None:
    model = shaped(tmp_path / "model", "1b")
    draft = shaped(tmp_path / "draft", "8b")
    drafts = f"speculative_config={{method: draft_model, model: {draft}}}"
    assert re.search(SHORT, refused(model, drafts))


def test_a_draft_model_without_weights_is_found(tmp_path: Path, machine: dict[str, Any]) -> None:
    (tmp_path / "draft").mkdir()
    small = json.loads(Path(SMALL, "config.json").read_text())
    (tmp_path / "draft" / "config.json").write_text(json.dumps(small))
    drafts = f"speculative_config={{method: draft_model, model: {tmp_path / 'draft'}}}"
    with pytest.raises(ConfigError, match=r"draft holds no \*\.safetensors"):
        preflight.check_machine(load_target(SMALL, [drafts]))


def test_a_cache_from_memory_is_what_the_weights_leave(
    tmp_path: Path, machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check and start find the same number, and it is not for memory that the weights take."""
    monkeypatch.setattr(library, "lack", lambda: "no compiler")
    monkeypatch.setattr(library, "load", lambda: None)
    model = shaped(tmp_path, "8b")
    machine["free"] = 17 * GIB + devices.PROCESS_BYTES
    (app,) = load_target(model, ["load_format=dummy"]).applications
    tokens = devices.cache_tokens(app, machine["free"] - devices.PROCESS_BYTES)
    assert tokens * (128 + 256) * 1024 < 2.1 * GIB
    text = refused(model)
    assert "can't hold one request of max_model_len (8192)" in text and "max_model_len" in text
    assert judged(model, "max_model_len=2048") == []
    machine["free"] -= devices.PROCESS_BYTES  # a worker finds the other processes running
    resolved = load_target(model, ["load_format=dummy"]).applications[0].resolved
    assert make_worker_config(resolved, serving=True).num_kv_tokens == tokens


# --- GPUs


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_gpu_that_is_not_there(
    machine: dict[str, Any], free_port: int, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [SMALL, "--port", str(free_port), "--set", f"device={device}"]
    if device == "auto":
        assert cli.main(["check", *arguments]) == 0
        assert "on CPU it takes about" in capsys.readouterr().out
        return
    assert cli.main(["check", *arguments]) == 2
    checked = capsys.readouterr()
    assert "on CPU" not in checked.out and "ok" not in checked.out.splitlines()
    assert cli.main(["serve", *arguments]) == 2
    assert capsys.readouterr().err == checked.err
    assert "device is 'cuda'" in checked.err and "has none" in checked.err
    with pytest.raises(ConfigError, match="device is 'cuda' but torch sees no GPU"):
        LLM(SMALL, device="cuda")


@pytest.mark.parametrize(
    ("shape", "num_gpus", "overrides", "says"),
    [
        ("8b", 1, [], ""),
        ("8b", 1, ["tp_size=2"], "needs 2 GPUs"),
        ("8b", 2, ["tp_size=2"], ""),
        ("8b", 1, ["num_replicas=2"], "needs 2 GPUs"),
        ("8b", 8, ["num_replicas=2", "tp_size=4"], ""),
        ("8b", 8, ["num_replicas=3", "tp_size=4"], "needs 12 GPUs"),
        ("8b", 8, ["num_replicas=2", "tp_size=4", "pp_size=2"], "needs 16 GPUs"),
        ("70b", 1, [], "this rank's weights take 131"),
        ("70b", 4, ["tp_size=4"], ""),
        ("70b", 2, ["pp_size=2"], "the KV cache of max_model_len"),
        ("8b", 1, ["memory_fraction=0.1"], "memory_fraction 0.1"),
        ("8b", 1, ["max_total_tokens=500000"], "KV cache of max_total_tokens (500000)"),
        ("8b", 1, ["max_total_tokens=500000", "kv_cache_dtype=fp8_e4m3"], ""),
        ("70b", 4, ["tp_size=4", "dtype=float32"], "set dtype: bfloat16 (now float32)"),
        ("8b", 1, ["quantization=int8"], "quantization int8 needs device"),
        ("8b", 1, ["attention_backend=cpu"], "attention_backend cpu needs device cpu"),
    ],
)
def test_shapes_on_gpus(
    tmp_path: Path,
    machine: dict[str, Any],
    shape: str,
    num_gpus: int,
    overrides: list[str],
    says: str,
) -> None:
    """GPUs of 79 GiB; `device: auto` takes them as `device: cuda` does."""
    machine["gpus"] = [79 * GIB] * num_gpus
    model = shaped(tmp_path, shape)
    values = ["device=cuda", *overrides]
    if not says:
        assert judged(model, *values) == []
        assert judged(model, *overrides) == []
    else:
        assert says in refused(model, *values)


def test_a_draft_model_on_a_gpu(machine: dict[str, Any]) -> None:
    machine["gpus"] = [79 * GIB]
    drafts = f"speculative_config={{method: draft_model, model: {SMALL}}}"
    assert "draft_model runs on CPU only" in refused(SMALL, drafts)


def test_torch_for_cpus_beside_a_gpu(machine: dict[str, Any]) -> None:
    machine["gpus"], machine["cuda"] = [79 * GIB], False
    assert "torch sees no GPU" in refused(SMALL, "device=cuda")


def test_replicas_that_can_never_start_are_told(machine: dict[str, Any]) -> None:
    machine["gpus"] = [79 * GIB]
    (told,) = judged(SMALL, "device=cuda", "autoscaling={min_replicas: 1, max_replicas: 4}")
    assert "max_replicas needs 4 GPUs and this machine has 1" in told


def test_gpus_of_a_machine_without_any_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "has_nvidia_gpu", lambda: False)
    assert gpus.gpu_memory() == []
    assert isinstance(gpus.torch_has_cuda(), bool)


@pytest.mark.parametrize(
    ("config", "shape", "num_gpus"),
    [("llama-8b-gpu", "8b", 1), ("llama-70b-tp8", "70b", 8), ("llama-405b-tp8-pp2", "405b", 16)],
)
def test_the_gpu_configs_fit_the_cards_that_they_name(
    tmp_path: Path, machine: dict[str, Any], config: str, shape: str, num_gpus: int
) -> None:
    """80 GB each, of which the driver shows 79 GiB; not one card fewer."""
    model = shaped(tmp_path, shape, max_position_embeddings=131072)
    path = str(ROOT / "configs" / f"{config}.yaml")
    machine["gpus"] = [79 * GIB] * num_gpus
    assert judged(path, f"model={model}") == []
    machine["gpus"] = [79 * GIB] * (num_gpus - 1)
    assert f"needs {num_gpus} GPU" in refused(path, f"model={model}")


# --- cores


@pytest.mark.parametrize(
    ("overrides", "workers"),
    [
        ([], 1),
        (["tp_size=4"], 4),
        (["tp_size=2", "pp_size=2"], 4),
        (["num_replicas=3"], 3),
        (["num_replicas=2", "tp_size=2"], 4),
    ],
)
def test_more_workers_than_cores_are_told(
    machine: dict[str, Any],
    overrides: list[str],
    workers: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine["cores"] = 2
    told = judged(SMALL, "device=cpu", *overrides)
    assert [f"{workers} workers" in text for text in told] == [True] * (workers > 2)
    machine["cores"] = workers
    assert judged(SMALL, "device=cpu", *overrides) == []
    assert crowding(3, 1).startswith("3 workers") and "1 CPU core:" in crowding(3, 1)


def test_a_worker_says_it_too(machine: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    machine["cores"] = 2
    resolved = load_target(SMALL, ["device=cpu", "tp_size=4"]).applications[0].resolved
    make_worker_config(resolved)
    assert "4 workers" in caplog.text


def test_more_actors_than_ray_places_are_refused(machine: dict[str, Any]) -> None:
    """A worker on CPU reserves 0.02 CPUs, as schedulers and ingresses do; one on a GPU a whole."""
    machine["ray_cpus"] = 2
    judged(SMALL, "device=cpu", "num_replicas=49", "max_total_tokens=4096")
    assert "reserve 2.02 of Ray's logical CPUs, and this machine has 2" in refused(
        SMALL, "device=cpu", "num_replicas=50", "max_total_tokens=4096"
    )
    machine["gpus"] = [79 * GIB] * 4
    assert "reserve 4.04 of Ray's logical CPUs" in refused(SMALL, "device=cuda", "tp_size=4")


@pytest.mark.parametrize("key", ["ingress_resources", "engine_resources", "worker_resources"])
def test_resources_that_the_own_cluster_lacks(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.delenv("RAY_OVERRIDE_RESOURCES", raising=False)
    assert "name 'rack1'" in refused(SMALL, f"{key}={{rack1: 1}}")
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"rack1": 4}')
    judged(SMALL, f"{key}={{rack1: 1}}")


# --- what else a start would refuse


@pytest.mark.parametrize("override", ["attention_backend=flashinfer", "sampling_backend=triton"])
def test_kernels_of_a_gpu_on_cpu(machine: dict[str, Any], override: str) -> None:
    words = override.replace("=", " ")
    assert f"{words} needs a GPU" in refused(SMALL, override)


@pytest.mark.parametrize(
    "override", ["attention_backend=cpu", "sampling_backend=cpu", "quantization=int8"]
)
def test_cpu_kernels_that_cannot_be_had(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    monkeypatch.setenv("MANTA_CPU_KERNELS", "off")
    text = refused(SMALL, override)
    assert "needs the library of CPU kernels: MANTA_CPU_KERNELS switches them off" in text


def test_a_folder_without_a_tokenizer(tmp_path: Path, machine: dict[str, Any]) -> None:
    model = shaped(tmp_path, "1b")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    assert "holds no tokenizer" in refused(model)


def test_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"set `model` to the one to serve.*Q4_K_M.gguf"):
        load_target(str(tmp_path), [])
    with pytest.raises(ConfigError, match="too short for a GGUF file"):
        load_target(str(tmp_path / "model.Q4_K_M.gguf"), [])


def test_quantized_tensors_are_found_before_ray_starts(
    tmp_path: Path, machine: dict[str, Any]
) -> None:
    """config.json says nothing of them."""
    import torch
    from safetensors.torch import save_file

    model = shaped(tmp_path, "1b")
    name = "model.layers.0.self_attn.q_proj"
    for tensors, says in (
        ({f"{name}.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn)}, "float8_e4m3fn"),
        ({f"{name}.qweight": torch.zeros(2, 2, dtype=torch.int32)}, "GPTQ or AWQ"),
    ):
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=says):
            preflight.check_machine(load_target(model, []))
    plain = {f"{name}.weight": torch.zeros(2, 2), f"{name}.mask": torch.zeros(2, dtype=torch.int64)}
    save_file(plain, tmp_path / "model.safetensors")
    preflight.check_weights(tmp_path)


def test_a_cluster_of_other_machines_is_not_promised(
    machine: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(launch, "check_cluster_token", lambda address: None)
    assert cli.main(["check", SMALL, "--set", "device=cuda"]) == 0
    said = capsys.readouterr().out
    assert "GPUs are those of its machines, not checked here" in said and "on CPU" not in said


def test_the_launcher_asks_the_same_function(
    tmp_path: Path, machine: dict[str, Any], free_port: int
) -> None:
    target = load_target(shaped(tmp_path, "70b"), ["load_format=dummy"], port=free_port)
    with ExitStack() as stack, pytest.raises(ConfigError, match=SHORT):
        launch.check(target, True, stack)
