"""The publisher's scheduler: which tree carries the next fresh chunk.

Guarantees: a tree gets chunks in proportion to its weight while its relays keep up; a relay that falls behind is skipped;
chunks that no relay can take, the seed sends itself when its uplink would otherwise idle; chunks that a lost relay
still owed go to another tree. Leaves to others: queues and sending (session).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from echo2.base.ids import PeerId
from echo2.broadcast.events import Route
from echo2.broadcast.manifest import ArtifactKey
from echo2.broadcast.policy import RELAY_SLACK_S, RELAY_TIMEOUT_S, RELAYS_FULL_S, RelayWindow
from echo2.broadcast.relaying import Child, child_of
from echo2.broadcast.swarm import Peer, Ref
from echo2.broadcast.topology import BroadcastPlan, fluid_bound


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
            mine = tuple(child_of(plan.nodes[child], child in children, True) for child in children.get(0, ()))
            relays = frozenset(child.peer_id for child in mine if child.relays_on)
            window = RelayWindow(RELAY_SLACK_S, self._first_window(plan, number, children))
            self.trees.append(SeedTree(Route(plan.epoch, number), planned.weight, mine, relays, window))

    def _first_window(self, plan: BroadcastPlan, number: int, children: Mapping[int, Sequence[int]]) -> float:
        """Bytes in flight that keep a tree busy from the start: its planned rate times (round trip to the relay + slack)."""
        tree, seed = plan.trees[number], plan.nodes[0]
        lap_s = max((seed.rtt_s + plan.nodes[child].rtt_s for child in children.get(0, ())), default=0.0)
        return tree.weight * fluid_bound(plan.prompt_nodes).rate_bytes_per_s * (lap_s + RELAY_SLACK_S)

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
        self.waiting[ArtifactKey(ref[0])] &= ~(1 << ref[1])
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
        key, index = ArtifactKey(ref[0]), ref[1]
        able = [
            tree for tree in trees
            if tree.window.has_room(now) and self._is_at_work(tree, peers, now)
            and not any(peers[relay].has(key, index) for relay in tree.relays)
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
                self.waiting[ArtifactKey(ref[0])] |= 1 << ref[1]
