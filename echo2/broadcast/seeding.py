"""A relay's duties: which children get a chunk by the plan, and when to acknowledge it to the parent.

Guarantees: routes of the last PLANS_KEPT plans are known; each chunk is acknowledged to its parent once. Leaves to
others: queues and sending (session).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from echo2.base.ids import PeerId
from echo2.broadcast.artifact import ArtifactKey
from echo2.broadcast.events import RelayAck, Route
from echo2.broadcast.pace import RELAY_SLACK_S, RELAY_TIMEOUT_S, RELAYS_FULL_S, RelayWindow
from echo2.broadcast.peer import Peer, Ref
from echo2.broadcast.plan import BroadcastPlan, fluid_bound

PLANS_KEPT = 3  # chunks on their way travel by a plan before the newest


@dataclass(frozen=True, slots=True)
class Child:
    """A node's child in a tree; `relays_on`: it has children of its own."""

    peer_id: PeerId
    relays_on: bool


@dataclass(slots=True)
class RelayJob:
    """A chunk that we relay: which children still wait for it, and the parent to acknowledge it to."""

    parent: PeerId | None
    waiting: set[PeerId]
    child_count: int


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
            ours = tuple(Child(plan.nodes[child].peer_id, child in children) for child in children.get(mine, ()))
            self._children[route] = ours
        return ours

    def begin(self, ref: Ref, parent: PeerId | None, waiting: set[PeerId], has_children: bool) -> list[RelayAck]:
        """Starts relaying a chunk to `waiting`, the children that still need it; with none, acknowledges at once."""
        if waiting:
            self._jobs[ref] = RelayJob(parent, waiting, len(waiting))
            return []
        return self._acknowledgement(parent, ref) if has_children else []

    def done(self, ref: Ref, child: PeerId) -> list[RelayAck]:
        """The child has the chunk, or will not get it from us: acknowledges to the parent after the last child."""
        job = self._jobs.get(ref)
        if job is None:
            return []
        job.waiting.discard(child)
        if job.waiting:
            return []
        del self._jobs[ref]
        return self._acknowledgement(job.parent, ref)

    def give_up(self, child: PeerId) -> list[RelayAck]:
        """Stops waiting for a child; returns the acknowledgements that this completes."""
        owed = [ref for ref, job in self._jobs.items() if child in job.waiting]
        return [ack for ref in owed for ack in self.done(ref, child)]

    def forget(self, key: ArtifactKey) -> None:
        for ref in [ref for ref in self._jobs if ref[0] == key]:
            del self._jobs[ref]

    def _acknowledgement(self, parent: PeerId | None, ref: Ref) -> list[RelayAck]:
        """The backlog is the mean of pending sends per child, so that one slow child does not hide that the others idle."""
        if parent is None:
            return []
        jobs = [job for job in self._jobs.values() if job.parent == parent]
        backlog = sum(len(job.waiting) for job in jobs) // max((job.child_count for job in jobs), default=1)
        return [RelayAck(parent, *ref, backlog)]


@dataclass(slots=True)
class SeedTree:
    """A tree as the seed sees it: the seed's children in it, and which of them relay."""

    route: Route
    weight: float
    children: tuple[Child, ...]
    relays: frozenset[PeerId]
    window: RelayWindow
    owed_by: dict[Ref, set[PeerId]] = field(default_factory=dict)


class Seeding:
    """Fresh chunks (published, not yet assigned) and the trees that can carry them."""

    def __init__(self) -> None:
        self.fresh: deque[Ref] = deque()
        self.waiting: dict[ArtifactKey, int] = {}  # fresh chunks per artifact, as bitmaps
        self.trees: list[SeedTree] = []
        self._retiring: list[SeedTree] = []
        self._relays_full_since: float | None = None
        self._sizes: dict[Ref, int] = {}

    @property
    def _all_trees(self) -> list[SeedTree]:
        return [*self.trees, *self._retiring]

    def set_plan(self, plan: BroadcastPlan, me: PeerId) -> None:
        """Fresh chunks go to the plan's trees from now on; old trees stay until their relays have acknowledged all their chunks."""
        self._retiring = [tree for tree in [*self._retiring, *self.trees] if tree.window.outstanding]
        self.trees = []
        if plan.seed is None or plan.seed.peer_id != me:
            return
        for number, planned in enumerate(plan.trees):
            children = plan.pushed_to(number)
            mine = tuple(Child(plan.nodes[child].peer_id, child in children) for child in children.get(0, ()))
            relays = frozenset(child.peer_id for child in mine if child.relays_on)
            window = RelayWindow(RELAY_SLACK_S, self._first_window(plan, number, children))
            self.trees.append(SeedTree(Route(plan.epoch, number), planned.weight, mine, relays, window))

    def _first_window(self, plan: BroadcastPlan, number: int, children: Mapping[int, Sequence[int]]) -> float:
        """Bytes in flight that keep a tree busy from the start: its planned rate times (round trip to the relay + slack)."""
        tree, seed = plan.trees[number], plan.nodes[0]
        lap_s = max((seed.rtt_s + plan.nodes[child].rtt_s for child in children.get(0, ())), default=0.0)
        return tree.weight * fluid_bound(plan.needed_nodes).rate_bytes_per_s * (lap_s + RELAY_SLACK_S)

    def add(self, key: ArtifactKey, index: int, size_bytes: int) -> None:
        self.fresh.append((key, index))
        self.waiting[key] = self.waiting.get(key, 0) | 1 << index
        self._sizes[(key, index)] = size_bytes

    def forget(self, key: ArtifactKey) -> None:
        self.waiting.pop(key, None)
        self.fresh = deque(ref for ref in self.fresh if ref[0] != key)
        self._sizes = {ref: size for ref, size in self._sizes.items() if ref[0] != key}
        for tree in self._all_trees:
            for ref in [ref for ref in tree.owed_by if ref[0] == key]:
                del tree.owed_by[ref]
                tree.window.outstanding.pop(ref, None)

    def next_assignment(self, peers: Mapping[PeerId, Peer], is_idle: bool, now: float) -> tuple[Ref, SeedTree] | None:
        """The next fresh chunk and its tree; None while no tree has room. `is_idle`: nothing else is queued."""
        if not self.fresh:
            return None
        ref = self.fresh[0]
        tree = self._relayed_tree(ref, peers, now)
        if tree is not None:
            self._relays_full_since = None
        elif is_idle:
            tree = self._direct_tree(now)
        if tree is None:
            return None
        self.fresh.popleft()
        self.waiting[ref[0]] &= ~(1 << ref[1])
        relays = {relay for relay in tree.relays if relay in peers}
        size = self._sizes.get(ref, 1)
        tree.window.given(ref, size, bool(relays), now)
        if relays:
            tree.owed_by[ref] = relays
        return ref, tree

    def _relayed_tree(self, ref: Ref, peers: Mapping[PeerId, Peer], now: float) -> SeedTree | None:
        """A planned tree with room; a spare one if the relays of all planned ones are gone."""
        planned = [tree for tree in self.trees if tree.relays and tree.weight > 0]
        best = self._least_used(planned, ref, peers, now)
        if best is None and not any(self._is_at_work(tree, peers, now) for tree in planned):
            spare = [tree for tree in self.trees if tree.relays and tree.weight == 0]
            best = self._least_used(spare, ref, peers, now)
        return best

    def _is_at_work(self, tree: SeedTree, peers: Mapping[PeerId, Peer], now: float) -> bool:
        is_there = all(relay in peers and not peers[relay].is_stuck for relay in tree.relays)
        return is_there and not tree.window.is_suspended(now)

    def _least_used(
        self, trees: Sequence[SeedTree], ref: Ref, peers: Mapping[PeerId, Peer], now: float
    ) -> SeedTree | None:
        """Of those with room whose relays lack the chunk: the one with the least bytes sent per weight."""
        able = [
            tree for tree in trees
            if tree.window.has_room(now) and self._is_at_work(tree, peers, now)
            and not any(peers[relay].has(*ref) for relay in tree.relays)
        ]  # fmt: skip
        return min(able, key=lambda tree: tree.window.sent_bytes / (tree.weight or 1.0), default=None)

    def _direct_tree(self, now: float) -> SeedTree | None:
        """The tree in which the seed sends to everyone itself: up to its share, or once all relays were full for RELAYS_FULL_S."""
        if self._relays_full_since is None:
            self._relays_full_since = now
        direct = next((tree for tree in self.trees if not tree.relays), None)
        if direct is not None:
            total_bytes = sum(tree.window.sent_bytes for tree in self.trees)
            if direct.window.sent_bytes <= direct.weight * total_bytes:
                return direct
        has_relays = any(tree.relays and not tree.window.is_suspended(now) for tree in self.trees)
        if has_relays and now - self._relays_full_since < RELAYS_FULL_S:
            return None
        return direct or SeedTree(Route(0, -1), 1.0, (), frozenset(), RelayWindow(RELAY_SLACK_S))

    def acknowledged(self, peer: PeerId, ref: Ref, backlog: int, now: float) -> None:
        for tree in self._all_trees:
            if peer not in tree.relays:
                continue
            owed = tree.owed_by.get(ref)
            if owed is None:
                tree.window.resume()
                continue
            owed.discard(peer)
            if not owed:
                del tree.owed_by[ref]
                tree.window.passed_on(ref, backlog, now)

    def lost(self, peer: PeerId, now: float) -> None:
        """The connection to a relay ended."""
        for tree in self._all_trees:
            if peer in tree.relays:
                self._suspend(tree, now)

    def returned(self, peer: PeerId) -> None:
        for tree in self._all_trees:
            if peer in tree.relays:
                tree.window.resume()

    def check_timeouts(self, now: float) -> None:
        """Suspends relays that have owed a chunk for too long, until they are heard from again."""
        for tree in self._all_trees:
            if tree.window.oldest_age_s(now) > RELAY_TIMEOUT_S + 4 * tree.window.lap_s:
                self._suspend(tree, now)

    def next_timeout(self) -> float | None:
        times = [
            next(iter(t.window.outstanding.values())) + RELAY_TIMEOUT_S + 4 * t.window.lap_s
            for t in self._all_trees if t.window.outstanding
        ]  # fmt: skip
        if self.fresh and self._relays_full_since is not None:
            times.append(self._relays_full_since + RELAYS_FULL_S)
        return min(times, default=None)

    def _suspend(self, tree: SeedTree, now: float) -> None:
        self._hand_out_again(tree.window.suspend(now))
        tree.owed_by.clear()

    def _hand_out_again(self, owed: list[Ref]) -> None:
        known = set(self.fresh)
        for ref in reversed(owed):
            if ref in self._sizes and ref not in known:
                self.fresh.appendleft(ref)
                self.waiting[ref[0]] |= 1 << ref[1]
