"""Faults that somebody could write into the manifests, each of which the checks find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.k8s.checks import problems
from tests.k8s.manifests import Document, find, the
from tests.support.overlays import needs_kubectl, overlay

pytestmark = needs_kubectl
Fault = Callable[[list[Document]], None]


def _cluster(documents: list[Document]) -> dict[str, Any]:
    cluster = the(documents, "RayService")["spec"]["rayClusterConfig"]
    assert isinstance(cluster, dict)
    return cluster


def _group(documents: list[Document], number: int) -> dict[str, Any]:
    """0: ingress, 1: engines."""
    group = _cluster(documents)["workerGroupSpecs"][number]
    assert isinstance(group, dict)
    return group


def _pod(documents: list[Document], number: int) -> dict[str, Any]:
    spec = _group(documents, number)["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def _container(documents: list[Document], number: int) -> dict[str, Any]:
    container = _pod(documents, number)["containers"][0]
    assert isinstance(container, dict)
    return container


def _rename(where: dict[str, Any], key: str, wrong: str) -> None:
    where[wrong] = where.pop(key)


def _args(documents: list[Document], **changes: Any) -> None:
    spec = the(documents, "RayService")["spec"]
    config = yaml.safe_load(spec["serveConfigV2"])
    config["applications"][0]["args"] |= changes
    spec["serveConfigV2"] = yaml.safe_dump(config)


def _http(documents: list[Document], **changes: Any) -> None:
    spec = the(documents, "RayService")["spec"]
    config = yaml.safe_load(spec["serveConfigV2"])
    config["http_options"] |= changes
    spec["serveConfigV2"] = yaml.safe_dump(config)


def _policy(documents: list[Document], name: str) -> dict[str, Any]:
    spec = the(documents, "NetworkPolicy", name)["spec"]
    assert isinstance(spec, dict)
    return spec


def _store(documents: list[Document]) -> dict[str, Any]:
    stateful = the(documents, "StatefulSet", "manta-request-store")
    container = stateful["spec"]["template"]["spec"]["containers"][0]
    assert isinstance(container, dict)
    return container


def _in_store(documents: list[Document], old: str, new: str) -> None:
    args = _store(documents)["args"]
    assert old in args[0]
    args[0] = args[0].replace(old, new)


def _drop(documents: list[Document], kind: str, name: str) -> None:
    documents.remove(the(documents, kind, name))


FAULTS: dict[str, tuple[str, Fault, str]] = {
    # name: (overlay, what is done, a word of what is found)
    "misspelt key": ("cpu", lambda d: _rename(_group(d, 1), "replicas", "replica"), "replica"),
    "misspelt env": ("cpu", lambda d: _rename(_container(d, 0), "envFrom", "envfrom"), "envfrom"),
    "misspelt selector": (
        "cpu",
        lambda d: _rename(the(d, "Service", "manta")["spec"], "selector", "selectr"),
        "selectr",
    ),
    "port as text": (
        "cpu",
        lambda d: the(d, "Service", "manta")["spec"]["ports"][0].update(port="8000"),
        "8000",
    ),
    "no upgrade type": (
        "cpu",
        lambda d: the(d, "RayService")["spec"]["upgradeStrategy"].update(type="Rolling"),
        "Rolling",
    ),
    "Service port": (
        "cpu",
        lambda d: the(d, "Service", "manta")["spec"]["ports"][0].update(port=80),
        "8000",
    ),
    "target port": (
        "cpu",
        lambda d: the(d, "Service", "manta")["spec"]["ports"][0].update(targetPort="http"),
        "http",
    ),
    "container port": (
        "cpu",
        lambda d: _container(d, 0)["ports"][0].update(containerPort=8001),
        "serve",
    ),
    "port of the application": ("cpu", lambda d: _http(d, port=9000), "9000"),
    "loopback only": ("cpu", lambda d: _http(d, host="127.0.0.1"), "themselves"),
    "Redis port": (
        "cpu",
        lambda d: _cluster(d)["gcsFaultToleranceOptions"].update(redisAddress="manta-redis:6380"),
        "Redis",
    ),
    "Service selector": (
        "cpu",
        lambda d: the(d, "Service", "manta")["spec"]["selector"].update(
            {"app.kubernetes.io/component": "api"}
        ),
        "selects no pod",
    ),
    "budget selector": (
        "cpu",
        lambda d: the(d, "PodDisruptionBudget", "manta-engines")["spec"]["selector"][
            "matchLabels"
        ].update({"app.kubernetes.io/component": "engines"}),
        "selects no pod",
    ),
    "budget blocks drains": (
        "cpu",
        lambda d: the(d, "PodDisruptionBudget", "manta-engines")["spec"].update(maxUnavailable=0),
        "maxUnavailable",
    ),
    "no budget": ("cpu", lambda d: _drop(d, "PodDisruptionBudget", "manta-ingress"), "budget"),
    "pod label": (
        "cpu",
        lambda d: _group(d, 1)["template"]["metadata"]["labels"].update(
            {"app.kubernetes.io/component": "worker"}
        ),
        "worker",
    ),
    "spread": (
        "cpu",
        lambda d: _pod(d, 0)["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"].update(
            {"app.kubernetes.io/component": "engine"}
        ),
        "spread",
    ),
    "too few GPUs": (
        "tp8",
        lambda d: [
            _container(d, 1)["resources"][k].update({"nvidia.com/gpu": 4})
            for k in ("requests", "limits")
        ],
        "GPU",
    ),
    "idle GPUs": (
        "gpu",
        lambda d: [
            _container(d, 1)["resources"][k].update({"nvidia.com/gpu": 2})
            for k in ("requests", "limits")
        ],
        "GPU",
    ),
    "one host of two": ("pp2-two-hosts", lambda d: _group(d, 1).update(numOfHosts=1), "GPU"),
    "too few pods": ("gpu", lambda d: _group(d, 1).update(maxReplicas=2), "no pod has room"),
    "head with CPUs": (
        "cpu",
        lambda d: _cluster(d)["headGroupSpec"]["rayStartParams"].update({"num-cpus": "1"}),
        "head",
    ),
    "no room for ingresses": (
        "cpu",
        lambda d: _group(d, 0)["rayStartParams"].pop("resources"),
        "no pod has room",
    ),
    "resources not quoted": (
        "cpu",
        lambda d: _group(d, 1)["rayStartParams"].update(resources='{"manta_engine": 1}'),
        "quotes",
    ),
    "grace period": (
        "cpu",
        lambda d: _pod(d, 1).update(terminationGracePeriodSeconds=60),
        "too few",
    ),
    "no preStop": ("cpu", lambda d: _container(d, 0).pop("lifecycle"), "preStop"),
    "engines end first": (
        "cpu",
        lambda d: _container(d, 1)["lifecycle"]["preStop"]["exec"].update(command=["sleep", "5"]),
        "refuse requests",
    ),
    "drain of Ray": (
        "cpu",
        lambda d: _container(d, 1)["env"][0].update(value="30"),
        "drains",
    ),
    "drain of the streams": ("cpu", lambda d: _args(d, drain_timeout_s=600), "600"),
    "missing volume": ("cpu", lambda d: _pod(d, 1)["volumes"].pop(1), "no volume"),
    "unused volume": (
        "cpu",
        lambda d: _pod(d, 1)["volumes"].append({"name": "x", "emptyDir": {}}),
        "nothing mounts",
    ),
    "missing claim": ("gpu", lambda d: _drop(d, "PersistentVolumeClaim", "manta-models"), "Claim"),
    "missing Secret": ("cpu", lambda d: _drop(d, "Secret", "manta-keys"), "manta-keys"),
    "missing ConfigMap": (
        "cpu",
        lambda d: _container(d, 0)["envFrom"][0]["configMapRef"].update(name="other"),
        "ConfigMap",
    ),
    "keys as subPath": (
        "cpu",
        lambda d: _container(d, 0)["volumeMounts"][1].update(subPath="keys.yaml"),
        "no volume at",
    ),
    "keys elsewhere": ("cpu", lambda d: _args(d, api_keys_file="/etc/keys.yaml"), "no volume at"),
    "another model": (
        "gpu",
        lambda d: the(d, "Job")["spec"]["template"]["spec"]["containers"][0]["env"][0].update(
            value="meta-llama/Llama-3.2-1B"
        ),
        "downloads",
    ),
    "token in the manifest": (
        "cpu",
        lambda d: _container(d, 0)["env"].append({"name": "API_KEY", "value": "sk-1"}),
        "stands in the manifest",
    ),
    "hub's token in engines": (
        "gpu",
        lambda d: _container(d, 1)["env"].append(
            {
                "name": "HF_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": "manta-hub", "key": "token"}},
            }
        ),
        "hub's token",
    ),
    "root": ("cpu", lambda d: _pod(d, 1)["securityContext"].update(runAsNonRoot=False), "root"),
    "writable root": (
        "cpu",
        lambda d: _container(d, 1)["securityContext"].update(readOnlyRootFilesystem=False),
        "restricted",
    ),
    "host network": ("cpu", lambda d: _pod(d, 1).update(hostNetwork=True), "host"),
    "service account": (
        "cpu",
        lambda d: _pod(d, 0).update(automountServiceAccountToken=True),
        "service account",
    ),
    "no token of Ray": (
        "cpu",
        lambda d: _cluster(d)["authOptions"].update(mode="disabled"),
        "token",
    ),
    "dashboard for everybody": (
        "cpu",
        lambda d: _policy(d, "manta-api")["ingress"][0]["ports"].append({"port": 8265}),
        "everybody",
    ),
    "no policy": ("cpu", lambda d: _drop(d, "NetworkPolicy", "manta"), "open"),
    "Redis for all": (
        "cpu",
        lambda d: _policy(d, "manta-redis")["ingress"][0]["from"][0]["podSelector"][
            "matchLabels"
        ].pop("app.kubernetes.io/component"),
        "reaches Redis",
    ),
    "nobody may call the store": (
        "cpu",
        lambda d: _drop(d, "NetworkPolicy", "manta-keeps-requests"),
        "ingress may not call",
    ),
    "the store lets nobody in": (
        "cpu",
        lambda d: _policy(d, "manta-request-store").pop("ingress"),
        "doesn't let ingress call",
    ),
    "the store for engines": (
        "cpu",
        lambda d: _policy(d, "manta-request-store")["ingress"][0]["from"][0]["podSelector"][
            "matchLabels"
        ].pop("app.kubernetes.io/component"),
        "lets engines in",
    ),
    "engines may call the store": (
        "cpu",
        lambda d: _policy(d, "manta")["egress"][1]["to"].append(
            {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "manta-request-store"}}}
        ),
        "engines may call the store",
    ),
    "the store for other namespaces": (
        "cpu",
        lambda d: _policy(d, "manta-request-store")["ingress"][0]["from"].append(
            {"namespaceSelector": {}}
        ),
        "other namespaces",
    ),
    "the store calls others": (
        "cpu",
        lambda d: _policy(d, "manta-request-store").update(egress=[{"ports": [{"port": 443}]}]),
        "call others",
    ),
    "no Service of the store": (
        "cpu",
        lambda d: _args(d, request_store_url="redis://manta-requests:6379/0"),
        "no store of requests at",
    ),
    "port of the store": (
        "cpu",
        lambda d: the(d, "Service", "manta-request-store")["spec"]["ports"][0].update(port=6380),
        "no store of requests at",
    ),
    "requests in Ray's Redis": (
        "cpu",
        lambda d: _args(d, request_store_url="redis://manta-redis:6379/1"),
        "fill the Redis of Ray",
    ),
    "requests in a pod": ("cpu", lambda d: _args(d, request_store="sqlite"), "another pod"),
    "files in a pod": ("cpu", lambda d: _args(d, file_store=None), "files of its own"),
    "files without a volume": ("cpu", lambda d: _args(d, file_store="/files"), "no volume"),
    "no password of the store": (
        "cpu",
        lambda d: _container(d, 0)["env"].pop(),
        "ingress has None",
    ),
    "another password of the store": (
        "cpu",
        lambda d: _container(d, 0)["env"][-1]["valueFrom"]["secretKeyRef"].update(
            name="manta-redis"
        ),
        "ingress has",
    ),
    "password of the store in engines": (
        "cpu",
        lambda d: _container(d, 1)["env"].append(_container(d, 0)["env"][-1]),
        "engines has",
    ),
    "password in the address": (
        "cpu",
        lambda d: _args(d, request_store_url="redis://:secret@manta-request-store:6379/0"),
        "stands in the configuration",
    ),
    "no Secret of the store": (
        "cpu",
        lambda d: _store(d)["env"][0]["valueFrom"]["secretKeyRef"].update(name="manta-requests"),
        "no Secret manta-requests",
    ),
    "the store takes all memory": (
        "cpu",
        lambda d: _in_store(d, "--maxmemory 4gb ", ""),
        "no memory for",
    ),
    "the store drops records": (
        "cpu",
        lambda d: _in_store(d, "noeviction", "allkeys-lru"),
        "drops what it has",
    ),
    "more requests than memory": (
        "cpu",
        lambda d: _args(d, request_store_max_bytes=2 << 30),
        "too few for",
    ),
    "no memory to rewrite": (
        "cpu",
        lambda d: _store(d)["resources"]["limits"].update(memory="4Gi"),
        "rewrite its file",
    ),
    "a small volume of the store": (
        "cpu",
        lambda d: the(d, "StatefulSet", "manta-request-store")["spec"]["volumeClaimTemplates"][0][
            "spec"
        ]["resources"]["requests"].update(storage="8Gi"),
        "second file",
    ),
    "the store isn't written to disk": (
        "cpu",
        lambda d: _in_store(d, "--appendfsync always", "--appendfsync no"),
        "forgets",
    ),
    "no way between pods": (
        "cpu",
        lambda d: _policy(d, "manta")["egress"].pop(0),
        "may not call",
    ),
    "HAProxy cuts streams": (
        "cpu",
        lambda d: find(d, "ConfigMap")[0]["data"].update(RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S="120"),
        "HAProxy",
    ),
    "Ray's version": ("cpu", lambda d: _cluster(d).update(rayVersion="2.50.0"), "rayVersion"),
    "KubeRay's probe on two hosts": (
        "pp2-two-hosts",
        lambda d: _container(d, 1).pop("readinessProbe"),
        "readiness probe",
    ),
    "no shared memory": (
        "tp8",
        lambda d: _container(d, 1)["volumeMounts"].pop(),
        "/dev/shm",
    ),
    "no shared memory on two hosts": (
        "pp2-two-hosts",
        lambda d: _pod(d, 1)["volumes"][-1].update(emptyDir={"sizeLimit": "8Gi"}),
        "/dev/shm",
    ),
    "too little shared memory": (
        "tp8",
        lambda d: _pod(d, 1)["volumes"][-1]["emptyDir"].update(sizeLimit="64Mi"),
        "/dev/shm",
    ),
    "shared memory without a limit": (
        "tp8",
        lambda d: _pod(d, 1)["volumes"][-1]["emptyDir"].pop("sizeLimit"),
        "/dev/shm",
    ),
    "ranks without shared memory": ("gpu", lambda d: _args(d, pp_size=2), "/dev/shm"),
    "own probe": (
        "cpu",
        lambda d: _container(d, 1).update(readinessProbe={"tcpSocket": {"port": 8000}}),
        "probes",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    kind, fault, word = FAULTS[name]
    documents = overlay(kind)
    fault(documents)
    found = problems(documents)
    assert found and any(word in text for text in found), found
