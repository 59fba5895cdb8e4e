"""Write the generated files of `k8s/`: each overlay's `serveConfigV2`, and the Prometheus rules.

    python scripts/render_k8s.py           # write what is out of date
    python scripts/render_k8s.py --check   # exit 1 and name those files

Sources are `configs/` and `k8s/monitoring/alerts.yaml`. What pods need beyond a config file is in
`OVERLAYS`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
NOTE = "# From {} by scripts/render_k8s.py: change that file, then run it.\n"
ALERTS = "k8s/monitoring/alerts.yaml"
RULES = "k8s/monitoring/prometheus-rule.yaml"


class Overlay(NamedTuple):
    """An overlay's config file, and the keys of its `args` that pods need otherwise (None: left
    out)."""

    config: str
    changes: dict[str, Any]


EVERYWHERE = {
    "api_keys_file": "/etc/manta/keys/keys.yaml",
    # A pod's file isn't another pod's.
    "request_store": "redis",
    "request_store_url": "redis://manta-request-store:6379/0",
    # Nor is its folder: see k8s/components/files.
    "file_store": "none",
    # The pods of the group `ingress` have 4, so that new ingresses fit beside the old ones.
    "ingress_resources": {"manta_ingress": 1},
    # A new pod may need a new node, an image and a model.
    "resume_wait_s": 600,
    # A stream has this time to end when its pods go: k8s/README.md#how-long-an-end-takes
    "drain_timeout_s": 300,
}
OVERLAYS = {
    "cpu": Overlay(
        "configs/llama.yaml",
        {
            # A pod of the group `engines` has 1.
            "engine_resources": {"manta_engine": 1},
            "num_replicas": None,
            "autoscaling": {"min_replicas": 1, "max_replicas": 4},
        },
    ),
    "gpu": Overlay(
        "configs/llama-8b-gpu.yaml",
        {
            "model": "/models/meta-llama/Llama-3.1-8B-Instruct",
            "num_replicas": None,
            "autoscaling": {"min_replicas": 1, "max_replicas": 4},
            "ingress_replicas": 2,
        },
    ),
    "tp8": Overlay(
        "configs/llama-70b-tp8.yaml",
        {"model": "/models/meta-llama/Llama-3.3-70B-Instruct", "ingress_replicas": 2},
    ),
    "pp2-two-hosts": Overlay(
        "configs/llama-405b-tp8-pp2.yaml",
        {
            "model": "/models/meta-llama/Llama-3.1-405B-Instruct",
            "ingress_replicas": 2,
            "resume_wait_s": 1800,
        },
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 if `--check` found a file that differs from its source."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    check = parser.parse_args(argv).check
    stale = []
    for name, text in rendered().items():
        path = ROOT / name
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(name)
        if not check:
            path.write_text(text)
            print(f"wrote {name}")
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run scripts/render_k8s.py", file=sys.stderr)
        return 1
    return 0


def rendered() -> dict[str, str]:
    """Path in the repository -> text, of every generated file."""
    files = {f"k8s/overlays/{name}/serve-config.yaml": patch(o) for name, o in OVERLAYS.items()}
    return files | {RULES: rules()}


def serve_config(overlay: Overlay) -> dict[str, Any]:
    """The overlay's config file as its pods need it, listening on the pod's addresses."""
    config: dict[str, Any] = yaml.safe_load((ROOT / overlay.config).read_text())
    config["http_options"]["host"] = "0.0.0.0"
    (app,) = config["applications"]
    changed = app["args"] | EVERYWHERE | overlay.changes
    app["args"] = {key: value for key, value in changed.items() if value is not None}
    return config


def patch(overlay: Overlay) -> str:
    """A patch for the RayService with `serveConfigV2`."""
    body = NOTE.format(overlay.config) + yaml.safe_dump(serve_config(overlay), sort_keys=False)
    block = "".join("    " + line for line in body.splitlines(keepends=True))
    head = "apiVersion: ray.io/v1\nkind: RayService\nmetadata:\n  name: manta\nspec:\n"
    return f"{head}  serveConfigV2: |\n{block}"


def rules() -> str:
    """The alert rules as an object of the Prometheus operator."""
    document = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "manta"},
        "spec": yaml.safe_load((ROOT / ALERTS).read_text()),
    }
    return NOTE.format(ALERTS) + yaml.safe_dump(document, sort_keys=False, width=110)


if __name__ == "__main__":
    sys.exit(main())
