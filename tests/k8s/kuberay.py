"""What KubeRay 1.7 makes of a RayService: commands, environment and probes of its pods.

From ray-operator/controllers/ray/common (pod.go, constant.go) of KubeRay v1.7.0, as far as `k8s/`
uses it.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from tests.k8s.manifests import Document

GCS_PORT, DASHBOARD_PORT, AGENT_PORT, METRICS_PORT = 6379, 8265, 52365, 8080
_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "k": 10**3, "M": 10**6, "G": 10**9}


def quantity(text: str) -> float:
    """A Kubernetes quantity as a number: "4Gi", "500m", "2"."""
    for unit, factor in _UNITS.items():
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    return float(text.removesuffix("m")) / 1000 if text.endswith("m") else float(text)


def custom_resources(params: dict[str, str]) -> dict[str, float]:
    """Ray's custom resources in a group's rayStartParams. Raises `ValueError` unless they are JSON
    in the quotes that the shell needs."""
    text = params.get("resources")
    if text is None:
        return {}
    words = shlex.split(text)
    try:
        value = json.loads(words[0])
    except (IndexError, ValueError):
        value = None
    if len(words) != 1 or not isinstance(value, dict):
        raise ValueError(f"rayStartParams.resources isn't JSON in quotes: {text}")
    return value


def start_command(service: Document, group: dict[str, Any]) -> list[str]:
    """The command of a pod's Ray container."""
    is_head = group["groupName"] == "head"
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    params = dict(group["rayStartParams"])
    params.setdefault("num-cpus", str(int(quantity(str(limits["cpu"])))))
    params.setdefault("memory", str(int(quantity(str(limits["memory"])))))
    params.setdefault("dashboard-agent-listen-port", str(AGENT_PORT))
    params.setdefault("metrics-export-port", str(METRICS_PORT))
    gpus = limits.get("nvidia.com/gpu")
    if gpus is not None:
        params.setdefault("num-gpus", str(gpus))
    if is_head:
        params.setdefault("dashboard-host", "0.0.0.0")
        if "gcsFaultToleranceOptions" in service["spec"]["rayClusterConfig"]:
            params["redis-password"] = "$REDIS_PASSWORD"
    words = ["--head"] if is_head else [f"--address=$FQ_RAY_IP:{GCS_PORT}"]
    words += ["--block", *(f"--{key}={value} " for key, value in sorted(params.items()))]
    return ["/bin/bash", "-c", "--", f"ulimit -n 65536; ray start {' '.join(words)}"]


def environment(
    service: Document, group: dict[str, Any], cluster: str, pod: str, token: str
) -> dict[str, str]:
    """What KubeRay adds to a container's environment. Secrets are added by the caller."""
    is_head = group["groupName"] == "head"
    head = f"{cluster}-head-svc"
    values = {
        "RAY_CLUSTER_NAME": cluster,
        "RAY_CLOUD_INSTANCE_ID": pod,
        "RAY_NODE_TYPE_NAME": "headgroup" if is_head else group["groupName"],
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_PORT": str(GCS_PORT),
        "RAY_ADDRESS": f"127.0.0.1:{GCS_PORT}" if is_head else f"{head}:{GCS_PORT}",
        "KUBERAY_GEN_RAY_START_CMD": " ".join(start_command(service, group)[3:]),
        "RAY_timeout_ms_task_wait_for_death_info": "0",
        "RAY_gcs_server_request_timeout_seconds": "5",
        "RAY_SERVE_KV_TIMEOUT_S": "5",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
    }
    if not is_head:
        values |= {"FQ_RAY_IP": head, "RAY_IP": head}
    fault_tolerance = service["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions")
    if fault_tolerance is not None:
        values["RAY_gcs_rpc_server_reconnect_timeout_s"] = "600"
        if is_head:
            values["RAY_REDIS_ADDRESS"] = fault_tolerance["redisAddress"]
            values["RAY_external_storage_namespace"] = cluster
    if service["spec"]["rayClusterConfig"].get("enableInTreeAutoscaling"):
        values["RAY_enable_autoscaler_v2"] = "1"
    return values


def probe(group: dict[str, Any], serve_port: int) -> list[str]:
    """The readiness probe of a pod: its own, or the raylet's health and for workers that of Serve's
    proxy."""
    own = group["template"]["spec"]["containers"][0].get("readinessProbe")
    if own is not None:
        return list(own["exec"]["command"])
    raylet = f"wget --tries 1 -T 2 -q -O- http://localhost:{AGENT_PORT}/api/local_raylet_healthz"
    if group["groupName"] == "head":
        gcs = f"wget --tries 1 -T 2 -q -O- http://localhost:{DASHBOARD_PORT}/api/gcs_healthz"
        return ["bash", "-c", f"{raylet} | grep success && {gcs} | grep success"]
    proxy = f"wget --tries 1 -T 2 -q -O- http://localhost:{serve_port}/-/healthz"
    return ["bash", "-c", f"{raylet} | grep success && {proxy} | grep success"]


def dashboard_command(token: str, config: dict[str, Any] | None = None) -> list[str]:
    """A command for the head that prints what the dashboard knows of Serve's applications. With
    `config` it gives the dashboard that config, as the operator's PUT does."""
    script = (
        "import sys, urllib.request as r;"
        "method, timeout, token, body = sys.argv[1:];"
        f"q = r.Request('http://127.0.0.1:{DASHBOARD_PORT}/api/serve/applications/',"
        " body.encode() or None, {'Content-Type': 'application/json',"
        " 'x-ray-authorization': 'Bearer ' + token}, method=method);"
        "print(r.urlopen(q, timeout=int(timeout)).read().decode())"
    )
    if config is None:
        return ["python", "-c", script, "GET", "10", token, ""]
    return ["python", "-c", script, "PUT", "60", token, json.dumps(config)]
