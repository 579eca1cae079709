"""Cuts one node's part out of a large broadcast plan. The part is itself a plan, which the node reads like a whole one.

A node needs only its own place: its parent and children in each tree, which of its children pass chunks on, and the addresses
of all of these. Guarantees: from its part a node derives exactly what it would derive from the whole plan: the same seed,
neighbours and children in each tree, and the same children acting as relays. In a small plan all nodes connect to each other; a
part always has more nodes than that limit, so it is never taken for a small plan, and plans up to the limit are not cut.
A part shows nodes that are not neighbours of its owner as children of the seed; the owner does not use that.
Leaves to others: making plans (broadcast/trees), sending parts (hub). The seed acts in every tree, so it gets the
whole plan.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from echo2.base.ids import PeerId
from echo2.broadcast.plan import DEGREE_MAX, BroadcastPlan, NodeLink, Tree

PART_NODES_MIN = DEGREE_MAX + 2
"""One more than the largest plan whose nodes all connect to each other."""


class PlanParts:
    """Cuts parts out of one plan; what all parts need is computed once."""

    def __init__(self, plan: BroadcastPlan) -> None:
        self.plan = plan
        self._children = [tree.children() for tree in plan.trees]
        self._pushed = [plan.pushed_to(number) for number in range(len(plan.trees))]

    def part_of(self, peer_id: PeerId) -> BroadcastPlan:
        """The part that this node needs; the plan itself if it is small."""
        plan = self.plan
        if len(plan.nodes) <= PART_NODES_MIN or not plan.nodes or peer_id == plan.nodes[0].peer_id:
            return plan
        mine = plan.index_of(peer_id)
        if mine is None:
            return self._for_outsider(peer_id)
        kept = self._kept(mine)
        place = {index: at for at, index in enumerate(kept)}
        trees = [
            Tree(planned.weight, tuple(self._parent(number, index, mine, place) for index in kept[1:]))
            for number, planned in enumerate(plan.trees)
        ]
        return self._cut(kept, tuple(trees))

    def _kept(self, mine: int) -> list[int]:
        """Indices of the nodes in the part: the seed, the node, its neighbours, and one child of each child that passes chunks
        on; then any others up to the minimum size."""
        found = dict.fromkeys((0, mine))
        for tree, children, pushed in zip(self.plan.trees, self._children, self._pushed, strict=True):
            found[tree.parents[mine - 1]] = None
            for child in children.get(mine, ()):
                found[child] = None
                found.update(dict.fromkeys(pushed.get(child, ())[:1]))
        filler = (index for index in range(1, len(self.plan.nodes)) if index not in found)
        return [*found, *islice(filler, max(0, PART_NODES_MIN - len(found)))]

    def _parent(self, number: int, index: int, mine: int, place: dict[int, int]) -> int:
        """Index in the part of this node's parent: the real parent if `index` is the owner, a child of the owner, or a kept
        child of one of its children; else the seed."""
        parent = self.plan.trees[number].parents[index - 1]
        is_mine = mine in (index, parent)
        is_relayed = parent in self._children[number].get(mine, ())
        return place[parent] if is_mine or (is_relayed and parent in place) else 0

    def _for_outsider(self, peer_id: PeerId) -> BroadcastPlan:
        """The part of a node that is not in the plan: it pulls from a window of the plan's nodes, chosen by its peer ID so that
        outsiders spread over the fleet."""
        workers = len(self.plan.nodes) - 1
        start = sum(peer_id.encode()) % workers
        window = (1 + (start + offset) % workers for offset in range(PART_NODES_MIN - 1))
        return self._cut([0, *sorted(window)], ())

    def _cut(self, kept: list[int], trees: tuple[Tree, ...]) -> BroadcastPlan:
        plan = self.plan
        nodes: tuple[NodeLink, ...] = tuple(plan.nodes[index] for index in kept)
        predicted = tuple(plan.predicted_s[index - 1] for index in kept[1:]) if plan.predicted_s else ()
        return replace(plan, nodes=nodes, trees=trees, predicted_s=predicted, _index={})
