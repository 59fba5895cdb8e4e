"""Write `serveConfigV2` of the Kubernetes manifests from `configs/`.

    python scripts/render_k8s.py           # rewrite the manifests
    python scripts/render_k8s.py --check   # exit 1 and name those that are out of date

The config files are the source; only the block under `serveConfigV2: |` is written here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
MANIFESTS = {
    "k8s/rayservice-cpu.yaml": "configs/llama.yaml",
    "k8s/rayservice-gpu.yaml": "configs/llama-8b-gpu.yaml",
}
"""Manifest -> the config file that it serves."""
KEY = "serveConfigV2: |\n"


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 if `--check` found a manifest that differs from its config."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    check = parser.parse_args(argv).check
    stale = []
    for manifest, config in MANIFESTS.items():
        path = ROOT / manifest
        text = path.read_text()
        wanted = render(text, config, (ROOT / config).read_text())
        if text == wanted:
            continue
        stale.append(manifest)
        if not check:
            path.write_text(wanted)
            print(f"wrote {manifest}")
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run scripts/render_k8s.py", file=sys.stderr)
        return 1
    return 0


def serve_config(text: str) -> dict[str, Any]:
    """A config file as the pods need it: listening on the pod's address, and with `auth: none`
    where it names no keys, because Manta asks for that in writing."""
    config: dict[str, Any] = yaml.safe_load(text)
    http = config["http_options"]
    http["host"] = "0.0.0.0"
    for app in config["applications"]:
        if not app["args"].get("api_keys_file"):
            app["args"].setdefault("auth", "none")
    return config


def render(manifest: str, name: str, config: str) -> str:
    """`manifest` with the block under `serveConfigV2: |` made from the text of `config`.

    `name` is the config file's path, for the comment. Raises `ValueError` if the manifest doesn't
    have exactly one such key.
    """
    lines = manifest.splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if line.lstrip() == KEY]
    if len(starts) != 1:
        raise ValueError(f"a manifest needs one line '{KEY.strip()}', not {len(starts)}")
    start = starts[0] + 1
    depth = len(lines[starts[0]]) - len(KEY)
    end = start
    while end < len(lines) and (not lines[end].strip() or _indent(lines[end]) > depth):
        end += 1
    note = f"# From {name} by scripts/render_k8s.py: change that file, then run it.\n"
    body = note + yaml.safe_dump(serve_config(config), sort_keys=False)
    block = [" " * (depth + 2) + line for line in body.splitlines(keepends=True)]
    return "".join([*lines[:start], *block, *lines[end:]])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


if __name__ == "__main__":
    sys.exit(main())
