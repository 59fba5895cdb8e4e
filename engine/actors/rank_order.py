"""Which bundle of a placement group each rank takes."""

from __future__ import annotations

from collections.abc import Sequence

from ray.util.placement_group import PlacementGroup, placement_group_table


def rank_order(nodes: Sequence[str], owner: str, tp_size: int) -> list[int]:
    """Index into `nodes` for each rank, so that the fewest possible tensor parallel groups span
    nodes: these groups exchange data in every layer, pipeline stages only once a step.

    `nodes[i]` is the node of worker bundle i. Their number is a multiple of `tp_size`, and ranks
    are pipeline-major. Every node holds all the whole groups that it has room for, next to each
    other in the pipeline; the bundles left over make up the other groups. The node of `owner` comes
    first: its rank 0 holds the group's store and sends the results.
    """
    by_node: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        by_node.setdefault(node, []).append(index)
    ordered = sorted(by_node, key=lambda node: (node != owner, -len(by_node[node])))
    whole: list[int] = []
    rest: list[list[int]] = []
    for node in ordered:
        indices = by_node[node]
        count = len(indices) // tp_size * tp_size
        whole += indices[:count]
        rest.append(indices[count:])
    # The larger pieces come first, so that groups have few pieces. If the owner's node has no whole
    # group, its piece comes before all others; then its group is rank 0's.
    owner_piece = rest.pop(0) if ordered and ordered[0] == owner else []
    rest.sort(key=lambda piece: -len(piece))
    split = owner_piece + [index for piece in rest for index in piece]
    owner_has_group = bool(whole) and nodes[whole[0]] == owner
    if owner_piece and not owner_has_group:
        return split[:tp_size] + whole + split[tp_size:]
    return whole + split


def bundle_order(placement_group: PlacementGroup, world_size: int, tp_size: int) -> list[int]:
    """Bundle of each rank in a group that is placed. Bundle 0 is the owner's; the others are the
    workers'."""
    table = placement_group_table(placement_group)["bundles_to_node_id"]
    nodes = [str(table[1 + index]) for index in range(world_size)]
    return [1 + index for index in rank_order(nodes, str(table[0]), tp_size)]
