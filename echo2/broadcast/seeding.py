"""A relay's duties: which children get a chunk by the plan, and when to acknowledge it to the parent.

Guarantees: routes of the last PLANS_KEPT plans are known; each chunk is acknowledged to its parent once. The seed has a plan before
others do: what comes by it waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from echo2.base.ids import PeerId
from echo2.broadcast.artifact import CHUNKS_MAX, ArtifactKey
from echo2.broadcast.events import RelayAck, Route
from echo2.broadcast.pace import RELAY_SLACK_S, RELAYS_FULL_S, RelayWindow
from echo2.broadcast.peer import Peer, Ref
from echo2.broadcast.plan import BY_REGION, BroadcastPlan, fluid_bound

PLANS_KEPT = 3  # chunks on their way travel by a plan before the newest
EARLY_MAX = 1024  # chunks that came by a plan which is on its way here: several windows
SLOW_AMONG = 4  # children: for one of so many that take chunks slowly, the others do not wait
LOOK_S = 1.5  # of sending: several windows
DIRECT_MOST = 2.0  # times its planned share: what the seed adds itself while relays bring only half of what was planned
PIPE_SHARE = 0.87  # of the fluid bound: trees by region bring more than that where no pipe holds them back
SLOW_SHARE = 0.25  # of what is passed on: by relays whose uplinks are slower than planned, so that the bound is less
POOR_SHARE = 0.6  # of what trees by region bring: less than that do those that cross a thin pipe many times


@dataclass(frozen=True, slots=True)
class Child:
    """A node's child in a tree; `relays_on`: it has children of its own."""

    peer_id: PeerId
    relays_on: bool


@dataclass(slots=True)
class RelayJob:
    """A chunk that we relay: which children still wait for it, the parent to acknowledge it to, and which children relay on."""

    parent: PeerId | None
    waiting: set[PeerId]
    child_count: int
    relays: tuple[PeerId, ...]


class Relaying:
    """The relay state of node `me`."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._plans: dict[int, BroadcastPlan] = {}
        self._children: dict[Route, tuple[Child, ...]] = {}
        self._jobs: dict[Ref, RelayJob] = {}
        self._backlogs: dict[PeerId, int] = {}  # as children said that relay on
        self._early: deque[tuple[Ref, PeerId | None, Route]] = deque(maxlen=EARLY_MAX)

    def set_plan(self, plan: BroadcastPlan) -> list[tuple[Ref, PeerId | None, Route]]:
        """Returns what came by this plan before it."""
        self._plans.pop(plan.epoch, None)  # in the order in which they come: a coordinator's clock may go back
        self._plans[plan.epoch] = plan
        for old in list(self._plans)[:-PLANS_KEPT]:
            del self._plans[old]
        self._children = {route: c for route, c in self._children.items() if route.epoch in self._plans}
        early, self._early = self._early, deque(maxlen=EARLY_MAX)
        self._early.extend(chunk for chunk in early if self.is_early(chunk[2]))
        return [chunk for chunk in early if chunk[2].epoch == plan.epoch]

    def is_early(self, route: Route) -> bool:
        return route.epoch not in self._plans and route.epoch > next(reversed(self._plans), -1)

    def keep(self, ref: Ref, parent: PeerId | None, route: Route) -> None:
        self._early.append((ref, parent, route))

    def children_in(self, route: Route) -> tuple[Child, ...]:
        """Our children in a tree."""
        known = self._children.get(route)
        if known is not None:
            return known
        plan = self._plans.get(route.epoch)
        number = plan.index_of(self._me) if plan is not None else None
        ours: tuple[Child, ...] = ()
        if plan is not None and number is not None and 0 <= route.tree < len(plan.all_trees):
            children = plan.pushed_to(route.tree)
            ours = tuple(Child(plan.nodes[child].peer_id, child in children) for child in children.get(number, ()))
            self._children[route] = ours
        return ours

    def begin(self, ref: Ref, parent: PeerId | None, waiting: set[PeerId], children: Sequence[Child]) -> list[RelayAck]:
        """Starts relaying a chunk to `waiting`, the children that still need it; with none, acknowledges at once."""
        relays = tuple(child.peer_id for child in children if child.relays_on)
        job = RelayJob(parent, waiting, len(waiting), relays)
        if waiting:
            self._jobs[ref] = job
            return []
        return self._acknowledgement(job, ref) if children else []

    def acknowledged(self, child: PeerId, backlog: int) -> None:
        """A child that relays on has so many sends before it."""
        self._backlogs[child] = backlog

    def done(self, ref: Ref, child: PeerId) -> list[RelayAck]:
        """The child has the chunk, or will not get it from us: acknowledges to the parent once all have that relay on, and most
        others: who is slow to take chunks holds nobody up."""
        job = self._jobs.get(ref)
        if job is None:
            return []
        job.waiting.discard(child)
        if len(job.waiting) > job.child_count // SLOW_AMONG or not job.waiting.isdisjoint(job.relays):
            return []
        del self._jobs[ref]
        return self._acknowledgement(job, ref)

    def give_up(self, child: PeerId) -> list[RelayAck]:
        """Stops waiting for a child; returns the acknowledgements that this completes."""
        owed = [ref for ref, job in self._jobs.items() if child in job.waiting]
        return [ack for ref in owed for ack in self.done(ref, child)]

    def forget(self, key: ArtifactKey) -> None:
        for ref in [ref for ref in self._jobs if ref[0] == key]:
            del self._jobs[ref]

    def _acknowledgement(self, done: RelayJob, ref: Ref) -> list[RelayAck]:
        """The backlog is the mean of pending sends per child, so that one slow child does not hide that the others idle; where
        children relay on, at least what waits for one of them and what it has before it."""
        if done.parent is None:
            return []
        jobs = self._jobs.values()
        backlog = sum(len(job.waiting) for job in jobs) // max((job.child_count for job in jobs), default=1)
        for relay in done.relays:
            waiting = sum(relay in job.waiting for job in jobs)
            backlog = max(backlog, waiting + self._backlogs.get(relay, 0))
        return [RelayAck(done.parent, *ref, min(CHUNKS_MAX, backlog))]  # what a child says may be a lie


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
    """Fresh chunks (published, not yet assigned) and the trees that can carry them. If these are by region and bring what uplinks
    can, or relays say that their uplinks are slower than planned, the plan's others take over, which use each uplink by itself;
    where they turn out to bring far less, a pipe is thin, and the trees by region are back and stay."""

    def __init__(self) -> None:
        self.fresh: deque[Ref] = deque()
        self.waiting: dict[ArtifactKey, int] = {}  # fresh chunks per artifact, as bitmaps
        self.trees: list[SeedTree] = []
        self._others: list[SeedTree] = []  # or, while those are in use, the trees by region
        self._enters_once, self._is_pipe_thin = False, False  # a chunk enters each region once, by the trees in use
        self._bound_bytes_per_s = self._share_by_region = 0.0
        self._slow_bytes = 0  # of those passed on
        self._passed_bytes, self._busy_s, self._looked_at, self._looks = 0, 0.0, float("-inf"), 0
        self._retiring: list[SeedTree] = []
        self._relays_full_since: float | None = None
        self._sizes: dict[Ref, int] = {}

    @property
    def _all_trees(self) -> list[SeedTree]:
        return [*self.trees, *self._others, *self._retiring]

    def set_plan(self, plan: BroadcastPlan, me: PeerId) -> None:
        """Fresh chunks go to the plan's trees from now on; old trees stay until their relays have acknowledged all their chunks."""
        self._retiring = [tree for tree in self._all_trees if tree.window.outstanding]
        takes_others = bool(self._others) and not self._enters_once and bool(plan.others)
        self.trees, self._others, self._enters_once = [], [], plan.topology == BY_REGION
        if plan.seed is None or plan.seed.peer_id != me:
            return
        seed = plan.seed
        self._bound_bytes_per_s = fluid_bound(plan.needed_nodes).rate_bytes_per_s if plan.trees else 0.0
        for number, planned in enumerate(plan.all_trees):
            children = plan.pushed_to(number)
            direct = tuple(Child(plan.nodes[child].peer_id, child in children) for child in children.get(0, ()))
            relays = frozenset(child.peer_id for child in direct if child.relays_on)
            hops = 1 + any(child in children for relay in children.get(0, ()) for child in children.get(relay, ()))
            # Bytes in flight that keep a tree busy from the start: its planned rate times (round trip to the relay + slack).
            lap_s = max((seed.rtt_s + plan.nodes[child].rtt_s for child in children.get(0, ())), default=0.0)
            first_bytes = planned.weight * self._bound_bytes_per_s * (lap_s + RELAY_SLACK_S)
            window = RelayWindow(hops * RELAY_SLACK_S, first_bytes)
            trees = self.trees if number < len(plan.trees) else self._others
            trees.append(SeedTree(Route(plan.epoch, number), planned.weight, direct, relays, window))
        if takes_others:
            self._change_trees()

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
        while self.fresh and self._enters_once and self._is_known(self.fresh[0], peers):
            self._pop()  # whoever lacks it finds it in its region, or pulls it
        if not self.fresh:
            self._passed_bytes, self._busy_s, self._looked_at, self._looks = 0, 0.0, float("-inf"), 0
            return None
        self._look(now)
        ref = self.fresh[0]
        tree = self._relayed_tree(ref, peers, now)
        if tree is not None:
            self._relays_full_since = None
        elif is_idle:
            tree = self._direct_tree(now)
        if tree is None:
            return None
        self._pop()
        relays = {relay for relay in tree.relays if relay in peers}
        size = self._sizes.get(ref, 1)
        tree.window.assigned(ref, size, bool(relays), now)
        if relays:
            tree.owed_by[ref] = relays
        else:
            self._passed_bytes += size
        return ref, tree

    def _look(self, now: float) -> None:
        """Measures what trees bring while chunks wait, but for the first look; changes them if others are better."""
        self._busy_s += min(now - self._looked_at, RELAYS_FULL_S) if self._looked_at > 0 else 0.0
        self._looked_at = now
        if self._busy_s < LOOK_S or not self._others:
            return
        share = self._passed_bytes / self._busy_s / self._bound_bytes_per_s
        is_slow = self._slow_bytes > SLOW_SHARE * self._passed_bytes
        self._passed_bytes, self._slow_bytes, self._busy_s, self._looks = 0, 0, 0.0, self._looks + 1
        if self._enters_once:
            is_pipe_seen = self._is_pipe_thin or (share < PIPE_SHARE and not is_slow)
            if self._looks >= 2 and not is_pipe_seen:
                self._share_by_region = share
                self._change_trees()
        elif share < POOR_SHARE * self._share_by_region:
            self._is_pipe_thin = True
            self._change_trees()

    def _change_trees(self) -> None:
        self.trees, self._others = self._others, self.trees
        self._enters_once, self._looks = not self._enters_once, 0

    def _is_known(self, ref: Ref, peers: Mapping[PeerId, Peer]) -> bool:
        """Whether each of the trees has a relay that holds the chunk."""
        relaying = [tree.relays for tree in self.trees if tree.relays]
        return bool(relaying) and all(
            any(relay in peers and peers[relay].has(*ref) for relay in relays) for relays in relaying
        )

    def _pop(self) -> None:
        key, index = self.fresh.popleft()
        self.waiting[key] &= ~(1 << index)

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
        """The tree in which the seed sends to everyone itself: up to its share (twice that where trees cross freely: relays may
        bring less than was planned), or once all relays were full for RELAYS_FULL_S."""
        if self._relays_full_since is None:
            self._relays_full_since = now
        direct = next((tree for tree in self.trees if not tree.relays), None)
        if direct is not None:
            total_bytes = sum(tree.window.sent_bytes for tree in self.trees)
            most = direct.weight if self._enters_once else DIRECT_MOST * direct.weight
            if direct.window.sent_bytes <= most * total_bytes:
                return direct
        has_relays = any(tree.relays and not tree.window.is_suspended(now) for tree in self.trees)
        if has_relays and (self._enters_once or now - self._relays_full_since < RELAYS_FULL_S):
            return None
        return direct or SeedTree(Route(0, -1), 1.0, (), frozenset(), RelayWindow(RELAY_SLACK_S))

    def acknowledged(self, ack: RelayAck, backlog: int, now: float) -> None:
        peer, ref = ack.peer, (ack.key, ack.index)
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
                self._passed_bytes += (size := self._sizes.get(ref, 0))
                self._slow_bytes += size if ack.is_slow else 0
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
            if tree.window.times_out_at < now:
                self._suspend(tree, now)

    def next_timeout(self) -> float | None:
        times = [tree.window.times_out_at for tree in self._all_trees if tree.window.outstanding]
        if self.fresh and self._relays_full_since is not None:
            times.append(self._relays_full_since + RELAYS_FULL_S)
        return min(times, default=None)

    def _suspend(self, tree: SeedTree, now: float) -> None:
        owed = tree.window.suspend(now)
        known = set(self.fresh)
        for ref in reversed(owed):
            if ref in self._sizes and ref not in known:
                self.fresh.appendleft(ref)
                self.waiting[ref[0]] |= 1 << ref[1]
        tree.owed_by.clear()
