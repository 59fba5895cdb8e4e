"""The target of `manta serve`: a config file, a model folder, a GGUF file or a hub id."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from engine.checkpoint.wheel_models import WHEEL_MODELS
from engine.errors import ConfigError
from engine.process.shipped import shipped_root

DEFAULT = "configs/llama.yaml"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?")
_SIZED_FOR_ITS_MODEL = ("model", "served_model_name", "max_total_tokens")
"""Keys of `DEFAULT` that another model doesn't take over."""
_APPLICATION_KEYS = {
    "name",
    "route_prefix",
    "import_path",
    "args",
    "runtime_env",
    "deployments",
    "external_scaler_enabled",
}


class Target(NamedTuple):
    """A checked Serve config, and the checked arguments of each model of its applications."""

    config: dict[str, Any]
    applications: list[Any]
    """`AppConfig`s."""

    @property
    def http(self) -> dict[str, Any]:
        """`http_options`, with host and port."""
        options: dict[str, Any] = self.config["http_options"]
        return options


def load_target(
    target: str,
    overrides: list[str],
    host: str | None = None,
    port: int | None = None,
    http_options: Mapping[str, str] | None = None,
) -> Target:
    """Read and check what to serve. `overrides`: `key=value` of the applications' args; `host`,
    `port` and `http_options` take the place of those in `http_options`.

    Raises `ConfigError` naming what is wrong and what to do.
    """
    # Imports pydantic and Serve only now: `--help` stays quick.
    from deploy.start.config import AppConfig

    config = _read(target)
    if not isinstance(config, dict) or not config.get("applications"):
        raise ConfigError("a Serve config needs `applications:` with one application in it.")
    http = _mapping(config, "http_options")
    http["host"] = host if host is not None else http.get("host") or "127.0.0.1"
    http["port"] = port if port is not None else http.get("port") or 8000
    http.update(http_options or {})
    if not isinstance(http["port"], int):
        raise ConfigError(f"http_options.port must be a number, not {http['port']!r}.")
    applications = []
    for app in config["applications"]:
        if not isinstance(app, dict):
            raise ConfigError("each of `applications` must be a mapping with name and args.")
        unknown = set(app) - _APPLICATION_KEYS
        if unknown:
            # Serve ignores unknown keys here and prints nothing.
            raise ConfigError(
                f"unknown application key '{sorted(map(str, unknown))[0]}'; known are "
                f"{', '.join(sorted(_APPLICATION_KEYS))}."
            )
        args = _mapping(app, "args")
        args.update(map(_override, overrides))
        models = args.get("models")
        for given in [args, *(models if isinstance(models, list) else [])]:
            if isinstance(given, dict):
                _make_absolute(given)
        applications += AppConfig.models_from_args(args)
    return Target(config, applications)


def _make_absolute(args: dict[str, Any]) -> None:
    """The server's processes may run in another folder."""
    if isinstance(args.get("model"), str):
        args["model"] = _absolute(args["model"])
    if isinstance(args.get("expert_map"), str):
        args["expert_map"] = os.path.abspath(os.path.expanduser(args["expert_map"]))


def _mapping(parent: dict[str, Any], key: str) -> dict[str, Any]:
    """`parent[key]`; an empty mapping is put there if it is missing or empty."""
    value = parent.get(key)
    if value is None:
        value = parent[key] = {}
    if not isinstance(value, dict):
        raise ConfigError(f"`{key}` must be a mapping of keys to values.")
    return value


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping. (Plain YAML would take the last.)"""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for n, key in enumerate(keys) if key in keys[:n] and key != "<<"), None)
        if twice is not None:
            line = node.start_mark.line + 1
            raise ConfigError(
                f"the key '{twice}' stands twice in the mapping that begins in line {line}; remove "
                "one."
            )
        return super().construct_mapping(node, deep)


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set takes key=value, not '{text}'.")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {key}: '{value}' is not valid YAML; quote it.") from error


def _read(target: str) -> Any:
    path = _find(target)
    if path is not None and path.suffix == ".gguf" and path.is_file():
        return _config_of_model(str(path))
    if path is not None and path.is_file():
        try:
            return yaml.load(path.read_text(), _Loader)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"not valid YAML: {error}") from error
        except OSError as error:
            raise ConfigError(f"can't be read: {error.strerror}.") from error
    is_config = Path(target).suffix in (".yaml", ".yml")
    is_known = _HUB_ID.fullmatch(target) or target in WHEEL_MODELS
    if not is_config and (path is not None or is_known):
        return _config_of_model(str(path) if path is not None else target)
    if is_config:
        near = sorted(Path(target).parent.glob("*.yaml"))
        there = near or sorted((shipped_root() / "configs").glob("*.yaml"))
        others = ", ".join(str(file) for file in there[:8])
        raise ConfigError(f"the file does not exist; there are {others}.")
    raise ConfigError(
        "this is neither a config file, nor a model folder, nor a GGUF file, nor a model of the "
        "Hugging Face hub (owner/name, or owner/name:Q4_K_M for a GGUF file there), nor "
        f"{', '.join(WHEEL_MODELS)}."
    )


def _config_of_model(model: str) -> dict[str, Any]:
    """`DEFAULT` for another model. Its KV cache is as large as memory allows."""
    config: dict[str, Any] = yaml.safe_load((shipped_root() / DEFAULT).read_text())
    args = config["applications"][0]["args"]
    for key in _SIZED_FOR_ITS_MODEL:
        args.pop(key, None)
    args["model"] = model
    return config


def _find(target: str) -> Path | None:
    """The file or folder `target`, relative to this folder or among the files that Manta brings.
    None if there is none. A link keeps its own name."""
    for candidate in (Path(target), shipped_root() / target):
        try:
            if candidate.exists():
                return Path(os.path.abspath(candidate))
        except OSError as error:
            raise ConfigError(f"can't be looked up: {error.strerror}.") from error
    return None


def _absolute(model: str) -> str:
    """A model folder or file as an absolute path."""
    found = _find(model)
    is_model = found is not None and (found.is_dir() or found.suffix == ".gguf")
    return str(found) if is_model else model
