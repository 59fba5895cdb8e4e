"""What must hold for a rendered overlay. Each check yields sentences about what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import kubernetes_validate
import yaml

from deploy.options import ServerOptions
from deploy.serve_state.drain_watch import HANDOVER_S
from tests.k8s.kuberay import custom_resources, quantity
from tests.k8s.manifests import Document, find, groups, matches, served, the
from tests.k8s.placement import misfits
from tests.support.source_files import ROOT

KUBERNETES = "1.31"
SCHEMAS = Path(__file__).with_name("schemas")
BY_HAND = {"manta-redis", "manta-request-store", "manta-hub", "manta-metrics-key", "manta-tls"}
"""Secrets that README tells to create."""
REDIS, STORE = "manta-redis", "manta-request-store"
"""The Redis of Ray, and that of requests."""
STORE_PASSWORD = "MANTA_REQUEST_STORE_PASSWORD"
STORE_OVERHEAD = 3
"""Times as much memory as `request_store_max_bytes` counts, for requests of a few hundred bytes."""
USER = 1000
ENDING_S = 10
"""For the processes of a pod to end after Ray's drain."""
SHARED_MEMORY_BYTES = 1 << 30
"""What NCCL needs of /dev/shm (docs/gpu.md)."""
Check = Callable[[list[Document]], Iterator[str]]


def problems(documents: list[Document]) -> list[str]:
    """All that is wrong with an overlay."""
    found = list(schemas(documents))
    if found:  # the others rely on it
        return found
    return [f"{check.__name__}: {text}" for check in CHECKS for text in check(documents)]


@cache
def _schema(kind: str) -> jsonschema.Draft202012Validator | None:
    path = SCHEMAS / f"{kind}.json"
    if not path.is_file():
        return None
    return jsonschema.Draft202012Validator(json.loads(path.read_text()))


def schemas(documents: list[Document]) -> Iterator[str]:
    """Every document fits its kind's schema, and no two have one name."""
    names: set[tuple[str, str]] = set()
    for document in documents:
        kind = document.get("kind", "(no kind)")
        own = _schema(kind)
        if own is not None:
            for error in own.iter_errors(document):
                yield f"{kind} {error.json_path}: {error.message}"
        else:
            try:
                kubernetes_validate.validate(document, KUBERNETES, strict=True)
            except kubernetes_validate.ValidationError as error:
                yield f"{kind} {'.'.join(map(str, error.path))}: {error.message}"
            except kubernetes_validate.SchemaNotFoundError as error:
                yield f"{kind}: {error.message}"
        name = (kind, document.get("metadata", {}).get("name", ""))
        if name in names:
            yield f"two {kind} named {name[1]}"
        names.add(name)


def _service(documents: list[Document]) -> Document:
    return the(documents, "RayService")


def _templates(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """(name, pod template) of all pods."""
    for group in groups(_service(documents)):
        yield group["groupName"], group["template"]
    for kind in ("StatefulSet", "Job"):
        for document in find(documents, kind):
            yield document["metadata"]["name"], document["spec"]["template"]


def _containers(template: Document) -> list[Document]:
    spec = template["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def _labels(template: Document) -> dict[str, str]:
    labels = template["metadata"]["labels"]
    assert isinstance(labels, dict)
    return labels


def references(documents: list[Document]) -> Iterator[str]:
    """What pods name exists: Secrets and their keys, ConfigMaps, claims, volumes."""
    maps = {d["metadata"]["name"] for d in find(documents, "ConfigMap")}
    claims = {d["metadata"]["name"] for d in find(documents, "PersistentVolumeClaim")}
    secrets = {d["metadata"]["name"] for d in find(documents, "Secret")} | BY_HAND
    for stateful in find(documents, "StatefulSet"):
        for claim in stateful["spec"]["volumeClaimTemplates"]:
            claims.add(claim["metadata"]["name"])
    for name, template in _templates(documents):
        volumes = {volume["name"]: volume for volume in template["spec"].get("volumes", [])}
        for volume in volumes.values():
            secret = volume.get("secret", {}).get("secretName")
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if secret is not None and secret not in secrets:
                yield f"{name}: there is no Secret {secret}"
            if claim is not None and claim not in claims:
                yield f"{name}: there is no PersistentVolumeClaim {claim}"
        mounted = set()
        for container in _containers(template):
            for mount in container.get("volumeMounts", []):
                mounted.add(mount["name"])
                if mount["name"] not in volumes and mount["name"] not in claims:
                    yield f"{name}: there is no volume {mount['name']}"
            for source in container.get("envFrom", []):
                if source["configMapRef"]["name"] not in maps:
                    yield f"{name}: there is no ConfigMap {source['configMapRef']['name']}"
            for entry in container.get("env", []):
                reference = entry.get("valueFrom", {}).get("secretKeyRef")
                if reference is not None and reference["name"] not in secrets:
                    yield f"{name}: there is no Secret {reference['name']}"
        for unused in set(volumes) - mounted:
            yield f"{name}: nothing mounts the volume {unused}"


def selectors(documents: list[Document]) -> Iterator[str]:
    """Every selector finds pods."""
    pods = [_labels(template) for _, template in _templates(documents)]

    def finds(what: str, selector: dict[str, Any]) -> Iterator[str]:
        if not selector.get("matchLabels") or not any(matches(pod, selector) for pod in pods):
            yield f"{what} selects no pod"

    for document in documents:
        kind, name, spec = document["kind"], document["metadata"]["name"], document.get("spec", {})
        if kind == "Service":
            yield from finds(f"Service {name}", {"matchLabels": spec["selector"]})
        elif kind in ("PodDisruptionBudget", "PodMonitor", "StatefulSet"):
            yield from finds(f"{kind} {name}", spec["selector"])
        elif kind == "NetworkPolicy":
            yield from finds(f"NetworkPolicy {name}", spec["podSelector"])
            for rule in [*spec.get("ingress", []), *spec.get("egress", [])]:
                for peer in [*rule.get("from", []), *rule.get("to", [])]:
                    if "namespaceSelector" not in peer:
                        yield from finds(f"a peer of NetworkPolicy {name}", peer["podSelector"])
    for name, template in _templates(documents):
        for spread in template["spec"].get("topologySpreadConstraints", []):
            if not matches(_labels(template), spread["labelSelector"]):
                yield f"{name}: its spread doesn't select its own pods"
    components = [_labels(t)["app.kubernetes.io/component"] for _, t in _ray_pods(documents)]
    if components != ["head", "ingress", "engine"]:
        yield f"the groups' components are {components}"


def _ray_pods(documents: list[Document]) -> Iterator[tuple[dict[str, Any], Document]]:
    for group in groups(_service(documents)):
        yield group, group["template"]


def ports(documents: list[Document]) -> Iterator[str]:
    """Services, routes and monitors lead to ports that pods have, and the API is on its port."""
    http = int(served(_service(documents))["http_options"]["port"])
    templates = list(_templates(documents))
    services: dict[str, list[Document]] = {}
    for service in find(documents, "Service"):
        services[service["metadata"]["name"]] = service["spec"]["ports"]
        for name, template in templates:
            if matches(_labels(template), {"matchLabels": service["spec"]["selector"]}):
                named = _port_names(template)
                for port in service["spec"]["ports"]:
                    if port["targetPort"] not in named:
                        yield f"{name} has no port {port['targetPort']}"
    for group, template in _ray_pods(documents):
        if _port_names(template).get("serve") != http:
            yield f"{group['groupName']}: its port `serve` isn't {http}"
    api = services.get("manta", [])
    for ingress in find(documents, "Ingress"):
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                backend = path["backend"]["service"]
                known = [port["name"] for port in services.get(backend["name"], [])]
                if backend["port"]["name"] not in known:
                    yield f"Ingress: Service {backend['name']} has no port {backend['port']}"
    for route in find(documents, "HTTPRoute"):
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                if backend["port"] not in [p["port"] for p in services.get(backend["name"], [])]:
                    yield f"HTTPRoute: Service {backend['name']} has no port {backend['port']}"
    if [port["port"] for port in api] != [http]:
        yield f"Service manta isn't on {http}"
    redis = _service(documents)["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    host, _, number = redis["redisAddress"].partition(":")
    if int(number) not in [port["port"] for port in services.get(host, [])]:
        yield f"there is no Redis at {redis['redisAddress']}"
    for monitor in find(documents, "PodMonitor"):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            if endpoint["port"] not in ("serve", "metrics"):
                yield f"PodMonitor: no pod has a port {endpoint['port']}"
    for kind in ("Ingress", "HTTPRoute"):
        for document in find(documents, kind):
            text = json.dumps(document["spec"])
            for private in ("/metrics", "/debug", "/-/", '"/"'):
                if private in text:
                    yield f"{kind} lets {private} out"


def _port_names(template: Document) -> dict[str, int]:
    (container,) = template["spec"]["containers"]
    return {port["name"]: port["containerPort"] for port in container.get("ports", [])}


def policies(documents: list[Document]) -> Iterator[str]:
    """Every pod is closed but for what it needs."""
    every = find(documents, "NetworkPolicy")
    for name, template in _templates(documents):
        for direction in ("Ingress", "Egress"):
            if not any(
                matches(_labels(template), policy["spec"]["podSelector"])
                and direction in policy["spec"]["policyTypes"]
                for policy in every
            ):
                yield f"{name} is open: no policy for {direction}"
    http = int(served(_service(documents))["http_options"]["port"])
    for policy in every:
        spec = policy["spec"]
        for rule in spec.get("ingress", []):
            if not rule.get("from") and [p["port"] for p in rule.get("ports", [])] != [http]:
                yield f"{policy['metadata']['name']} lets everybody in beyond port {http}"
    labels = {group["groupName"]: _labels(template) for group, template in _ray_pods(documents)}
    redis, store = ({"app.kubernetes.io/name": name} for name in (REDIS, STORE))
    wanted = [
        ("ingress", labels["ingress"], store, 6379),
        ("ingress", labels["ingress"], labels["head"], 6379),
        ("engines", labels["engines"], labels["ingress"], 40000),
        ("head", labels["head"], labels["engines"], 52365),
        ("head", labels["head"], redis, 6379),
    ]
    for name, source, target, port in wanted:
        if not _allows(every, "Egress", source, target, port):
            yield f"{name} may not call port {port} of {target}"
        if not _allows(every, "Ingress", target, source, port):
            yield f"{target} doesn't let {name} call port {port}"
    for name in ("ingress", "engines"):
        if _allows(every, "Ingress", redis, labels[name], 6379):
            yield f"{name} reaches Redis"
    for name in ("head", "engines"):
        if _allows(every, "Ingress", store, labels[name], 6379):
            yield f"the store of requests lets {name} in"
        if _allows(every, "Egress", labels[name], store, 6379):
            yield f"{name} may call the store of requests"
    for own in (redis, store):
        for policy in (p for p in every if matches(own, p["spec"]["podSelector"])):
            if policy["spec"].get("egress"):
                yield f"{policy['metadata']['name']} lets a Redis call others"
            for peer in [p for r in policy["spec"].get("ingress", []) for p in r.get("from", [])]:
                if "namespaceSelector" in peer:
                    yield f"{policy['metadata']['name']} lets other namespaces reach a Redis"


def _allows(
    every: list[Document], direction: str, own: dict[str, str], peer: dict[str, str], port: int
) -> bool:
    for policy in every:
        spec = policy["spec"]
        if direction not in spec["policyTypes"] or not matches(own, spec["podSelector"]):
            continue
        for rule in spec.get(direction.lower(), []):
            peers = rule.get("from" if direction == "Ingress" else "to")
            numbers = [entry["port"] for entry in rule.get("ports", [])]
            if (not numbers or port in numbers) and (
                not peers
                or any(
                    "namespaceSelector" not in entry and matches(peer, entry["podSelector"])
                    for entry in peers
                )
            ):
                return True
    return False


def ends(documents: list[Document]) -> Iterator[str]:
    """A pod's grace period holds its hook, Ray's drain and the end of its processes; Ray's drain
    holds the streams' time and the handover (k8s/README.md#how-long-an-end-takes)."""
    (app,) = served(_service(documents))["applications"]
    streams = float(app["args"].get("drain_timeout_s", 0))
    pauses = {}
    for group, template in _ray_pods(documents):
        name, (container,) = group["groupName"], template["spec"]["containers"]
        if name == "head":
            continue
        hook = container.get("lifecycle", {}).get("preStop")
        if hook is None:
            yield f"{name} has no preStop"
            continue
        word, pause = hook["exec"]["command"]
        pauses[name] = float(pause)
        values = {entry["name"]: entry.get("value") for entry in container.get("env", [])}
        drain = float(values.get("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S") or 0)
        if drain < streams + HANDOVER_S + ENDING_S:
            yield f"{name}: Ray drains for {drain:.0f} s, the streams have {streams:.0f} s"
        grace = template["spec"].get("terminationGracePeriodSeconds", 30)
        if word != "sleep" or grace < float(pause) + drain + ENDING_S:
            yield f"{name}: {grace} s are too few for {pause} + {drain:.0f} + {ENDING_S}"
    if pauses and pauses.get("engines", 0) < pauses.get("ingress", 0) + 5:
        yield "engines refuse requests before the Service has forgotten their ingresses"


def room(documents: list[Document]) -> Iterator[str]:
    """Pods hold the application, and no GPU is idle."""
    try:
        yield from misfits(_service(documents))
    except ValueError as error:
        yield str(error)


def shared_memory(documents: list[Document]) -> Iterator[str]:
    """Pods with several ranks have a /dev/shm for NCCL: a pod's own has 64 MiB."""
    service = _service(documents)
    (app,) = served(service)["applications"]
    if app["args"].get("tp_size", 1) * app["args"].get("pp_size", 1) == 1:
        return
    for group, template in _ray_pods(documents):
        if group["groupName"] != "engines":
            continue
        (container,) = template["spec"]["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        folder = volumes.get(mounts.get("/dev/shm", ""), {}).get("emptyDir", {})
        size = quantity(str(folder.get("sizeLimit", 0)))
        if folder.get("medium") != "Memory" or size < SHARED_MEMORY_BYTES:
            yield f"engines: /dev/shm isn't {SHARED_MEMORY_BYTES >> 30} GiB or more in memory"
        elif size >= quantity(str(container["resources"]["limits"]["memory"])):
            yield "engines: /dev/shm may take all of the container's memory"


def operator_rules(documents: list[Document]) -> Iterator[str]:
    """What KubeRay refuses or misunderstands although its schema allows it."""
    service = _service(documents)
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?", service["metadata"]["name"]):
        yield "the name of the RayService is too long or no DNS label"
    kinds = ("NewCluster", "NewClusterWithIncrementalUpgrade", "None")
    if service["spec"]["upgradeStrategy"]["type"] not in kinds:
        yield f"there is no upgrade of type {service['spec']['upgradeStrategy']['type']}"
    cluster = service["spec"]["rayClusterConfig"]
    if cluster.get("authOptions", {}).get("mode") != "token":
        yield "Ray asks for no token"
    if not service["spec"].get("excludeHeadPodFromServeSvc"):
        yield "the head is in the Service, but no replica runs there"
    for group, template in _ray_pods(documents):
        name, (container,) = group["groupName"], template["spec"]["containers"]
        if "resources" in group:
            yield f"{name}: KubeRay refuses `resources` beside rayStartParams"
        if not all(isinstance(value, str) for value in group["rayStartParams"].values()):
            yield f"{name}: values of rayStartParams are words of a command line"
        try:
            custom_resources(group["rayStartParams"])
        except ValueError as error:
            yield f"{name}: {error}"
        own = {"livenessProbe", "readinessProbe"} & set(container)
        if group.get("numOfHosts", 1) > 1:
            if own != {"readinessProbe"}:
                yield f"{name}: pods without a Serve replica need a readiness probe of their own"
        elif own:
            yield f"{name}: KubeRay's own probes know the Serve proxy"
        if name == "head":
            if template["spec"].get("automountServiceAccountToken") is False:
                yield "the autoscaler needs the head's service account"
        elif not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            yield f"{name}: replicas aren't between minReplicas and maxReplicas"
    version = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line
    )["ray"]
    if cluster["rayVersion"] != version:
        yield f"rayVersion isn't {version}"


def security(documents: list[Document]) -> Iterator[str]:
    """Pods have no rights that they don't need, and secrets are references."""
    for name, template in _templates(documents):
        spec = template["spec"]
        context = spec.get("securityContext", {})
        if context.get("runAsNonRoot") is not True or not context.get("runAsUser"):
            yield f"{name} may run as root"
        if name not in (REDIS, STORE) and context.get("runAsUser") != USER:
            yield f"{name} isn't the image's user"
        if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{name} has no seccomp profile"
        if name != "head" and spec.get("automountServiceAccountToken") is not False:
            yield f"{name} gets a service account's token"
        if any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")):
            yield f"{name} shares the host's namespaces"
        if any("hostPath" in volume for volume in spec.get("volumes", [])):
            yield f"{name} mounts a folder of the host"
        for container in _containers(template):
            wanted = {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            if container.get("securityContext") != wanted:
                yield f"{name}: container {container['name']} isn't restricted"
            for entry in container.get("env", []):
                is_secret = re.search("TOKEN|KEY|SECRET|PASSWORD", entry["name"])
                if is_secret and "secretKeyRef" not in entry.get("valueFrom", {}):
                    yield f"{name}: {entry['name']} stands in the manifest"
                if entry["name"] == "HF_TOKEN" and name != "manta-download":
                    yield f"{name} has the hub's token"
    for secret in find(documents, "Secret"):
        if secret["metadata"]["name"] != "manta-keys":
            yield f"Secret {secret['metadata']['name']} is in the repository"


def application(documents: list[Document]) -> Iterator[str]:
    """Serve takes the config, and its keys' file is where the Secret is mounted."""
    from ray.serve.schema import ServeDeploySchema

    service = _service(documents)
    config = served(service)
    ServeDeploySchema.model_validate(config)
    if config["http_options"]["host"] != "0.0.0.0":
        yield "pods serve nobody but themselves"
    (app,) = config["applications"]
    path = Path(app["args"].get("api_keys_file", "/"))
    for group, template in _ray_pods(documents):
        (container,) = template["spec"]["containers"]
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        mount = mounts.get(str(path.parent))
        if mount is None or "subPath" in mount:
            yield f"{group['groupName']}: no volume at {path.parent}"
        model = app["args"]["model"]
        if model.startswith("/") and not any(model.startswith(f"{where}/") for where in mounts):
            yield f"{group['groupName']}: no volume has {model}"
    for secret in find(documents, "Secret", "manta-keys"):
        if path.name not in secret.get("data", {}):
            yield f"Secret manta-keys has no {path.name}"
    for job in find(documents, "Job"):
        for container in job["spec"]["template"]["spec"]["containers"]:
            value = next(e["value"] for e in container["env"] if e["name"] == "MODEL")
            if app["args"]["model"] != f"/models/{value}":
                yield f"the Job downloads {value}, but {app['args']['model']} is served"
    waits = [c for _, t in _ray_pods(documents) for c in t["spec"].get("initContainers", [])]
    for container in waits:
        if app["args"]["model"] != f"/models/{container['env'][0]['value']}":
            yield f"pods wait for {container['env'][0]['value']}"
    stop = the(documents, "ConfigMap", environment_name(service))["data"]
    if float(stop["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) != config["http_options"].get(
        "request_timeout_s"
    ):
        yield "HAProxy cuts streams before request_timeout_s"


def kept_requests(documents: list[Document]) -> Iterator[str]:
    """Requests are kept in a Redis of their own, which has room for them, and whose password only
    ingresses have."""
    service = _service(documents)
    (app,) = served(service)["applications"]
    options = ServerOptions.model_validate(
        {k: v for k, v in app["args"].items() if k in ServerOptions.model_fields}
    )
    if options.request_store != "redis":
        yield f"request_store: {options.request_store}: another pod can't read a stream on"
        return
    url = urlsplit(options.request_store_url or "")
    found = [
        stateful["spec"]["template"]["spec"]["containers"][0]
        for stateful in find(documents, "StatefulSet", url.hostname or "")
        for home in find(documents, "Service", url.hostname)
        if url.port in [port["port"] for port in home["spec"]["ports"]]
        and matches(
            _labels(stateful["spec"]["template"]), {"matchLabels": home["spec"]["selector"]}
        )
    ]
    if not found:
        yield f"there is no store of requests at {options.request_store_url}"
        return
    if url.hostname == REDIS:
        yield "requests would fill the Redis of Ray"
    if url.password is not None:
        yield "the password of the store stands in the configuration"
    password = _secrets(found[0]).get("REDIS_PASSWORD")
    for group, template in _ray_pods(documents):
        own = _secrets(template["spec"]["containers"][0]).get(STORE_PASSWORD)
        wanted = password if group["groupName"] == "ingress" else None
        if own != wanted:
            yield f"{group['groupName']} has {own} as the password of the store, not {wanted}"
    (script,) = found[0]["args"]
    most = re.search(r"--maxmemory (\d+)gb ", script)
    if most is None or "--maxmemory-policy noeviction" not in script:
        yield "the store of requests takes what it has no memory for, or drops what it has"
        return
    gib = 1 << 30
    if int(most[1]) * gib < STORE_OVERHEAD * options.request_store_max_bytes:
        yield f"{most[1]} GiB are too few for {options.request_store_max_bytes} bytes of requests"
    if quantity(str(found[0]["resources"]["limits"]["memory"])) < 1.5 * int(most[1]) * gib:
        yield "the store of requests has no memory to rewrite its file"
    (claim,) = the(documents, "StatefulSet", url.hostname)["spec"]["volumeClaimTemplates"]
    if quantity(claim["spec"]["resources"]["requests"]["storage"]) < 3 * int(most[1]) * gib:
        yield "the volume of the store of requests has no room for a second file"
    if "--appendonly yes --appendfsync always" not in script:
        yield "the store of requests forgets what it took"


def _secrets(container: Document) -> dict[str, dict[str, str]]:
    """The `secretKeyRef` of each variable that has one."""
    references = {
        entry["name"]: entry.get("valueFrom", {}).get("secretKeyRef")
        for entry in container.get("env", [])
    }
    return {name: found for name, found in references.items() if found is not None}


def files(documents: list[Document]) -> Iterator[str]:
    """Files are where all ingresses write, and nobody else, or nowhere."""
    (app,) = served(_service(documents))["applications"]
    place = app["args"].get("file_store")
    if place is None:
        yield "file_store: each pod would have files of its own"
        return
    shared = {
        claim["metadata"]["name"]
        for claim in find(documents, "PersistentVolumeClaim")
        if claim["spec"]["accessModes"] == ["ReadWriteMany"]
    }
    for group, template in _ray_pods(documents):
        (container,) = template["spec"]["containers"]
        claims = {
            volume["name"]: volume["persistentVolumeClaim"]["claimName"]
            for volume in template["spec"]["volumes"]
            if "persistentVolumeClaim" in volume
        }
        writable = {
            mount["mountPath"]: claims[mount["name"]]
            for mount in container["volumeMounts"]
            if mount["name"] in claims and not mount.get("readOnly")
        }
        name = group["groupName"]
        if name != "ingress":
            yield from (f"{name} may write to {path}" for path in writable)
            continue
        for path in writable:
            if template["spec"]["securityContext"].get("fsGroup") != USER:
                yield f"{name}: the image's user can't write to {path}"
        if place.startswith("/") and not any(
            f"{place}/".startswith(f"{path}/") and claim in shared
            for path, claim in writable.items()
        ):
            yield f"{name}: no volume that all write to at {place}"


def environment_name(service: Document) -> str:
    """The ConfigMap with the pods' environment."""
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    return str(head["containers"][0]["envFrom"][0]["configMapRef"]["name"])


def budgets(documents: list[Document]) -> Iterator[str]:
    """Each kind of worker has a budget that lets a node be drained."""
    for group, template in _ray_pods(documents):
        if group["groupName"] == "head":
            continue
        found = [
            budget["spec"]
            for budget in find(documents, "PodDisruptionBudget")
            if matches(_labels(template), budget["spec"]["selector"])
        ]
        if [spec.get("maxUnavailable") for spec in found] != [1]:
            yield f"{group['groupName']} doesn't have one budget with maxUnavailable 1"


def monitoring(documents: list[Document]) -> Iterator[str]:
    """The rules are those of alerts.yaml, and the dashboard is JSON."""
    for rule in find(documents, "PrometheusRule"):
        if rule["spec"] != yaml.safe_load((ROOT / "k8s/monitoring/alerts.yaml").read_text()):
            yield "the PrometheusRule isn't alerts.yaml"
    for dashboard in find(documents, "ConfigMap"):
        for name, text in dashboard["data"].items():
            if name.endswith(".json") and json.loads(text)["title"] != "Manta":
                yield f"{name} isn't the dashboard"


CHECKS: tuple[Check, ...] = (
    references,
    selectors,
    ports,
    policies,
    ends,
    room,
    shared_memory,
    operator_rules,
    security,
    application,
    kept_requests,
    files,
    budgets,
    monitoring,
)
