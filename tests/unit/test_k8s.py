"""Manifests of `k8s/` and the image: valid for KubeRay, in step with `configs/` and code."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.http.header_guard import IMPORT_PATH
from deploy.start.config import AppConfig
from deploy.start.haproxy import WRAPPER

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = ROOT.parent / "shared" / "kuberay" / "rayservice-v1.schema.json"
"""Kept beside the repository, not in it; see README.md there."""


def _load_render() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render_k8s", ROOT / "scripts/render_k8s.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


render_k8s = _load_render()
MANIFESTS: dict[str, str] = render_k8s.MANIFESTS
both = pytest.mark.parametrize("path", list(MANIFESTS))


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    if not SCHEMA.is_file():
        pytest.skip(
            "no ../shared/kuberay beside the repository: manifests not checked with the CRD"
        )
    return jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))


def manifest(path: str) -> dict[str, Any]:
    value = yaml.safe_load((ROOT / path).read_text())
    assert isinstance(value, dict)
    return value


def groups(doc: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """(group, pod spec, Ray container) of the head and of each worker group."""
    cluster = doc["spec"]["rayClusterConfig"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        pod = group["template"]["spec"]
        assert len(pod["containers"]) == 1
        yield group, pod, pod["containers"][0]


def served(doc: dict[str, Any]) -> dict[str, Any]:
    value = yaml.safe_load(doc["spec"]["serveConfigV2"])
    assert isinstance(value, dict)
    return value


def app_config(doc: dict[str, Any]) -> AppConfig:
    """Checked as the application checks it, with the carried model's sizes: no hub in tests."""
    (app,) = served(doc)["applications"]
    args = {k: v for k, v in app["args"].items() if k != "max_model_len"}
    return AppConfig.from_args({**args, "model": "models/manta-small"})


def env(container: dict[str, Any]) -> dict[str, str]:
    return {e["name"]: e["value"] for e in container["env"] if "value" in e}


# The CRD


@both
def test_valid_for_the_crd(path: str, validator: jsonschema.Draft202012Validator) -> None:
    errors = [f"{e.json_path}: {e.message}" for e in validator.iter_errors(manifest(path))]
    assert errors == []


def _misspell(doc: dict[str, Any], where: list[Any], key: str, wrong: str) -> None:
    for step in where:
        doc = doc[step]
    doc[wrong] = doc.pop(key)


CLUSTER = ["spec", "rayClusterConfig"]
POD = [*CLUSTER, "workerGroupSpecs", 0, "template", "spec"]


@pytest.mark.parametrize(
    ("where", "key", "wrong"),
    [
        (["spec"], "serveConfigV2", "serveConfigv2"),
        (["spec", "upgradeStrategy"], "type", "typ"),
        (CLUSTER, "headGroupSpec", "headGroup"),
        ([*CLUSTER, "authOptions"], "mode", "mod"),
        ([*CLUSTER, "workerGroupSpecs", 0], "replicas", "replica"),
        ([*CLUSTER, "workerGroupSpecs", 0], "maxReplicas", "maxreplicas"),
        (POD, "securityContext", "securitycontext"),
        ([*POD, "securityContext"], "runAsNonRoot", "runAsNonroot"),
        ([*POD, "containers", 0], "resources", "resource"),
        ([*POD, "containers", 0, "resources"], "limits", "limit"),
    ],
)
def test_a_misspelt_key_is_refused(
    where: list[Any], key: str, wrong: str, validator: jsonschema.Draft202012Validator
) -> None:
    doc = manifest("k8s/rayservice-cpu.yaml")
    _misspell(doc, where, key, wrong)
    messages = [e.message for e in validator.iter_errors(doc)]
    assert any(wrong in m or f"'{key}' is a required property" in m for m in messages), messages


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ([*CLUSTER, "authOptions"], "mode", "tokens"),
        ([*CLUSTER, "workerGroupSpecs", 0], "replicas", "one"),
        ([*POD, "containers", 0], "env", {"A": "b"}),
    ],
)
def test_a_wrong_value_is_refused(
    where: list[Any], key: str, value: Any, validator: jsonschema.Draft202012Validator
) -> None:
    doc = manifest("k8s/rayservice-cpu.yaml")
    target: Any = doc
    for step in where:
        target = target[step]
    target[key] = value
    assert not validator.is_valid(doc)


# What the operator checks beyond the CRD


@both
def test_rules_of_the_operator(path: str) -> None:
    doc = manifest(path)
    assert (doc["apiVersion"], doc["kind"]) == ("ray.io/v1", "RayService")
    # A DNS label, short enough for the names that KubeRay derives.
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?", doc["metadata"]["name"])
    assert doc["spec"]["upgradeStrategy"] == {"type": "NewCluster"}
    assert doc["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    for group, _, container in groups(doc):
        assert "resources" not in group, "KubeRay refuses it beside rayStartParams"
        # It writes into this map, and every value is a word of a command line.
        assert all(isinstance(v, str) for v in group["rayStartParams"].values())
        # Its own probes are the ones that know the Serve proxy.
        assert not {"livenessProbe", "readinessProbe"} & set(container)


# Same application as configs/


@both
def test_serves_the_config_file(path: str) -> None:
    config = yaml.safe_load((ROOT / MANIFESTS[path]).read_text())
    pods = served(manifest(path))
    # A pod that listens on the loopback address serves nobody, and beyond that Manta wants keys or
    # a word that there are none; all else is the file's.
    config["http_options"]["host"] = "0.0.0.0"
    config["applications"][0]["args"]["auth"] = "none"
    assert pods == config


def test_manifests_are_rendered() -> None:
    assert render_k8s.main(["--check"]) == 0


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [*MANIFESTS, *MANIFESTS.values()]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(render_k8s, "ROOT", tmp_path)
    return tmp_path


def test_check_finds_a_changed_config(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = copied / "configs/llama.yaml"
    config.write_text(config.read_text().replace("page_size: 16", "page_size: 32"))
    before = (copied / "k8s/rayservice-cpu.yaml").read_text()

    assert render_k8s.main(["--check"]) == 1
    assert "k8s/rayservice-cpu.yaml" in (err := capsys.readouterr().err)
    assert "rayservice-gpu" not in err
    assert (copied / "k8s/rayservice-cpu.yaml").read_text() == before

    assert render_k8s.main([]) == 0
    assert render_k8s.main(["--check"]) == 0
    after = (copied / "k8s/rayservice-cpu.yaml").read_text()
    changed = [
        (a, b) for a, b in zip(before.splitlines(), after.splitlines(), strict=True) if a != b
    ]
    assert [(a.strip(), b.strip()) for a, b in changed] == [("page_size: 16", "page_size: 32")]


def test_render_keeps_what_follows_and_needs_its_key() -> None:
    text = "a: 1\nb:\n  serveConfigV2: |\n    old: 1\n\n    older: 2\n  # note\n  c: 3\n"
    out = render_k8s.render(text, "x.yaml", "http_options: {host: h}\napplications: []\n")
    assert out.startswith("a: 1\nb:\n  serveConfigV2: |\n    # From x.yaml")
    assert out.endswith("    applications: []\n  # note\n  c: 3\n")
    assert "old" not in out
    with pytest.raises(ValueError, match="not 0"):
        render_k8s.render("a: 1\n", "x.yaml", "http_options: {}\n")


# Pods hold what the application asks for


def _room(doc: dict[str, Any]) -> list[dict[str, float]]:
    """What Ray sees in each pod: KubeRay's `num-cpus` and `num-gpus`."""
    nodes = []
    for group, _, container in groups(doc):
        limits = container["resources"]["limits"]
        cpus = group["rayStartParams"].get("num-cpus", limits["cpu"])
        node = {"CPU": float(cpus), "GPU": float(limits.get("nvidia.com/gpu", 0))}
        nodes += [dict(node) for _ in range(group.get("replicas", 1))]
    return nodes


def _place(doc: dict[str, Any], config: AppConfig) -> bool:
    """First fit of every replica's bundles and of the ingress replicas."""
    (app,) = served(doc)["applications"]
    use_gpu = app["args"]["device"] == "cuda"
    wanted = config.placement_bundles(use_gpu=use_gpu) * config.max_replicas
    wanted += [{"CPU": config.cpu_per_actor}] * config.server.ingress_replicas
    nodes = _room(doc)
    for bundle in sorted(wanted, key=lambda b: -b.get("GPU", 0)):
        for node in nodes:
            if all(node[k] >= v - 1e-9 for k, v in bundle.items()):
                for k, v in bundle.items():
                    node[k] -= v
                break
        else:
            return False
    return True


@both
def test_pods_hold_the_placement_groups(path: str) -> None:
    doc = manifest(path)
    assert _place(doc, app_config(doc))
    head, *workers = _room(doc)
    assert head["CPU"] == 0, "replicas on the head would get no traffic"
    gpus = [node["GPU"] for node in workers]
    config = app_config(doc)
    wanted = config.max_replicas * config.engine.world_size if "gpu" in path else 0
    assert sum(gpus) == wanted, "GPUs that nobody uses, or too few"


def test_too_few_gpus_would_be_found() -> None:
    doc = manifest("k8s/rayservice-gpu.yaml")
    config = app_config(doc)
    config.engine = config.engine.model_copy(update={"tp_size": 2})
    assert not _place(doc, config)


@both
def test_worker_counts_are_written_out_and_fixed(path: str) -> None:
    """No autoscaler runs, so the three must agree."""
    cluster = manifest(path)["spec"]["rayClusterConfig"]
    assert not cluster.get("enableInTreeAutoscaling", False)
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"] >= 1


@both
def test_requests_equal_limits(path: str) -> None:
    for _, _, container in groups(manifest(path)):
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]
        assert re.fullmatch(r"\d+", resources["limits"]["cpu"]), "KubeRay rounds it for Ray"


@both
def test_a_deleted_worker_drains(path: str) -> None:
    doc = manifest(path)
    streams = app_config(doc).server.drain_timeout_s
    assert doc["spec"]["rayClusterDeletionDelaySeconds"] >= streams
    _, *workers = groups(doc)
    for _, pod, container in workers:
        word, pause = container["lifecycle"]["preStop"]["exec"]["command"]
        assert word == "sleep"
        drain = float(env(container)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert drain >= streams + 10, "replicas hand over what is left"
        # The rest is for ending processes before Kubernetes kills them.
        assert pod["terminationGracePeriodSeconds"] >= float(pause) + drain + 5


# Security


@both
def test_pods_are_restricted(path: str) -> None:
    uid = int(_docker("USER")[0].split(":")[0])
    for _, pod, container in groups(manifest(path)):
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] == context["runAsGroup"] == context["fsGroup"] == uid > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod["automountServiceAccountToken"] is False
        assert not any(pod.get(k) for k in ("hostNetwork", "hostPID", "hostIPC"))
        assert not any("hostPath" in v for v in pod.get("volumes", []))


@both
def test_secrets_are_references(path: str) -> None:
    for _, _, container in groups(manifest(path)):
        for entry in container["env"]:
            if re.search("TOKEN|KEY|SECRET|PASSWORD", entry["name"]):
                assert "value" not in entry
                assert set(entry["valueFrom"]["secretKeyRef"]) == {"name", "key"}


def test_gpu_pods_share_one_model_cache() -> None:
    """The application is built on one node and tells the others the model's path."""
    claim = manifest("k8s/model-cache.yaml")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for _, pod, container in groups(manifest("k8s/rayservice-gpu.yaml")):
        (volume,) = pod["volumes"]
        assert volume["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
        (mount,) = container["volumeMounts"]
        assert mount["name"] == volume["name"]
        assert env(container)["HF_HOME"].startswith(mount["mountPath"] + "/")
        names = [e["name"] for e in container["env"] if "secretKeyRef" in e.get("valueFrom", {})]
        assert names == ["HF_TOKEN"]


# Image


def _docker_stages() -> list[list[str]]:
    """Lines of the Dockerfile: those before the first FROM, then those of each stage."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M)
    stages: list[list[str]] = [[]]
    for line in filter(str.strip, text.replace("\\\n", " ").splitlines()):
        if line.startswith("FROM "):
            stages.append([])
        stages[-1].append(line)
    return stages


def _is_kernel_stage(stage: list[str]) -> bool:
    return stage[0].endswith(" AS kernels")


def _docker(word: str, *, in_image: bool = True) -> list[str]:
    """Arguments of every instruction `word` of the image, or of the stage that compiles."""
    stages = [stage for stage in _docker_stages() if _is_kernel_stage(stage) != in_image]
    lines = [line.split(None, 1) for stage in stages for line in stage]
    return [arguments for instruction, arguments in lines if instruction == word]


def _docker_env() -> dict[str, str]:
    words = [word for line in _docker("ENV") for word in shlex.split(line)]
    return dict(word.split("=", 1) for word in words)


def _copied() -> dict[str, str]:
    """Path in the repository -> path below the working folder of the image."""
    result = {}
    for line in _docker("COPY"):
        *sources, target = line.split()
        if sources[0].startswith("--from="):
            continue
        for source in sources:
            result[source] = source if target == "./" else target
    return result


def test_image_holds_what_the_application_needs() -> None:
    copied = _copied()
    assert all(source == target for source, target in copied.items()), "paths must stay"
    assert all((ROOT / source).exists() for source in copied)
    ignore = (ROOT / ".dockerignore").read_text().split("\n")
    assert "*" in ignore
    assert {line[1:] for line in ignore if line.startswith("!")} == set(copied)
    (folder,) = _docker("WORKDIR")
    assert _docker_env()["PYTHONPATH"] == folder
    for path in MANIFESTS:
        (app,) = served(manifest(path))["applications"]
        module, _, attribute = app["import_path"].partition(":")
        assert f"{module}.py" in copied
        assert f"def {attribute}(" in (ROOT / f"{module}.py").read_text()
    model = served(manifest("k8s/rayservice-cpu.yaml"))["applications"][0]["args"]["model"]
    assert (ROOT / model / "config.json").is_file() and model.split("/")[0] in copied
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    wanted = {p.rstrip("*") for p in packages["packages"]["find"]["include"]}
    assert wanted | {f"{m}.py" for m in packages["py-modules"]} <= set(copied)


def test_image_ships_the_cpu_kernels_without_a_compiler(tmp_path: Path) -> None:
    folder = "engine/native/lib"
    (install, build) = _docker("RUN", in_image=False)
    assert "g++" in install and not any("g++" in run for run in _docker("RUN"))
    assert build.endswith(f"python -m engine.native.build --into {folder}")
    (workdir,) = _docker("WORKDIR")
    assert f"--from=kernels {workdir}/{folder} {folder}" in _docker("COPY")
    assert folder in (ROOT / ".dockerignore").read_text().split("\n"), "it is another machine's"
    for line in _docker("COPY", in_image=False):
        source, target = line.split()
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, tmp_path / target)
        else:
            (tmp_path / target).mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, tmp_path / target)
    command = [sys.executable, "-m", "engine.native.build", "--help"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": "."}, check=True)


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
    match = re.search(r'python -c "(.*?)" \$\{EXTRAS\}', run)
    assert match is not None
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.chdir(ROOT)
        patch.setattr("sys.argv", ["-c", *extras])
        exec(match[1].strip(), {"print": printed.append})
    return printed[0].split("\n")


def test_image_installs_the_projects_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert _requirements([]) == project["dependencies"]
    both_lists = project["dependencies"] + project["optional-dependencies"]["gpu"]
    assert _requirements(["gpu"]) == both_lists
    (base,) = [arg for arg in _docker("ARG") if arg.startswith("BASE=")]
    version = re.search(r"python:(\d+)\.(\d+)", base)
    assert version is not None and (int(version[1]), int(version[2])) >= (3, 11)


@both
def test_pods_run_this_version_on_its_ray(path: str) -> None:
    doc = manifest(path)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line
    )
    assert doc["spec"]["rayClusterConfig"]["rayVersion"] == pins["ray"]
    images = {container["image"] for _, _, container in groups(doc)}
    suffix = "-gpu" if "gpu" in path else ""
    assert images == {f"manta:{project['version']}{suffix}"}


@both
def test_every_pod_has_the_images_environment(path: str) -> None:
    """Serve reads these at import in the controller, the proxies and the replicas alike."""
    doc = manifest(path)
    image = _docker_env()
    in_loop = "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"
    wrapper, guard = "RAY_SERVE_HAPROXY_BINARY_PATH", "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
    defaults = ("OMP_WAIT_POLICY", "RAY_worker_niceness")
    names = ("RAY_SERVE_ENABLE_HA_PROXY", wrapper, guard, in_loop, *defaults)
    wanted = {name: image[name] for name in names}
    assert wanted["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    (folder,) = _docker("WORKDIR")
    assert wanted[wrapper] == f"{folder}/{WRAPPER.relative_to(ROOT)}"
    assert os.access(WRAPPER, os.X_OK), "Docker copies a file's mode"
    assert wanted[guard] == IMPORT_PATH
    launcher = (ROOT / "deploy/start/launch.py").read_text()
    assert wanted[in_loop] == "0"
    assert f'"{in_loop}": "0"' in (ROOT / "deploy/start/haproxy.py").read_text()
    for name in defaults:
        assert f'env.setdefault("{name}", "{wanted[name]}")' in launcher
    for _, _, container in groups(doc):
        values = env(container)
        assert {k: v for k, v in values.items() if k in wanted} == wanted
        stop_s = float(values["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"])
        assert stop_s == served(doc)["http_options"]["request_timeout_s"]


@both
def test_ports_agree_with_the_config(path: str) -> None:
    doc = manifest(path)
    port = served(doc)["http_options"]["port"]
    for _, _, container in groups(doc):
        ports = {p["name"]: p["containerPort"] for p in container["ports"]}
        assert ports["serve"] == port


def test_serve_accepts_the_config() -> None:
    """As its REST interface reads it, where KubeRay puts it."""
    from ray.serve.schema import ServeDeploySchema

    for path in MANIFESTS:
        config = ServeDeploySchema.model_validate(copy.deepcopy(served(manifest(path))))
        assert [app.name for app in config.applications] == ["llm"]
