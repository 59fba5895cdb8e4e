"""Whether the pods of a RayService hold its application's placement groups."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.start.config import AppConfig
from tests.k8s.kuberay import custom_resources, quantity
from tests.k8s.manifests import Document, groups, served


def misfits(service: Document) -> Iterator[str]:
    """What doesn't fit: with all pods that the groups may have, every engine and ingress must."""
    config = app_config(service)
    app = served(service)["applications"][0]["args"]
    use_gpu = app["device"] == "cuda"
    nodes = list(_nodes(service))
    bundles = config.placement_bundles(use_gpu=use_gpu) * config.max_replicas
    options = config.ingress_actor_options()
    ingress = {"CPU": options["num_cpus"], **options.get("resources", {})}
    wanted = [*bundles, *[ingress] * config.server.ingress_replicas]
    for bundle in sorted(wanted, key=lambda bundle: -bundle.get("GPU", 0)):
        node = next((n for _, n in nodes if _fits(bundle, n)), None)
        if node is None:
            yield f"no pod has room for {bundle}"
            return
        for key, amount in bundle.items():
            node[key] -= amount
    head = next(node for name, node in nodes if name == "head")
    if head["CPU"]:
        yield "the head has CPUs: engines and ingresses could run there"
    idle = sum(node.get("GPU", 0) for _, node in nodes)
    if idle:
        yield f"{idle:.0f} GPUs that nobody uses"
    for group in groups(service):
        gpus = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        hosts = group.get("numOfHosts", 1)
        if group["groupName"] == "engines" and use_gpu:
            have = int(gpus.get("nvidia.com/gpu", 0)) * hosts
            if have != config.engine.world_size:
                yield f"an engine has {config.engine.world_size} workers, its pods {have} GPUs"


def app_config(service: Document) -> AppConfig:
    """Checked as the application checks it, with the carried model's sizes and no keys' file."""
    args = dict(served(service)["applications"][0]["args"])
    args = {k: v for k, v in args.items() if k not in ("max_model_len", "api_keys_file")}
    return AppConfig.from_args({**args, "model": "models/manta-small", "device": "cpu"})


def _fits(bundle: dict[str, float], node: dict[str, float]) -> bool:
    return all(node.get(key, 0) >= amount - 1e-9 for key, amount in bundle.items())


def _nodes(service: Document) -> Iterator[tuple[str, dict[str, float]]]:
    """(group, what Ray sees in a pod) for as many pods as the groups may have."""
    for group in groups(service):
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        params = group["rayStartParams"]
        cpus = float(params.get("num-cpus", int(quantity(str(limits["cpu"])))))
        node = {"CPU": cpus, "GPU": float(limits.get("nvidia.com/gpu", 0))}
        node |= custom_resources(params)
        count = group.get("maxReplicas", 1) * group.get("numOfHosts", 1)
        for _ in range(count):
            yield group["groupName"], dict(node)
