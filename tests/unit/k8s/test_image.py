"""The image (Dockerfile): it holds what is served and what pods run."""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib

import pytest
import yaml

from deploy.http.header_guard import IMPORT_PATH
from deploy.start.haproxy import WRAPPER
from tests.support.dockerfile import copies, stages
from tests.support.source_files import ROOT

IMAGE = ("", "packages", "cpu")
"""The stages of the image for CPUs; the first is what stands before all stages."""


def _docker(word: str, *names: str) -> list[str]:
    """Arguments of every instruction `word` of the stages, by default those of the image."""
    chosen = [stage for stage in stages() if stage.name in (names or IMAGE)]
    return [arguments for stage in chosen for arguments in stage.arguments(word)]


def _docker_env() -> dict[str, str]:
    words = [word for line in _docker("ENV") for word in shlex.split(line)]
    return dict(word.split("=", 1) for word in words)


def _copied(*names: str) -> dict[str, str]:
    """Path in the repository -> path below the working folder of the image."""
    result = {}
    for line in _docker("COPY", *names):
        other, sources, target = copies(line)
        if not other:
            result |= {source: source if target == "./" else target for source in sources}
    return result


def test_image_holds_what_the_application_needs() -> None:
    copied = _copied()
    assert all(source == target for source, target in copied.items()), "paths must stay"
    assert all((ROOT / source).exists() for source in copied)
    ignore = (ROOT / ".dockerignore").read_text().split("\n")
    assert "*" in ignore
    others = {path for path in _copied("flashinfer") if not path.startswith("engine/")}
    assert {line[1:] for line in ignore if line.startswith("!")} == set(copied) | others
    (folder,) = _docker("WORKDIR")
    assert _docker_env()["PYTHONPATH"] == folder
    (app,) = yaml.safe_load((ROOT / "configs/llama.yaml").read_text())["applications"]
    module, _, attribute = app["import_path"].partition(":")
    assert f"{module}.py" in copied
    assert f"def {attribute}(" in (ROOT / f"{module}.py").read_text()
    model = app["args"]["model"]
    assert (ROOT / model / "config.json").is_file() and model.split("/")[0] in copied
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    wanted = {p.rstrip("*").replace(".", "/") for p in packages["packages"]["find"]["include"]}
    assert wanted | {f"{m}.py" for m in packages["py-modules"]} <= set(copied)


def test_image_ships_the_cpu_kernels_without_a_compiler() -> None:
    folder = "engine/native/lib"
    (install, build) = _docker("RUN", "kernels")
    assert "g++" in install and not any("g++" in run for run in _docker("RUN"))
    assert build.endswith(f"python -m engine.native.build --into {folder}")
    (workdir,) = _docker("WORKDIR")
    assert f"--from=kernels {workdir}/{folder} {folder}" in _docker("COPY")
    assert folder in (ROOT / ".dockerignore").read_text().split("\n"), "it is another machine's"


def test_image_starts_a_config_that_it_holds() -> None:
    (command,) = _docker("CMD")
    python, dash_m, module, config, *rest = json.loads(command)
    options = ["--host", "0.0.0.0", "--set", "auth=none", "--verbose"]
    assert (python, dash_m, rest) == ("python", "-m", options)
    assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()
    assert (ROOT / config).is_file() and config.split("/")[0] in _copied()
    port = yaml.safe_load((ROOT / config).read_text())["http_options"]["port"]
    assert _docker("EXPOSE") == [str(port)]


def test_image_is_pinned_and_has_what_probes_run() -> None:
    runs = _docker("RUN")
    assert any(re.search(r"apt-get install .*\bbash\b.*\bwget\b", run) for run in runs)
    pips = [part for run in runs for part in re.findall(r"pip install [^;&]+", run)]
    assert len(pips) == 2 and all("-c constraints.txt" in pip for pip in pips)
    (indexed,) = [pip for pip in pips if "index" in pip]
    assert "--no-deps" in indexed and "--extra-index-url" not in indexed


def _requirements(extras: list[str]) -> list[str]:
    """Runs the Dockerfile's own line."""
    (run,) = [r for r in _docker("RUN") if "tomllib" in r]
    match = re.search(r'python -c "(.*?)" (.*?)\$\{EXTRAS\}', run)
    assert match is not None
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.chdir(ROOT)
        patch.setattr("sys.argv", ["-c", *match[2].split(), *extras])
        exec(match[1].strip(), {"print": printed.append})
    return printed[0].split("\n")


def test_image_installs_the_projects_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    always = project["dependencies"] + extras["redis"]  # the manifests have request_store: redis
    assert _requirements([]) == always
    assert _requirements(["gpu"]) == always + extras["gpu"]
    (base,) = [arg for arg in _docker("ARG") if arg.startswith("BASE=")]
    version = re.search(r"python:(\d+)\.(\d+)", base)
    assert version is not None and (int(version[1]), int(version[2])) >= (3, 11)


def test_pods_have_the_images_environment() -> None:
    """Serve reads these at import in the controller, the proxies and the replicas alike."""
    image = _docker_env()
    text = (ROOT / "k8s/base/environment.env").read_text()
    pods = dict(line.split("=", 1) for line in text.splitlines() if line and line[0] != "#")
    own = {"RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", "HOME", "HF_HUB_OFFLINE"}
    assert {key: pods[key] for key in pods.keys() - own} == {
        key: image[key] for key in image if key.startswith(("RAY_", "OMP_"))
    }
    (folder,) = _docker("WORKDIR")
    assert pods["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert pods["RAY_SERVE_HAPROXY_BINARY_PATH"] == f"{folder}/{WRAPPER.relative_to(ROOT)}"
    assert os.access(WRAPPER, os.X_OK), "Docker copies a file's mode"
    assert pods["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == IMPORT_PATH
    launcher = (ROOT / "deploy/start/launch.py").read_text()
    in_loop = "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"
    assert f'"{in_loop}": "0"' in (ROOT / "deploy/start/haproxy.py").read_text()
    assert pods[in_loop] == "0"
    for name in ("OMP_WAIT_POLICY", "RAY_worker_niceness"):
        assert f'env.setdefault("{name}", "{pods[name]}")' in launcher


def test_base_images_are_digests_and_the_default_is_for_cpus() -> None:
    bases = {arg for arg in _docker("ARG") if "BASE=" in arg}
    assert len(bases) == 2 and all(re.search(r"@sha256:[0-9a-f]{64}$", base) for base in bases)
    redis = (ROOT / "k8s/base/redis-pods.yaml").read_text()
    assert re.search(r"image: redis:7\.2-bookworm@sha256:[0-9a-f]{64}\n", redis)
    assert stages()[-1].base == "cpu" and not stages()[-1].lines


def test_the_gpu_image_compiles_nothing_when_it_runs() -> None:
    assert _docker("ENV", "gpu") == ["FLASHINFER_DISABLE_JIT=1"]
    assert _docker("USER", "gpu")[-1] == _docker("USER")[-1]


def test_the_image_has_a_list_of_what_is_in_it() -> None:
    (run,) = _docker("RUN", "sbom")
    assert "cyclonedx-py environment" in run and "dpkg-query" in run
    assert any("sbom.json" in line and "--from=sbom" in line for line in _docker("COPY"))
