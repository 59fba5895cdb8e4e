"""Rendered manifests: what `kubectl kustomize` prints, and how to find things in it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support.source_files import ROOT

Document = dict[str, Any]


def render(folder: Path | str) -> list[Document]:
    """The documents of a kustomization. Raises `RuntimeError` with what kubectl says."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise RuntimeError("there is no kubectl on the PATH")
    path = ROOT / folder
    done = subprocess.run([kubectl, "kustomize", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"kubectl kustomize {folder}: {done.stderr.strip()}")
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def find(documents: list[Document], kind: str, name: str | None = None) -> list[Document]:
    """The documents of a kind, or the one of this name."""
    return [
        document
        for document in documents
        if document["kind"] == kind and name in (None, document["metadata"]["name"])
    ]


def the(documents: list[Document], kind: str, name: str | None = None) -> Document:
    """The only document of a kind and name."""
    (document,) = find(documents, kind, name)
    return document


def groups(service: Document) -> Iterator[Document]:
    """The head's group and each worker group of a RayService, the head's named `head`."""
    cluster = service["spec"]["rayClusterConfig"]
    yield {**cluster["headGroupSpec"], "groupName": "head", "replicas": 1}
    yield from cluster["workerGroupSpecs"]


def served(service: Document) -> dict[str, Any]:
    """The application's config of a RayService."""
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert isinstance(config, dict)
    return config


def matches(labels: dict[str, str], selector: dict[str, Any] | None) -> bool:
    """Whether `matchLabels` of a label selector fit; an empty selector fits all."""
    wanted = (selector or {}).get("matchLabels", {})
    return all(labels.get(key) == value for key, value in wanted.items())
