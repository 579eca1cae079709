"""Fleets in several regions: what a set of trees costs in traffic, and trees that send about one copy into each region.

Traffic between regions crosses slow paths and is billed by providers; inside a region it is fast and free. So one worker
per region, its gateway, receives everything from outside, and the region's other workers get it from each other.

    seed --one copy--> gateway of region A --stripes inside A--> all others of A
      '----one copy--> gateway of region B --stripes inside B--> all others of B       or A's gateway forwards to B's

Guarantees: pure; `regional` returns trees that reach every worker, or none; workers of unknown region form a group.
Leaves to others: choosing a set of trees and building stripes (trees), prices (coordinator).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from echo2.broadcast.topology import NodeLink, Tree, can_connect, is_sound

GIB = float(1 << 30)
GATEWAYS_MAX = 8  # a gateway's neighbours in other regions, at most
STRIPES = (16, 8, 4, 2, 1)
Striped = Callable[[Sequence[NodeLink], int, int], tuple[Tree, ...]]
"""(nodes with the source first, stripe count, degree limit) -> that many equal stripes; empty if impossible."""


def is_crossing(parent: NodeLink, child: NodeLink) -> bool:
    """Whether bytes between the two leave a region; an unknown region counts as always left."""
    return not parent.region or parent.region != child.region


def egress_usd(nodes: Sequence[NodeLink], trees: Sequence[Tree], artifact_bytes: int) -> float:
    """What providers charge for one artifact in USD: every byte that leaves the sender's region, at the sender's price."""
    total = 0.0
    for tree in trees:
        for child, parent in enumerate(tree.parents, start=1):
            if nodes[parent].egress_usd_per_gib and is_crossing(nodes[parent], nodes[child]):
                total += tree.weight * nodes[parent].egress_usd_per_gib
    return total * artifact_bytes / GIB


def crossings(nodes: Sequence[NodeLink], trees: Sequence[Tree]) -> dict[str, float]:
    """Per region, how many copies of an artifact enter it from outside."""
    copies: dict[str, float] = defaultdict(float)
    for tree in trees:
        for child, parent in enumerate(tree.parents, start=1):
            if is_crossing(nodes[parent], nodes[child]):
                copies[nodes[child].region] += tree.weight
    return dict(copies)


def regional(
    nodes: Sequence[NodeLink], degree_max: int, striped: Striped, *, is_chain: bool = False
) -> tuple[Tree, ...]:
    """Trees of equal stripes. `is_chain`: gateways forward to one another, strongest uplink first, for when the seed's uplink
    cannot feed them all. Empty if there are fewer than two regions, or no stripes fit the degree limit."""
    groups = _groups(nodes)
    if not 2 <= len({nodes[0].region, *groups}) <= GATEWAYS_MAX:
        return ()
    for stripes in STRIPES:
        inside = {region: _inside(nodes, members, stripes, degree_max, striped) for region, members in groups.items()}
        if all(inside.values()):
            made = _joined(nodes, groups, inside, stripes, is_chain)
            return made if is_sound(nodes, made) else ()
    return ()


def _groups(nodes: Sequence[NodeLink]) -> dict[str, list[int]]:
    """Workers by region, the gateway first: the strongest uplink among dialable workers; the seed itself in the seed's
    region."""
    groups: dict[str, list[int]] = defaultdict(list)
    for number, node in enumerate(nodes[1:], start=1):
        groups[node.region].append(number)
    for region, members in groups.items():
        members.sort(key=lambda number: (not nodes[number].addresses, -nodes[number].up, number))
        if region == nodes[0].region:
            members.insert(0, 0)
    return dict(groups)


def _inside(
    nodes: Sequence[NodeLink], members: Sequence[int], stripes: int, degree_max: int, striped: Striped
) -> list[tuple[int, ...]]:
    """For each stripe, the parents of all members but the gateway, as positions in `members`; empty if impossible."""
    local = [nodes[number] for number in members]
    if len(local) < 2:
        return [()] * stripes
    if len(local) == 2:
        return [(0,)] * stripes if can_connect(*local) else []
    made = striped(local, stripes, degree_max - GATEWAYS_MAX)
    return [tree.parents for tree in made] if is_sound(local, made) else []


def _joined(
    nodes: Sequence[NodeLink],
    groups: dict[str, list[int]],
    inside: dict[str, list[tuple[int, ...]]],
    stripes: int,
    is_chain: bool,
) -> tuple[Tree, ...]:
    above = _gateways_above(nodes, [members[0] for members in groups.values() if members[0]], is_chain=is_chain)
    trees = []
    for stripe in range(stripes):
        parents = [0] * (len(nodes) - 1)
        for gateway, parent in above.items():
            parents[gateway - 1] = parent
        for region, members in groups.items():
            for place, parent in enumerate(inside[region][stripe], start=1):
                parents[members[place] - 1] = members[parent]
        trees.append(Tree(1.0 / stripes, tuple(parents)))
    return tuple(trees)


def _gateways_above(nodes: Sequence[NodeLink], gateways: Sequence[int], *, is_chain: bool) -> dict[int, int]:
    """Maps each gateway to the node that feeds it."""
    if not is_chain:
        return dict.fromkeys(gateways, 0)
    feeders, before = dict[int, int](), 0
    for gateway in sorted(gateways, key=lambda number: (not nodes[number].addresses, -nodes[number].up, number)):
        feeders[gateway] = before if can_connect(nodes[before], nodes[gateway]) else 0
        before = gateway
    return feeders
