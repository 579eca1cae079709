"""A relay's duties: which children get a chunk by the plan, and when to acknowledge it to the parent.

Guarantees: routes of the last PLANS_KEPT plans are known; each chunk is acknowledged to its parent once. Leaves to
others: queues and sending (session).
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.base.ids import PeerId
from echo2.broadcast.events import Route, SendRelayAck
from echo2.broadcast.manifest import ArtifactKey
from echo2.broadcast.swarm import Ref, RelayJob
from echo2.broadcast.topology import BroadcastPlan, NodeLink

PLANS_KEPT = 3
GOLDEN = 0x9E3779B1  # golden ratio of 2^32: its multiples spread evenly


@dataclass(frozen=True, slots=True)
class Child:
    """A node's child in a tree; `relays_on`: it has children of its own."""

    peer_id: PeerId
    relays_on: bool
    has_own_pace: bool = False
    deferred_share: float = 0.0

    def is_deferred(self, index: int) -> bool:
        """Whether this chunk is sent to it only when nothing else is queued. The others are spread evenly over the artifact."""
        return not self.relays_on and (index * GOLDEN & 0xFFFFFFFF) < self.deferred_share * 2**32


def child_of(node: NodeLink, relays_on: bool, by_seed: bool) -> Child:
    """The child's role. The seed defers every chunk for workers with their own pace: its uplink is for fresh chunks."""
    has_own_pace = node.deferred_share > 0
    return Child(node.peer_id, relays_on, has_own_pace, 1.0 if by_seed and has_own_pace else node.deferred_share)


class Relaying:
    """The relay state of node `me`."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._plans: dict[int, BroadcastPlan] = {}
        self._children: dict[Route, tuple[Child, ...]] = {}
        self._jobs: dict[Ref, RelayJob] = {}

    def set_plan(self, plan: BroadcastPlan) -> None:
        self._plans[plan.epoch] = plan
        for old in sorted(self._plans)[:-PLANS_KEPT]:
            del self._plans[old]
        self._children = {route: c for route, c in self._children.items() if route.epoch in self._plans}

    def children_in(self, route: Route) -> tuple[Child, ...]:
        """Our children in a tree."""
        known = self._children.get(route)
        if known is not None:
            return known
        plan = self._plans.get(route.epoch)
        mine = plan.index_of(self._me) if plan is not None else None
        ours: tuple[Child, ...] = ()
        if plan is not None and mine is not None and 0 <= route.tree < len(plan.trees):
            children = plan.pushed_to(route.tree)
            ours = tuple(child_of(plan.nodes[child], child in children, mine == 0) for child in children.get(mine, ()))
            self._children[route] = ours
        return ours

    def begin(self, ref: Ref, parent: PeerId | None, waiting: set[PeerId], has_children: bool) -> list[SendRelayAck]:
        """Starts relaying a chunk to `waiting`, the children that still need it; with none, acknowledges at once."""
        if waiting:
            self._jobs[ref] = RelayJob(parent, waiting, len(waiting))
            return []
        return self._acknowledgement(parent, ref) if has_children else []

    def done(self, ref: Ref, child: PeerId) -> list[SendRelayAck]:
        """The child has the chunk, or will not get it from us: acknowledges to the parent after the last child."""
        job = self._jobs.get(ref)
        if job is None:
            return []
        job.waiting.discard(child)
        if job.waiting:
            return []
        del self._jobs[ref]
        return self._acknowledgement(job.parent, ref)

    def give_up(self, child: PeerId) -> list[SendRelayAck]:
        """Stops waiting for a child; returns the acknowledgements that this completes."""
        return [ack for ref in self._owed_to(child) for ack in self.done(ref, child)]

    def forget(self, key: ArtifactKey) -> None:
        for ref in [ref for ref in self._jobs if ref[0] == key]:
            del self._jobs[ref]

    def _owed_to(self, child: PeerId) -> list[Ref]:
        return [ref for ref, job in self._jobs.items() if child in job.waiting]

    def _acknowledgement(self, parent: PeerId | None, ref: Ref) -> list[SendRelayAck]:
        """The backlog is the mean of pending sends per child, so that one slow child does not hide that the others idle."""
        if parent is None:
            return []
        jobs = [job for job in self._jobs.values() if job.parent == parent]
        backlog = sum(len(job.waiting) for job in jobs) // max((job.child_count for job in jobs), default=1)
        return [SendRelayAck(parent, ArtifactKey(ref[0]), ref[1], backlog)]
