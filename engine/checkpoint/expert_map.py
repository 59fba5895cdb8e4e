"""`ExpertMap`: on which groups of ranks the experts of each mixture stand, as a file says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from engine.checkpoint.expert_balance import Balancer, pack_greedily
from engine.checkpoint.layout import MixtureCut, ModelLayout
from engine.errors import ConfigError


class ExpertMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`manta expert-map` writes one."""

    layers: dict[int, list[list[int]]]
    """By decoder layer: the experts of each group. The experts of other layers stand in order."""

    @classmethod
    def made_of(
        cls,
        counts: Mapping[int, Sequence[int]],
        num_groups: int,
        balance: Balancer = pack_greedily,
    ) -> ExpertMap:
        """The map for `num_groups` groups where the experts of each decoder layer got so many
        tokens. Raises `ConfigError` if the groups don't divide the experts."""
        for layer, tokens in counts.items():
            if num_groups < 1 or len(tokens) % num_groups:
                raise ConfigError(
                    f"{num_groups} groups don't divide the {len(tokens)} experts of layer {layer}."
                )
        return cls(dict(zip(counts, balance(list(counts.values()), num_groups), strict=True)))

    @classmethod
    def read(cls, path: str) -> ExpertMap:
        """Raises `ConfigError` if the file isn't one."""
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except (OSError, ValueError) as error:  # msgspec's are among these
            raise ConfigError(
                f"expert_map {path} can't be read: {error}. `manta expert-map` makes such a file."
            ) from error

    def place(self, layout: ModelLayout, num_groups: int) -> ModelLayout:
        """The layout of a model whose experts stand so on `num_groups` groups. Raises `ConfigError`
        if the map is another model's, or for another number of groups."""
        layers = [layout.layer_of(mixture.name) for mixture in layout.mixtures]
        if len(set(layers)) < len(layers):
            raise ConfigError(
                f"expert_map can't be used for {layout.class_name}, which has several mixtures in "
                "a layer; leave it out."
            )
        if others := self.layers.keys() - set(layers):
            raise ConfigError(
                f"expert_map names layer {min(others)}, which has no mixture in "
                f"{layout.class_name}; make the map with counts of this model."
            )
        placed = tuple(
            self._placed(layer, mixture, num_groups)
            for layer, mixture in zip(layers, layout.mixtures, strict=True)
        )
        return msgspec.structs.replace(layout, mixtures=placed)

    def _placed(self, layer: int, mixture: MixtureCut, num_groups: int) -> MixtureCut:
        groups = self.layers.get(layer)
        if groups is None:
            return mixture
        if len(groups) != num_groups:
            raise ConfigError(
                f"expert_map has {len(groups)} groups in layer {layer}, and ep_size makes "
                f"{num_groups}; make the map for this number."
            )
        order = tuple(expert for group in groups for expert in group)
        is_even = len({len(group) for group in groups}) == 1
        if not is_even or sorted(order) != list(range(mixture.num_experts)):
            raise ConfigError(
                f"expert_map must name each of the {mixture.num_experts} experts of layer {layer} "
                "once, as many in each group."
            )
        return msgspec.structs.replace(mixture, order=order)
