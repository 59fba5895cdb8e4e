"""Every overlay renders and holds what `tests/k8s/checks.py` asks of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from scripts import render_k8s
from tests.k8s.checks import problems
from tests.k8s.manifests import find, groups, render, served, the
from tests.support.overlays import OVERLAYS, needs_kubectl, overlay, with_components
from tests.support.source_files import ROOT

every = pytest.mark.parametrize("name", OVERLAYS)
pytestmark = needs_kubectl


@pytest.fixture
def folder() -> Iterator[str]:
    """A folder of the repository: kustomize takes no absolute paths."""
    path = ROOT / "k8s" / ".test-overlay"
    path.mkdir(exist_ok=True)
    yield str(path.relative_to(ROOT))
    shutil.rmtree(path)


@every
def test_nothing_is_wrong(name: str) -> None:
    assert problems(overlay(name)) == []


@every
def test_nothing_is_wrong_with_all_components(name: str, folder: str) -> None:
    (ROOT / folder / "kustomization.yaml").write_text(with_components(name, folder))
    documents = render(folder)
    kinds = {document["kind"] for document in documents}
    assert {"Ingress", "HTTPRoute", "PodMonitor", "PrometheusRule"} <= kinds
    assert problems(documents) == []


def test_files_have_a_volume_that_all_ingresses_write_to(folder: str) -> None:
    (ROOT / folder / "kustomization.yaml").write_text(with_components("gpu", folder))
    documents = render(folder)
    service = the(documents, "RayService")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    config["applications"][0]["args"]["file_store"] = "/files"
    service["spec"]["serveConfigV2"] = yaml.safe_dump(config)
    assert problems(documents) == []
    ingress, engines = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    claim = the(documents, "PersistentVolumeClaim", "manta-files")
    mount = ingress["template"]["spec"]["containers"][0]["volumeMounts"][-1]
    pod = engines["template"]["spec"]
    faults = [
        (claim["spec"], {"accessModes": ["ReadWriteOnce"]}),
        (mount, {"readOnly": True}),
        (mount, {"mountPath": "/file"}),
        (pod["containers"][0]["volumeMounts"][-1], {"readOnly": False}),
        (ingress["template"]["spec"]["securityContext"], {"fsGroup": 2000}),
    ]
    for where, change in faults:
        before = dict(where)
        where |= change
        (found,) = problems(documents)
        assert found.startswith("files: "), (change, found)
        where.clear()
        where |= before
    assert problems(documents) == []


@every
def test_an_overlay_has_what_it_needs(name: str) -> None:
    kinds = sorted(document["kind"] for document in overlay(name))
    wanted = ["ConfigMap", *["NetworkPolicy"] * 6, *["PodDisruptionBudget"] * 2]
    wanted += ["RayService", "Secret", *["Service"] * 3, *["StatefulSet"] * 2]
    if name != "cpu":
        wanted += ["Job", "NetworkPolicy", "PersistentVolumeClaim"]
    assert kinds == sorted(wanted)


@every
def test_serves_its_config_file(name: str) -> None:
    config, changes = render_k8s.OVERLAYS[name]
    pods = served(the(overlay(name), "RayService"))
    text = yaml.safe_load((ROOT / config).read_text())
    text["http_options"]["host"] = "0.0.0.0"
    differing = set(render_k8s.EVERYWHERE) | set(changes)
    for document in (pods, text):
        args = document["applications"][0]["args"]
        document["applications"][0]["args"] = {k: args[k] for k in args.keys() - differing}
    assert pods == text


def test_generated_files_are_up_to_date() -> None:
    assert render_k8s.main(["--check"]) == 0


def test_check_names_a_stale_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in ("configs", "k8s"):
        shutil.copytree(ROOT / part, tmp_path / part)
    monkeypatch.setattr(render_k8s, "ROOT", tmp_path)
    config = tmp_path / "configs/llama.yaml"
    config.write_text(config.read_text().replace("page_size: 16", "page_size: 32"))
    assert render_k8s.main(["--check"]) == 1
    error = capsys.readouterr().err
    assert "overlays/cpu/serve-config.yaml" in error and "overlays/gpu" not in error
    assert render_k8s.main([]) == 0 and render_k8s.main(["--check"]) == 0
    assert "page_size: 32" in (tmp_path / "k8s/overlays/cpu/serve-config.yaml").read_text()


@every
def test_pods_run_this_version(name: str) -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    suffix = "" if name == "cpu" else "-gpu"
    for group in groups(the(overlay(name), "RayService")):
        spec = group["template"]["spec"]
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            assert container["image"] == f"manta:{project['version']}{suffix}"


def test_a_changed_environment_has_another_name(tmp_path: Path) -> None:
    """KubeRay starts a new cluster if a template changes; a ConfigMap alone changes nothing."""
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    before = find(render(tmp_path / "k8s/overlays/cpu"), "ConfigMap")[0]["metadata"]["name"]
    env = tmp_path / "k8s/base/environment.env"
    env.write_text(env.read_text() + "A=b\n")
    documents = render(tmp_path / "k8s/overlays/cpu")
    (after,) = (config["metadata"]["name"] for config in find(documents, "ConfigMap"))
    assert after != before
    for group in groups(the(documents, "RayService")):
        (source,) = group["template"]["spec"]["containers"][0]["envFrom"]
        assert source["configMapRef"]["name"] == after
