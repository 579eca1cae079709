"""Broadcast sessions on a virtual clock: every node runs the real session core; links have rates, delays and faults.

Guarantees: same plan and seed, same result. A chunk occupies its sender's uplink for size/rate, arrives half an RTT
later and occupies the receiver's downlink. Payloads are not simulated, only chunk sizes. Leaves to others: TCP's
behaviour and CPU time (measured by bench_broadcast on real processes).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from echo2.base.ids import PeerId
from echo2.broadcast.artifact import ArtifactKey
from echo2.broadcast.events import (
    Accuse,
    Action,
    Cancel,
    ChunkSeen,
    ChunkSent,
    Event,
    Have,
    HeaderSeen,
    PeerDown,
    PeerUp,
    PlanSet,
    RelayAck,
    Request,
    SealSeen,
    SendChunk,
    SendHeader,
    SendSeal,
    UplinkSeen,
    Wake,
    Woken,
)
from echo2.broadcast.plan import BroadcastPlan, NodeLink
from echo2.broadcast.session import BroadcastSession

KEY = ArtifactKey(b"simulated-artefa")
EVENTS_MAX = 50_000_000
LOOK_S = 0.1
DOWNLINK_QUEUE_S = 0.06  # a longer backlog on a downlink stays in the sender's transport


@dataclass(slots=True)
class SimNode:
    link: NodeLink
    session: BroadcastSession
    is_alive: bool = True
    is_frozen: bool = False
    up_free_at: float = 0.0
    down_free_at: float = 0.0
    sent_bytes: int = 0
    looked_at_bytes: int = 0
    received_bytes: int = 0
    done_at: float | None = None
    wake_at: float = float("inf")
    peers: set[PeerId] = field(default_factory=set)
    backlog: list[Event] = field(default_factory=list)  # events held back while frozen
    untaken: list[tuple[PeerId, ChunkSent]] = field(default_factory=list)  # senders' ChunkSent, held back while frozen


class BroadcastNetwork:
    """Simulates one broadcast plan. `plan.nodes[0]` is the seed. All neighbours are connected at first, unless `are_apart`."""

    def __init__(self, plan: BroadcastPlan, *, seed: int = 0, are_apart: bool = False) -> None:
        self.now = 0.0
        self.plan = plan
        self.nodes = {link.peer_id: SimNode(link, BroadcastSession(link.peer_id, seed)) for link in plan.nodes}
        self.seed_id = plan.nodes[0].peer_id
        self.accusations: list[tuple[PeerId, str]] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._epochs: dict[frozenset[PeerId], int] = {}  # cuts so far, by connection; a cut loses older messages
        self._chunk_bytes: list[int] = []
        self.event_count = 0
        if are_apart:
            return
        for link in plan.nodes:
            for peer in plan.neighbours(link.peer_id):
                self.connect(link.peer_id, peer)
        for link in plan.nodes:
            self.deliver(link.peer_id, PlanSet(plan))

    # ---- faults

    def connect(self, first: PeerId, second: PeerId) -> None:
        a, b = self.nodes[first], self.nodes[second]
        if second in a.peers or not (a.is_alive and b.is_alive):
            return
        a.peers.add(second)
        b.peers.add(first)
        self.deliver(first, PeerUp(second))
        self.deliver(second, PeerUp(first))

    def publish(
        self, total_bytes: int, chunk_bytes: int, encode_bytes_per_s: float = float("inf"), *, is_pushed: bool = True
    ) -> None:
        """Publishes an artifact at the seed: its encoder produces chunks at a rate, then the seal."""
        self._chunk_bytes = [min(chunk_bytes, total_bytes - at) for at in range(0, total_bytes, chunk_bytes)]
        self.deliver(self.seed_id, HeaderSeen(None, KEY, is_wanted=True))
        at = self.now
        for index, size in enumerate(self._chunk_bytes):
            at += size / encode_bytes_per_s
            chunk = ChunkSeen(None, KEY, index, size, is_fresh=is_pushed)
            self.at(at, lambda chunk=chunk: self.deliver(self.seed_id, chunk))  # type: ignore[misc]
        for peer in self.nodes:
            self.at(self.now + LOOK_S, lambda peer=peer: self._look(peer))  # type: ignore[misc]
        seal = SealSeen(None, KEY, len(self._chunk_bytes))
        self.at(at, lambda: self.deliver(self.seed_id, seal))

    def kill(self, peer: PeerId) -> None:
        """Ends the node's process; its peers see the connections close."""
        node = self.nodes[peer]
        node.is_alive = False
        for other in list(node.peers):
            self.nodes[other].peers.discard(peer)
            self.deliver(other, PeerDown(peer))
        node.peers.clear()

    def freeze(self, peer: PeerId) -> None:
        """Stops the node as by SIGSTOP: connections stay open, but it neither reads nor sends."""
        self.nodes[peer].is_frozen = True

    def thaw(self, peer: PeerId) -> None:
        node = self.nodes[peer]
        node.is_frozen = False
        backlog, node.backlog = node.backlog, []
        for event in backlog:
            self.deliver(peer, event)
        untaken, node.untaken = node.untaken, []
        for sender, taken in untaken:
            if peer in self.nodes[sender].peers:
                self.deliver(sender, taken)

    def cut(self, first: PeerId, second: PeerId) -> None:
        """Cuts the connection; messages in flight are lost."""
        a, b = self.nodes[first], self.nodes[second]
        if second in a.peers:
            a.peers.discard(second)
            b.peers.discard(first)
            self._epochs[frozenset((first, second))] = self._epoch_of(first, second) + 1
            self.deliver(first, PeerDown(second))
            self.deliver(second, PeerDown(first))

    def _epoch_of(self, first: PeerId, second: PeerId) -> int:
        return self._epochs.get(frozenset((first, second)), 0)

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), act))

    def _look(self, peer: PeerId) -> None:
        """Reports the peer's uplink to its session every `LOOK_S`: bytes sent and seconds of backlog."""
        node = self.nodes[peer]
        if node.is_alive and not node.is_frozen:
            sent, node.looked_at_bytes = node.sent_bytes - node.looked_at_bytes, node.sent_bytes
            if sent:
                self.deliver(peer, UplinkSeen(sent, max(0.0, node.up_free_at - self.now)))
        if not self.is_done:
            self.at(self.now + LOOK_S, lambda: self._look(peer))

    # ---- running

    def run(self, limit_s: float) -> None:
        """Runs until all living nodes hold the whole artifact, or until `limit_s`."""
        while self._heap and self._heap[0][0] <= limit_s and not self.is_done:
            self.now, _, act = heapq.heappop(self._heap)
            self.event_count += 1
            assert self.event_count < EVENTS_MAX, "the simulation does not end"
            act()

    @property
    def is_done(self) -> bool:
        return bool(self._chunk_bytes) and all(n.done_at is not None for n in self.nodes.values() if n.is_alive)

    def deliver(self, peer: PeerId, event: Event) -> None:
        node = self.nodes[peer]
        if not node.is_alive:
            return
        if node.is_frozen:
            node.backlog.append(event)
            return
        if isinstance(event, Woken):
            if self.now < node.wake_at:
                return  # replaced by a later timer
            node.wake_at = float("inf")
        for action in node.session.handle(event, self.now):
            self._carry_out(node, action)
        artifact = node.session.artifacts.get(KEY)
        if node.done_at is None and artifact is not None and artifact.is_complete:
            node.done_at = self.now

    def _carry_out(self, node: SimNode, action: Action) -> None:
        me = node.link.peer_id
        match action:
            case Wake():
                node.wake_at = action.at
                self.at(action.at, lambda: self.deliver(me, Woken()))
            case Accuse():
                self.accusations.append((action.peer, action.reason))
            case SendChunk():
                self._send_chunk(node, action)
            case _:
                self._send_control(node, action.peer, self._event_of(me, action))

    def _event_of(self, me: PeerId, action: Action) -> Event:
        match action:
            case SendHeader():
                return HeaderSeen(me, action.key, is_wanted=True)
            case SendSeal():
                return SealSeen(me, action.key, len(self._chunk_bytes))
            case Have() | Request() | Cancel() | RelayAck():
                return replace(action, peer=me)
            case _:
                raise AssertionError(f"not a message: {action}")

    def _delay_s(self, first: SimNode, second: SimNode) -> float:
        return (first.link.rtt_s + second.link.rtt_s) / 4

    def _send_control(self, node: SimNode, to: PeerId, event: Event) -> None:
        if to not in node.peers:
            return
        me = node.link.peer_id
        arrives_at, epoch = self.now + self._delay_s(node, self.nodes[to]), self._epoch_of(me, to)
        self.at(arrives_at, lambda: self._arrive(me, to, event, epoch))

    def _arrive(self, sender: PeerId, to: PeerId, event: Event, epoch: int) -> None:
        if sender in self.nodes[to].peers and self._epoch_of(sender, to) == epoch:
            self.deliver(to, event)

    def _send_chunk(self, node: SimNode, action: SendChunk) -> None:
        me, size = node.link.peer_id, self._chunk_bytes[action.index]
        if action.peer not in node.peers:
            return
        other, epoch = self.nodes[action.peer], self._epoch_of(me, action.peer)
        node.up_free_at = max(self.now, node.up_free_at) + size / node.link.up
        node.sent_bytes += size
        taken = ChunkSent(action.peer, action.key, action.index)
        seen = ChunkSeen(me, action.key, action.index, size, action.route, is_answer=action.is_answer)

        def take() -> None:
            if other.is_frozen:
                other.untaken.append((me, taken))
            elif action.peer in node.peers and self._epoch_of(me, action.peer) == epoch:
                self.deliver(me, taken)

        def arrive() -> None:
            other.received_bytes += size
            self._arrive(me, action.peer, seen, epoch)

        def leave() -> None:
            delay_s = self._delay_s(node, other)
            other.down_free_at = max(self.now + delay_s, other.down_free_at + size / other.link.down)
            self.at(other.down_free_at, arrive)
            self.at(max(self.now, other.down_free_at - delay_s - DOWNLINK_QUEUE_S), take)

        self.at(node.up_free_at, leave)

    # ---- measurements

    def worker_times(self) -> dict[str, float | None]:
        return {n.link.name: n.done_at for n in list(self.nodes.values())[1:]}

    @property
    def slowest_s(self) -> float:
        times = [n.done_at for n in list(self.nodes.values())[1:] if n.is_alive]
        return max((t for t in times if t is not None), default=float("inf")) if None not in times else float("inf")
