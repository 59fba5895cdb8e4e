"""Every stage of the Dockerfile is executed, in a folder with exactly what it COPYs.

Not executed: Debian's and pip's installations, the C++ compiler and nvcc. Stand-ins take their
place (`tests/support/dockerfile.py`). The base images and the image's user aren't there either.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from engine.device.flashinfer_modules import MANIFEST
from tests.support.dockerfile import ImageBuild, stages

WORKDIR = "opt/manta"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> ImageBuild:
    return ImageBuild(
        tmp_path_factory.mktemp("image"), EXTRAS="gpu", TORCH_INDEX="https://example.com/cpu"
    )


OWN = [stage.name for stage in stages() if stage.name and not stage.base.startswith("$")]


@pytest.mark.parametrize("name", ["packages", *OWN])
def test_the_lines_of_a_stage_run(image: ImageBuild, name: str) -> None:
    try:
        image.run(name)
    except subprocess.CalledProcessError as failure:
        pytest.fail(f"{name}: {failure.cmd[-1]}\n{failure.stdout}{failure.stderr}")


def test_the_stages_are_those_that_are_executed() -> None:
    assert OWN == ["kernels", "sbom", "cpu", "flashinfer", "gpu"]


def test_what_is_installed(image: ImageBuild) -> None:
    root = image.run("packages")
    calls = image.calls.read_text().splitlines()
    assert "pip install --no-deps --index-url https://example.com/cpu -c constraints.txt torch" in (
        calls
    )
    assert any(call.startswith("pip install -c constraints.txt -r") for call in calls)
    assert not (root / "tmp/requirements.txt").exists()


def test_the_cpu_image_starts_its_command(image: ImageBuild) -> None:
    """Its folder alone is enough to check the config that the image starts."""
    root = image.run("cpu")
    (command,) = next(s for s in stages() if s.name == "cpu").arguments("CMD")
    _, *words = json.loads(command)
    assert list((root / WORKDIR / "engine/native/lib").glob("*.so"))
    assert (root / WORKDIR / "deploy/start/__pycache__").is_dir()
    target = words[2]
    assert yaml.safe_load((root / WORKDIR / target).read_text())["applications"]


def test_the_gpu_image_has_all_modules_that_its_configuration_can_ask_for(
    image: ImageBuild,
) -> None:
    """All of docs/gpu.md's advice, on the GPUs that the image is for, without a compiler."""
    image.run("gpu")
    code = """
import torch
from dataclasses import replace
from engine.config import EngineConfig, load_config
from engine.device import triton_loader
triton_loader.lack_of_triton = lambda: ""  # it comes with torch for CUDA
from engine.worker import auto_config
auto_config.detect_device = lambda: "cuda"
torch.cuda.get_device_capability = lambda: (9, 0)
model = {"model": "models/manta-small", "device": "cuda", "load_format": "dummy"}
for head_dim in (64, 128, 256):
    for dtype in ("bfloat16", "float16"):
        for keys in ({}, {"kv_cache_dtype": "fp8_e4m3"}, {"attention_backend": "flashinfer-fa3"}):
            values = {**model, **keys, "dtype": dtype}
            resolved = load_config(EngineConfig, values).resolve()
            for heads in (4, 1):
                for window in (None, 128):
                    shape = replace(
                        resolved.model,
                        head_dim=head_dim,
                        num_kv_heads=heads,
                        layer_windows=(window, None, None, None),
                    )
                    worker = auto_config.make_worker_config(replace(resolved, model=shape))
                    assert worker.kernels.attention.startswith("flashinfer"), worker
"""
    manifest = image.package / "data" / "aot" / MANIFEST
    assert json.loads(manifest.read_text()) == {"architectures": ["9.0a"]}
    try:
        image.run_python("gpu", code)
    except subprocess.CalledProcessError as failure:
        pytest.fail(failure.stderr)


def test_a_module_that_is_not_built_ends_the_build(tmp_path: Path) -> None:
    """The exit status of scripts/build_kernels.py reaches Docker."""
    image = ImageBuild(tmp_path, EXTRAS="gpu", KERNELS="--head-dim 64 --dtype nonsense")
    with pytest.raises(subprocess.CalledProcessError):
        image.run("flashinfer")
