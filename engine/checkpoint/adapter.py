"""`PeftAdapter`: what the folder of a LoRA adapter holds, in the format of PEFT.

The folder has `adapter_config.json` and `adapter_model.safetensors`. It may come from anybody: all
of it is checked, and nothing of it is run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.checkpoint.values import ConfigValues
from engine.errors import ConfigError

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_TENSOR = re.compile(r"base_model\.model\.(?P<linear>.+)\.lora_(?P<side>[AB])\.weight")
_PLAIN_PATTERN = re.compile(r"\^?[\w.\\]+\$?", re.ASCII)
_NUMBERS = ("F64", "F32", "F16", "BF16")
_REFUSED = {
    "use_dora": "DoRA's magnitudes",
    "modules_to_save": "whole modules beside its matrices (modules_to_save)",
    "lora_bias": "biases (lora_bias)",
    "trainable_token_indices": "embeddings of tokens (trainable_token_indices)",
    "layer_replication": "copies of layers (layer_replication)",
    "alora_invocation_tokens": "tokens that switch it on (aLoRA)",
    "use_qalora": "inputs in groups (QALoRA)",
}
"""Keys that say what Manta doesn't add to a model, and what that is."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` whose adapters belong to other base weights than the model's."""


_NAME = re.compile(r"[\w][\w.:/@+-]{0,255}", re.ASCII)


def check_adapter_name(name: str) -> None:
    """Raise `ConfigError` if clients can't name an adapter so."""
    if _NAME.fullmatch(name) is None or ".." in name:
        raise ConfigError(
            f"{_shown(name)!r} can't be an adapter's name: it must begin with a letter or a digit "
            "and have letters, digits and . : / @ + - _ only."
        )


@dataclass(frozen=True)
class Factors:
    """One linear's: its weight W [out, in] becomes W + scale * B A. Of a mixture's experts, whose
    matrices are one parameter, those of each."""

    rank: int
    in_size: int
    out_size: int
    scale: float
    num_experts: int = 1


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter's header. Its numbers are still in the file."""

    folder: Path
    base: str
    """The model that it was made for, as its maker called it."""
    linears: Mapping[str, Factors]
    """By the name of the linear, as transformers has it."""

    @property
    def rank(self) -> int:
        """The largest of its matrices'."""
        return max(factors.rank for factors in self.linears.values())

    @property
    def num_values(self) -> int:
        """Numbers of its matrices."""
        return sum(f.num_experts * f.rank * (f.in_size + f.out_size) for f in self.linears.values())

    @property
    def changes_experts(self) -> bool:
        """Whether it has matrices for a mixture's experts."""
        return any("experts" in name.split(".") for name in self.linears)

    @classmethod
    def open(cls, folder: Path) -> PeftAdapter:
        """Read the header. Raises `ConfigError`, which names the folder, if it can't be served."""
        config = _read_config(folder)
        _refuse_others(config, folder)
        shapes = _read_shapes(folder)
        linears = {}
        for name, sides in sorted(shapes.items()):
            if len(sides) != 2:
                lacks = "B" if "A" in sides else "A"
                raise ConfigError(f"the adapter in {folder} lacks lora_{lacks} of '{name}'.")
            (rank, in_size), (out_size, other) = sides["A"], sides["B"]
            wanted, scale = _rank_and_scale(config, name)
            count = 1
            if config.get("target_parameters") and rank % wanted == 0:
                count = rank // wanted  # A and B of all experts are one matrix each
            if not rank == other == count * wanted:
                raise ConfigError(
                    f"the adapter in {folder} has matrices of rank {rank} and {other} for '{name}' "
                    f"where {CONFIG_NAME} says {wanted}."
                )
            linears[name] = Factors(wanted, in_size, out_size, scale, count)
        base = config.get("base_model_name_or_path")
        return cls(folder, base if isinstance(base, str) else "", linears)

    def check_rank(self, most: int) -> None:
        """Raise `ConfigError` if a matrix has a rank above `most` (max_lora_rank)."""
        if self.rank > most:
            raise ConfigError(
                f"the adapter in {self.folder} has rank {self.rank} and max_lora_rank is {most}; "
                "raise it."
            )

    def tensor_names(self, linear: str) -> tuple[str, str]:
        """Of A [rank, in] and B [out, rank] in the file."""
        return (
            f"base_model.model.{linear}.lora_A.weight",
            f"base_model.model.{linear}.lora_B.weight",
        )


def _read_config(folder: Path) -> ConfigValues:
    file = folder / CONFIG_NAME
    if not folder.is_dir():
        raise ConfigError(f"there is no adapter folder {folder}.")
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{file} has more than {MAX_CONFIG_BYTES >> 20} MiB.")
        values = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{file} can't be read ({error.strerror}); an adapter is a folder with {CONFIG_NAME} "
            f"and {WEIGHTS_NAME}."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds no object.")
    return ConfigValues(file, values, {"r": 8, "lora_alpha": 8})


def _refuse_others(config: ConfigValues, folder: Path) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"the adapter in {folder} is of peft_type {kind!r}; LORA is served.")
    for key, what in _REFUSED.items():
        if config.get(key):
            raise ConfigError(f"the adapter in {folder} has {what}, which Manta doesn't serve.")
    if config.get("bias") not in (None, "none"):
        raise ConfigError(
            f"the adapter in {folder} has biases (bias: {config.get('bias')!r}), which Manta "
            "doesn't serve."
        )
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        raise ConfigError(
            f"the adapter in {folder} was begun with init_lora_weights {init!r}, which changes the "
            "model's own weights; convert it to plain LoRA (PEFT's save_pretrained with "
            "path_initial_model_for_weight_conversion)."
        )
    for key, value in config.given.items():
        if value and key.startswith("use_") and key != "use_rslora":
            raise ConfigError(f"the adapter in {folder} sets {key}, which Manta doesn't know.")


def _read_shapes(folder: Path) -> dict[str, dict[str, tuple[int, int]]]:
    """By linear: the shapes of its A and B."""
    file = folder / WEIGHTS_NAME
    if not file.is_file():
        pickles = [name for name in _PICKLES if (folder / name).exists()]
        if pickles:
            raise ConfigError(
                f"{folder} has {pickles[0]}, a pickle, which may run code when it is read; convert "
                f"it to {WEIGHTS_NAME}."
            )
        raise ConfigError(f"{folder} has no {WEIGHTS_NAME}.")
    found: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dictionary)
                part = tensors.get_slice(name)
                shape, numbers = part.get_shape(), part.get_dtype()
                match = _TENSOR.fullmatch(name)
                if match is None:
                    raise ConfigError(
                        f"{file} has the tensor '{_shown(name)}', which is no matrix of LoRA on a "
                        "layer's linear; embeddings and the output head can't have any."
                    )
                if len(shape) != 2 or min(shape) < 1 or numbers not in _NUMBERS:
                    raise ConfigError(
                        f"the tensor '{_shown(name)}' of {file} is {numbers} {shape}; a matrix of "
                        f"{', '.join(_NUMBERS)} is needed."
                    )
                found.setdefault(match["linear"], {})[match["side"]] = (shape[0], shape[1])
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} can't be read: {error}.") from error
    if not found:
        raise ConfigError(f"{file} holds no matrices.")
    return found


def _rank_and_scale(config: ConfigValues, linear: str) -> tuple[int, float]:
    rank = _of_pattern(config, "rank_pattern", linear, config.get("r"))
    alpha = _of_pattern(config, "alpha_pattern", linear, config.get("lora_alpha"))
    if type(rank) is not int or rank < 1:
        raise config.error("r", "a whole number above 0")
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise config.error("lora_alpha", "a number")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_pattern(config: ConfigValues, key: str, linear: str, otherwise: Any) -> Any:
    """What the first pattern says that fits the name of a linear, or ends it. Patterns are regular
    expressions; only those without repetition are taken, which can't be made to run for ever."""
    for pattern, value in config.mapping(key).items():
        try:
            if _PLAIN_PATTERN.fullmatch(pattern) is None:
                raise re.error("only names, '.', '^' and '$' are taken")
            if re.match(rf"(.*\.)?({pattern})$", linear):
                return value
        except re.error as error:
            raise ConfigError(
                f"the pattern '{_shown(pattern)}' in {key} of {config.path}: {error}."
            ) from error
    return otherwise


def _shown(name: str) -> str:
    return name if len(name) <= 120 else f"{name[:117]}..."
