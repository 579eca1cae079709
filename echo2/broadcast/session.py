"""The broadcast protocol of one node as a state machine: `handle(event, now) -> actions`. No IO, no clock, no payload bytes.

    an artifact:  unknown --header--> announced --chunks--> partly held --last chunk and seal--> complete --forgotten--> unknown
                                          ^------------------ emptied (the disk lost it) -----------'
    a chunk that we lack:  unknown --a neighbour has it--> missing --patience (a push may be on its way)--> requested --> held
                                      ^------------------ timed out, cancelled, or the peer disconnected -------'
    a chunk that we hold, per peer:  relayed (our child in its tree) | requested by the peer | seeded (we publish it)
                                     --> queued --pacer and slots--> in transport --> sent;  stuck: the peer has to pull it

Guarantees: a chunk is forwarded along its tree as soon as it is seen (cut-through), at most once to a peer that is not known to
hold it; at most `SLOTS_PER_PEER` chunks per connection are in the transport and the uplink is paced, so the backlog stays here,
where it can be reordered; what no push brings is pulled; every wait has a timer.
"""

from __future__ import annotations

import functools
import operator
import random
from dataclasses import replace
from typing import assert_never

from echo2.base.ids import PeerId
from echo2.base.rng import derived_rng
from echo2.broadcast import events, pace, pulling
from echo2.broadcast.artifact import CHUNKS_MAX, ArtifactKey, all_of, those_in
from echo2.broadcast.pace import Pacer, UplinkGovernor
from echo2.broadcast.peer import Artifact, Outgoing, Peer, Ref, service_order
from echo2.broadcast.plan import BroadcastPlan
from echo2.broadcast.pulling import Gossip
from echo2.broadcast.seeding import Child, Relaying, Seeding

HOUSEKEEPING_S = 0.05  # peers' messages and timers trigger the checks over all peers at most this often
OFTEN = (
    events.ChunkSeen, events.ChunkSent, events.RelayAck, events.Have, events.Request, events.Cancel, events.WidthWished,
    events.Woken,
)  # fmt: skip


class BroadcastSession:
    """One node's state in the broadcast of all artifacts."""

    def __init__(self, me: PeerId, seed: int = 0, uplink_bytes_per_s: float = 0.0) -> None:
        self.me = me
        self.peers: dict[PeerId, Peer] = {}
        self.artifacts: dict[ArtifactKey, Artifact] = {}
        self.plan: BroadcastPlan | None = None
        self._region: tuple[PeerId, ...] = (me,)  # the workers of ours, where trees are by region
        self.duplicates_bytes = 0
        self.pulled_chunks = 0
        self.governor = UplinkGovernor(uplink_bytes_per_s)
        self._pacer = Pacer(uplink_bytes_per_s)
        self._was_paced = False  # chunks waited for the pacer since the last sample of the uplink
        self._seeding = Seeding()
        self._relaying = Relaying(me)
        self._gossip = Gossip(self.peers, self.artifacts, self._seeding)
        self._rng: random.Random = derived_rng(seed, "session", me)
        self._served = 0
        self._actions: list[events.Action] = []
        self._wake_at, self._housekeeping_at = float("inf"), float("-inf")

    @property
    def is_waiting(self) -> bool:
        """Whether any chunk is queued to be sent."""
        return bool(self._seeding.fresh) or any(peer.is_queued for peer in self.peers.values())

    # ---- entry point

    def handle(self, event: events.Event, now: float) -> list[events.Action]:
        """Updates the state for an event that happened at `now`; returns the actions to carry out."""
        self._actions = []
        self._dispatch(event, now)
        # Thousands of messages and timers a second would each visit every peer below, so between checks only a timer is set.
        is_due = now >= self._housekeeping_at or not isinstance(event, OFTEN)
        if is_due:
            self._seeding.check_timeouts(now)
            self._expire_requests(now)
            self._pull(now)
            self._actions += self._gossip.due(now)
            self._housekeeping_at = now + HOUSEKEEPING_S
        self._send_what_fits(now)
        self._set_timer(now, is_due)
        return self._actions

    def _dispatch(self, event: events.Event, now: float) -> None:
        match event:  # the frequent ones first
            case events.ChunkSeen():
                self._chunk_seen(event, now)
            case events.ChunkSent():
                self._chunk_sent(event, now)
            case events.Woken():
                self._wake_at = float("inf")
            case events.PlanSet():
                self._plan_set(event.plan, now)
            case events.PeerUp():
                is_late = self.plan is not None and event.peer in self.plan.late
                self.peers[event.peer] = Peer(event.peer, is_late, self._is_near(event.peer))
                self._seeding.returned(event.peer)
                self._actions += self._gossip.greeting(self.peers[event.peer])
            case events.PeerDown():
                self._peer_down(event.peer, now)
            case events.LinkWidened():
                if event.peer in self.peers:
                    self.peers[event.peer].connections = event.connections
            case events.WidthWished():
                if event.peer in self.peers:
                    self.peers[event.peer].wished_connections = event.connections
            case events.HeaderSeen():
                self._header_seen(event, now)
            case events.ChunksKept():
                if event.key in self.artifacts:
                    self.artifacts[event.key].restored(event.bitmap, event.sizes)
                    self._gossip.changed()
            case events.SealSeen():
                self._seal_seen(event)
            case events.Have():
                self._have_seen(event, now)
            case events.Request():
                self._request_seen(event, now)
            case events.Cancel():
                if event.peer in self.peers and event.key in self.artifacts:
                    self.peers[event.peer].cancelled(event.key, event.indices)
            case events.RelayAck():
                queued = len(self.peers[event.peer].relay_queue) if event.peer in self.peers else 0  # backlog, too
                backlog = max(event.backlog, queued)
                self._seeding.acknowledged(event, backlog, now)
                self._relaying.acknowledged(event.peer, event.backlog)
            case events.UplinkSeen():
                self._uplink_seen(event, now)
            case events.Wanted():
                self._set_wanted(event)
            case events.Forgotten():
                self.artifacts.pop(event.key, None)
                self._seeding.forget(event.key)
                self._relaying.forget(event.key)
                for peer in self.peers.values():
                    peer.forget(event.key)
            case events.Emptied():
                self._emptied(event.key, now)
            case _:
                assert_never(event)

    # ---- events

    def _plan_set(self, plan: BroadcastPlan, now: float) -> None:
        self.plan, late, self._region = plan, plan.late, plan.region_of(self.me)
        for peer in self.peers.values():
            peer.is_late, peer.is_near = peer.peer_id in late, self._is_near(peer.peer_id)
            if peer.is_late:  # it pulls what it would have been pushed as a leaf
                for outgoing in peer.leaf_queue:
                    self._acknowledge(self._relaying.done((outgoing.key, outgoing.index), peer.peer_id))
                peer.leaf_queue.clear()
        for ref, parent, route in self._relaying.set_plan(plan):
            self._relay(ref, parent, route, now)
        self._seeding.set_plan(plan, self.me)

    def _is_near(self, peer: PeerId) -> bool:
        return len(self._region) < 2 or peer in self._region

    def _peer_down(self, peer_id: PeerId, now: float) -> None:
        if self.peers.pop(peer_id, None) is None:
            return
        self._seeding.lost(peer_id, now)
        self._acknowledge(self._relaying.give_up(peer_id))
        for artifact in self.artifacts.values():
            artifact.offered_by_none(self._offered(artifact.key))

    def _offered(self, key: ArtifactKey) -> int:
        """The chunks of the artifact that any neighbour holds, as a bitmap."""
        return functools.reduce(operator.or_, (peer.haves.get(key, 0) for peer in self.peers.values()), 0)

    def _header_seen(self, event: events.HeaderSeen, now: float) -> None:
        if event.peer in self.peers:
            self.peers[event.peer].knows.add(event.key)
        if event.key in self.artifacts:
            return
        # Counts as a recent push: the first chunks are probably on their way, so do not request them for FIRST_PUSH_S.
        grace_from = now - pace.PUSH_SILENCE_S + pace.FIRST_PUSH_S
        self.artifacts[event.key] = Artifact(event.key, event.is_wanted, pushed_at=grace_from)
        for peer in self.peers.values():
            self._actions += self._gossip.header(peer, event.key)

    def _chunk_seen(self, event: events.ChunkSeen, now: float) -> None:
        artifact = self.artifacts.get(event.key)
        if artifact is None:
            return
        ref = (event.key, event.index)
        if event.peer is not None and event.peer in self.peers:
            self._came_from(self.peers[event.peer], event, now)
        if artifact.held >> event.index & 1:
            self.duplicates_bytes += event.size_bytes
        artifact.holds(event.index, event.size_bytes)
        self._gossip.changed()
        artifact.arrived(event.index, event.is_answer, now)
        if event.is_fresh:
            self._seeding.add(event.key, event.index, event.size_bytes)
        if not event.is_answer:
            artifact.pushed_at = now
        if event.route is not None:
            self._relay(ref, event.peer, event.route, now)
        for peer in self.peers.values():
            if peer.peer_id != event.peer and peer.requests.pop(ref, None) is not None:
                self._actions.append(events.Cancel(peer.peer_id, event.key, (event.index,)))

    def _came_from(self, peer: Peer, event: events.ChunkSeen, now: float) -> None:
        bit = 1 << event.index
        # Changing links and trees repeat a chunk now and then; a peer that keeps doing so with one artifact wastes our downlink.
        if event.key not in peer.received:
            peer.replays = 0
        was_received = peer.received.get(event.key, 0) & bit
        if was_received and not peer.asked.get(event.key, 0) & bit:
            peer.replays += 1
            if peer.replays >= pace.REPLAYS_MAX:
                self._actions.append(events.Accuse(peer.peer_id, f"sent {peer.replays} chunks twice without a request"))
        peer.received[event.key] = peer.received.get(event.key, 0) | bit
        peer.note(event.key, event.index)
        peer.rate.add(event.size_bytes, now, is_awaited=bool(peer.requests))
        if (request := peer.requests.pop((event.key, event.index), None)) is not None and event.is_answer:
            peer.answer_s = min(peer.answer_s, now - request.since)
        self.pulled_chunks += event.is_answer

    def _seal_seen(self, event: events.SealSeen) -> None:
        if event.peer in self.peers:
            self.peers[event.peer].sealed.add(event.key)
        artifact = self.artifacts.get(event.key)
        if artifact is None or artifact.chunk_count is not None:
            return
        artifact.sealed(event.chunk_count)
        for peer in self.peers.values():
            self._actions += self._gossip.seal(peer, event.key)

    def _have_seen(self, event: events.Have, now: float) -> None:
        peer, artifact = self.peers.get(event.peer), self.artifacts.get(event.key)
        if peer is None or artifact is None:
            return
        peer.knows.add(event.key)
        if event.is_sealed:
            peer.sealed.add(event.key)
        elif artifact.chunk_count is not None:
            self._actions += self._gossip.seal(peer, event.key)
        bitmap = event.bitmap & all_of(CHUNKS_MAX if artifact.chunk_count is None else artifact.chunk_count)
        peer.note_all(event.key, bitmap)
        artifact.offered(bitmap, now)

    def _request_seen(self, event: events.Request, now: float) -> None:
        peer, artifact = self.peers.get(event.peer), self.artifacts.get(event.key)
        if peer is None or artifact is None:
            return
        queued = {(o.key, o.index) for o in peer.pull_queue}
        for index in those_in(artifact.held, event.indices):
            if len(peer.pull_queue) >= pace.REQUESTS_HELD_MAX:
                return
            if (event.key, index) not in queued:
                queued.add((event.key, index))
                peer.pull_queue.append(Outgoing(event.key, index, None, now, is_answer=True))

    def _chunk_sent(self, event: events.ChunkSent, now: float) -> None:
        peer = self.peers.get(event.peer)
        if peer is not None:
            peer.in_transport = max(0, peer.in_transport - 1)
            peer.send_s = 0.8 * peer.send_s + 0.2 * (now - peer.taken_at)
            peer.taken_at, peer.is_stuck = now, False
            if event.is_lost:
                peer.answered.pop((event.key, event.index), None)
        self._acknowledge(self._relaying.done((event.key, event.index), event.peer))

    def _uplink_seen(self, event: events.UplinkSeen, now: float) -> None:
        number = self.plan.index_of(self.me) if self.plan is not None else None
        if self.plan is not None and number is not None:
            self.governor.planned(self.plan.nodes[number].uplink_bytes_per_s)
        newest = next(reversed(self.artifacts.values()), None)
        chunk_bytes = newest.mean_chunk_bytes if newest is not None else 0
        self.governor.sample(event, now, is_waiting=self._was_paced, chunk_bytes=chunk_bytes)
        self._was_paced = False
        self._pacer.rate_bytes_per_s = self.governor.rate_bytes_per_s
        self._pacer.spend(event.resent_bytes, now)  # else what a full queue lost comes on top and keeps it full

    def _emptied(self, key: ArtifactKey, now: float) -> None:
        artifact, offered = self.artifacts.get(key), self._offered(key)
        for peer in self.peers.values():
            peer.sent_haves.pop(key, None)
            peer.received.pop(key, None)
        if artifact is not None:
            artifact.emptied(offered, now)

    def _set_wanted(self, event: events.Wanted) -> None:
        if event.key in self.artifacts:
            self.artifacts[event.key].is_wanted = event.is_wanted
        for peer in self.peers.values() if not event.is_wanted else ():
            if asked := peer.withdraw(event.key):
                self._actions.append(events.Cancel(peer.peer_id, event.key, asked))

    # ---- relaying

    def _relay(self, ref: Ref, parent: PeerId | None, route: events.Route, now: float) -> None:
        """Queues the chunk for our children in its tree; acknowledges to the parent once all of them have it."""
        if self._relaying.is_early(route):
            self._relaying.keep(ref, parent, route)
            return
        waiting: set[PeerId] = set()
        children = self._relaying.children_in(route)
        for child in children:
            if self._queue(ref, child, route, now):
                waiting.add(child.peer_id)
        self._acknowledge(self._relaying.begin(ref, parent, waiting, children))

    def _queue(self, ref: Ref, child: Child, route: events.Route, now: float) -> bool:
        """Queues the chunk for a child; False if it has the chunk, is stuck, not connected, or a late leaf, which pulls."""
        peer = self.peers.get(child.peer_id)
        if peer is None or peer.is_stuck or peer.has(*ref):
            return False
        if peer.is_late and not child.relays_on:
            return False
        outgoing = Outgoing(*ref, route if child.relays_on else None, now)
        (peer.relay_queue if child.relays_on else peer.leaf_queue).append(outgoing)
        return True

    def _acknowledge(self, acks: list[events.RelayAck]) -> None:
        is_slow = self.governor.is_slower_than_planned
        self._actions += (replace(ack, is_slow=is_slow) for ack in acks if ack.peer in self.peers)

    # ---- pulling

    def _expire_requests(self, now: float) -> None:
        for peer in self.peers.values():
            late = [ref for ref, request in peer.requests.items() if request.deadline <= now]
            if late:
                peer.rate.punish()  # its window shrinks, so the next requests go to others
            for ref in late:
                del peer.requests[ref]
                self._actions.append(events.Cancel(peer.peer_id, ref[0], (ref[1],)))

    def _pull(self, now: float) -> None:
        publisher = self.plan.seed.peer_id if self.plan is not None and self.plan.seed is not None else None
        for artifact in self.artifacts.values():
            if artifact.is_short_of_missing:
                artifact.has_more_missing = False
                artifact.offered(self._offered(artifact.key), now)
            if not artifact.missing_since:
                continue
            chosen = pulling.choose(artifact, self.peers, publisher, self.me, self._region, self._rng, now)
            for peer_id, indices in chosen.items():
                noted = pulling.note_requests(artifact, self.peers[peer_id], indices, now)
                self._actions.append(events.Request(peer_id, artifact.key, noted))

    # ---- sending

    def _send_what_fits(self, now: float) -> None:
        """Hands chunks to the transport while the pacer and the peers' slots allow it."""
        while self._pacer.ready_at(now) <= now:
            self._assign_fresh(now)
            picked = self._next_outgoing(now)
            if picked is None:
                return
            peer, outgoing = picked
            if not peer.in_transport:  # time with an empty transport does not count towards a stall
                peer.taken_at = now
            peer.in_transport += 1
            self._served += 1
            peer.served_at = self._served
            peer.note(outgoing.key, outgoing.index)  # so no other route sends it there again
            peer.remember_sent((outgoing.key, outgoing.index), now, outgoing.is_answer)
            self._pacer.spend(self.artifacts[outgoing.key].sizes.get(outgoing.index, 0), now)
            self._actions += self._gossip.header(peer, outgoing.key)
            self._actions.append(
                events.SendChunk(peer.peer_id, outgoing.key, outgoing.index, outgoing.route, outgoing.is_answer)
            )

    def _assign_fresh(self, now: float) -> None:
        """Assigns fresh chunks to trees while relays have room; sends them to all directly when nothing else is queued."""
        while self._seeding.fresh and self.peers:
            peers = self.peers.values()
            if sum(len(peer.relay_queue) for peer in peers) > len(peers):
                return
            is_idle = not any(peer.is_queued and not peer.is_late for peer in peers)
            assigned = self._seeding.next_assignment(self.peers, is_idle, now)
            if assigned is None:
                return
            self._gossip.changed()
            ref, tree = assigned
            children = tree.children
            if tree.route.tree < 0:  # no tree of the plan is available
                children = tuple(Child(peer.peer_id, False) for peer in self.peers.values())
            for child in children:
                self._queue(ref, child, tree.route, now)

    def _next_outgoing(self, now: float) -> tuple[Peer, Outgoing] | None:
        for peer, queue in service_order(self.peers.values()):
            while queue:
                outgoing = queue.popleft()
                if self._is_still_due(peer, outgoing, now):
                    return peer, outgoing
                self._acknowledge(self._relaying.done((outgoing.key, outgoing.index), peer.peer_id))
        return None

    def _is_still_due(self, peer: Peer, outgoing: Outgoing, now: float) -> bool:
        artifact = self.artifacts.get(outgoing.key)
        if artifact is None or not artifact.held >> outgoing.index & 1:
            return False
        if outgoing.is_answer:
            return peer.may_be_answered((outgoing.key, outgoing.index), now)
        return not peer.has(outgoing.key, outgoing.index)

    # ---- time

    def _shed_stuck(self, now: float) -> float | None:
        """Drops the queues of peers whose transport takes nothing, so that they block no tree; such a peer has to pull. Returns
        when the next peer would count as stuck."""
        next_at: float | None = None
        for peer in self.peers.values():
            if not peer.in_transport or (peer.is_late and not peer.relay_queue):  # nobody waits for a late leaf
                continue
            stuck_at = peer.taken_at + max(pace.STALL_S, 8 * peer.send_s)
            if now < stuck_at:
                next_at = stuck_at if next_at is None else min(next_at, stuck_at)
            elif not peer.is_stuck:
                peer.is_stuck = True
                peer.shed()
                self._acknowledge(self._relaying.give_up(peer.peer_id))
        return next_at

    def _set_timer(self, now: float, is_housekept: bool) -> None:
        wake_at = self._next_check(now) if is_housekept else now + HOUSEKEEPING_S
        ready_at = self._pacer.ready_at(now)
        if ready_at > now and self.is_waiting:
            self._was_paced = True
            wake_at = min(wake_at, ready_at)
        wake_at = max(now + 1e-3, wake_at)
        if wake_at != float("inf") and (wake_at < self._wake_at - 1e-4 or self._wake_at <= now):
            self._wake_at = wake_at
            self._actions.append(events.Wake(wake_at))

    def _next_check(self, now: float) -> float:
        requests = (request for peer in self.peers.values() for request in peer.requests.values())
        times = [self._shed_stuck(now), self._seeding.next_timeout(), self._gossip.next_at, self._next_pull(now)]
        times.append(min((request.deadline for request in requests), default=None))
        return min((at for at in times if at is not None), default=float("inf"))

    def _next_pull(self, now: float) -> float | None:
        """When to request the next missing chunk; at least 0.1 s from now, in case the request windows are full."""
        times: list[float] = []
        for artifact in self.artifacts.values():
            if artifact.is_wanted and artifact.missing_since:
                since = next(iter(artifact.missing_since.values()))
                quiet_at = artifact.pushed_at + pace.PUSH_SILENCE_S
                times.append(max(now + 0.1, min(since + pulling.patience_s(artifact), quiet_at)))
        return min(times, default=None)
