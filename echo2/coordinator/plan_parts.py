"""One node's part of a large broadcast plan, itself a plan that the node reads as it reads a whole one.

A node acts on its own place alone: who is above and below it in each tree, which of its children pass chunks on, and
where these live. Guarantees: from its part a node concludes exactly what it would from the whole plan: the same seed,
the same neighbours, the same children in each tree, the same of them taken for relays. A part stays above the size
below which nodes of a small plan connect all to all, so it is never taken for one; plans up to that size are not cut.
What a part says of nodes that are no neighbours of its owner (that they hang on the seed) is nobody's business there.
Leaves to others: making plans (broadcast/trees), sending parts (runtime/hub). The seed acts on every tree: it gets the
whole plan.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from echo2.base.ids import PeerId
from echo2.broadcast.topology import DEGREE_MAX, BroadcastPlan, NodeLink, Tree

PART_NODES_MIN = DEGREE_MAX + 2
"""One more than the largest plan whose nodes all connect to each other."""


class PlanParts:
    """Cuts parts out of one plan; what all parts need is worked out once."""

    def __init__(self, plan: BroadcastPlan) -> None:
        self.plan = plan
        self._children = [tree.children() for tree in plan.trees]
        self._pushed = [plan.pushed_to(number) for number in range(len(plan.trees))]

    def part_of(self, peer_id: PeerId) -> BroadcastPlan:
        """What this node needs to be told; the plan itself where it is small."""
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
        """The seed, the node, its neighbours, one child of each relay among them; then others up to the least size."""
        found = dict.fromkeys((0, mine))
        for tree, children, pushed in zip(self.plan.trees, self._children, self._pushed, strict=True):
            found[tree.parents[mine - 1]] = None
            for child in children.get(mine, ()):
                found[child] = None
                found.update(dict.fromkeys(pushed.get(child, ())[:1]))
        filler = (index for index in range(1, len(self.plan.nodes)) if index not in found)
        return [*found, *islice(filler, max(0, PART_NODES_MIN - len(found)))]

    def _parent(self, number: int, index: int, mine: int, place: dict[int, int]) -> int:
        """The real parent where it is the node itself or one of its children, or where the node asks for its own."""
        parent = self.plan.trees[number].parents[index - 1]
        is_mine = mine in (index, parent)
        is_relayed = parent in self._children[number].get(mine, ())
        return place[parent] if is_mine or (is_relayed and parent in place) else 0

    def _for_outsider(self, peer_id: PeerId) -> BroadcastPlan:
        """A node that is not in the plan pulls from some that are: a window of them, spread by its peer ID."""
        workers = len(self.plan.nodes) - 1
        start = sum(peer_id.encode()) % workers
        window = (1 + (start + offset) % workers for offset in range(PART_NODES_MIN - 1))
        return self._cut([0, *sorted(window)], ())

    def _cut(self, kept: list[int], trees: tuple[Tree, ...]) -> BroadcastPlan:
        plan = self.plan
        nodes: tuple[NodeLink, ...] = tuple(plan.nodes[index] for index in kept)
        predicted = tuple(plan.predicted_s[index - 1] for index in kept[1:]) if plan.predicted_s else ()
        return replace(plan, nodes=nodes, trees=trees, predicted_s=predicted, _index={})
