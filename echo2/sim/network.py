"""Connections between simulated machines: rates, delays, loss, clogging, partitions, cuts.

A connection is what gRPC gives: ordered and whole in each direction while it stands. So a lost packet is a message that
comes late (it is sent again), and disorder and duplicates arise as they do in reality: an end that has noticed that a
connection broke opens another and sends again, while the other end still reads what was on its way on the old one.
Guarantees: same seed, same result; each end is told once that its connection is over. A blocked direction holds
messages; after `KEEPALIVE_S` both ends give the connection up. Leaves to others: who talks to whom (drivers).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from echo2.base.ids import PeerId
from echo2.sim.clock import VirtualClock
from echo2.sim.host import Host

KEEPALIVE_S = 18.0
CONNECT_S = 10.0
WINDOW_S = 0.3
"""A transport takes no more than its receiver's link carries in this time."""
MESSAGE_BYTES = 300


@dataclass(slots=True)
class AccessLink:
    """Bytes per second up and down, round trip; `clog` multiplies both rates."""

    up: float
    down: float
    rtt_s: float
    clog: float = 1.0
    up_free_at: float = 0.0
    down_free_at: float = 0.0


class End:
    """One end of a connection, in the hands of one process."""

    def __init__(self, connection: Connection, side: int, host: Host) -> None:
        self.connection, self.side, self.host = connection, side, host
        self.born = host.incarnation
        self.is_open = True
        self.on_message: Callable[[object], None] = lambda message: None
        self.on_closed: Callable[[str], None] = lambda reason: None
        self.arrives_after = 0.0
        self.stalled: list[tuple[object, int, Callable[[], None] | None]] = []

    @property
    def peer(self) -> End:
        return self.connection.ends[1 - self.side]

    def send(self, message: object, size: int = MESSAGE_BYTES, taken: Callable[[], None] | None = None) -> None:
        """`taken` is called once the transport has taken the message."""
        if self.is_open:
            self.connection.network.send(self, message, size, taken)

    def close(self, reason: str = "closed") -> None:
        """This process is done with it; the other end hears of it behind what was sent."""
        self.connection.network.close(self, reason)


class Connection:
    def __init__(self, network: Network, kind: str, client: Host, server: Host) -> None:
        self.network, self.kind = network, kind
        self.ends = (End(self, 0, client), End(self, 1, server))


Listener = Callable[[End, str], None]


class _Attempt:
    """One try to reach a server."""

    def __init__(self, client: Host, server: str, kind: str, opened: Callable[[End], None]) -> None:
        self.client, self.server, self.kind, self.opened = client, server, kind, opened
        self.born = client.incarnation
        self.is_over = False

    def give_up(self, failed: Callable[[str], None]) -> None:
        if not self.is_over:
            self.is_over = True
            failed(f"{self.server} did not answer within {CONNECT_S:.0f} s")


class Network:
    def __init__(self, clock: VirtualClock, rng: random.Random) -> None:
        self.clock, self._rng = clock, rng
        self.links: dict[str, AccessLink] = {}
        self.loss = 0.0
        self.jitter_s = 0.004
        self.counts: Counter[str] = Counter()
        self.peer_ids: dict[str, PeerId] = {}  # whose certificate a machine shows
        self._listeners: dict[str, tuple[Host, Listener]] = {}
        self._blocks: Counter[tuple[str, str]] = Counter()
        self._connections: list[Connection] = []
        self._untaken: dict[str, list[Callable[[], None]]] = {}

    def name_of(self, peer: PeerId) -> str:
        """The machine that shows this identity."""
        return next((name for name, known in self.peer_ids.items() if known == peer), peer[-8:])

    # ---- connecting

    def listen(self, host: Host, listener: Listener) -> None:
        """`listener(end, kind)` gets each connection that somebody opens to this process."""
        self._listeners[host.name] = (host, listener)

    def dial(
        self, client: Host, server: str, kind: str, opened: Callable[[End], None], failed: Callable[[str], None]
    ) -> None:
        """Knocks until the server listens, `CONNECT_S` at most; tells one of `opened` and `failed`, on the client."""
        attempt = _Attempt(client, server, kind, opened)
        client.after(CONNECT_S, lambda: attempt.give_up(failed))
        self._knock_in(self._one_way_s(client.name, server), attempt)

    def _knock_in(self, delay_s: float, attempt: _Attempt) -> None:
        self.clock.after(delay_s, lambda: self._knock(attempt))

    def _knock(self, attempt: _Attempt) -> None:
        client, server = attempt.client, attempt.server
        if attempt.is_over or not client.is_up or client.incarnation != attempt.born:
            return
        host, listener = self._listeners.get(server, (None, None))
        is_blocked = self.is_blocked(client.name, server) or self.is_blocked(server, client.name)
        if is_blocked or host is None or listener is None or not host.is_up or host.is_frozen:
            self._knock_in(1.0, attempt)
            return
        connection = Connection(self, attempt.kind, client, host)
        host.bound(lambda: listener(connection.ends[1], attempt.kind))()
        answered = client.bound(lambda: self._answered(attempt, connection))
        self.clock.after(self._one_way_s(client.name, server), answered)

    def _answered(self, attempt: _Attempt, connection: Connection) -> None:
        client_end, server_end = connection.ends
        if attempt.is_over or not server_end.is_open or server_end.host.incarnation != server_end.born:
            client_end.is_open = False
            self._tell_closed(server_end, "the other side gave up", 0.0)
            if not attempt.is_over:
                self._knock_in(1.0, attempt)
            return
        attempt.is_over = True
        self._connections.append(connection)
        self.counts["connections"] += 1
        attempt.opened(client_end)

    # ---- sending

    def _one_way_s(self, first: str, second: str) -> float:
        return (self.links[first].rtt_s + self.links[second].rtt_s) / 4

    def send(self, end: End, message: object, size: int, taken: Callable[[], None] | None) -> None:
        if self.is_blocked(end.host.name, end.peer.host.name):
            end.stalled.append((message, size, taken))
            return
        now, mine, theirs = self.clock.now(), self.links[end.host.name], self.links[end.peer.host.name]
        mine.up_free_at = max(now, mine.up_free_at) + size / (mine.up * mine.clog)
        left_at = mine.up_free_at
        arrives_at = left_at + self._one_way_s(end.host.name, end.peer.host.name) + self.jitter_s * self._rng.random()
        if self._rng.random() < self.loss:
            self.counts["packets lost"] += 1
            arrives_at += max(0.2, mine.rtt_s) * self._rng.uniform(1.0, 4.0)
        theirs.down_free_at = max(arrives_at, theirs.down_free_at + size / (theirs.down * theirs.clog))
        end.arrives_after = max(theirs.down_free_at, end.arrives_after + 1e-7)
        self.counts["messages"] += 1
        if taken is not None:
            self._tell_taken(end, taken, max(left_at, theirs.down_free_at - WINDOW_S))
        self.clock.at(end.arrives_after, lambda: self._arrive(end.peer, message))

    def _tell_taken(self, end: End, taken: Callable[[], None], at: float) -> None:
        told = end.host.bound(taken)

        def take() -> None:
            if end.peer.host.is_frozen:  # its window is full
                self._untaken.setdefault(end.peer.host.name, []).append(told)
            elif end.is_open:
                told()

        self.clock.at(at, take)

    def _arrive(self, end: End, message: object) -> None:
        if end.is_open and end.host.incarnation == end.born:
            self.counts["messages read after their sender gave the connection up"] += not end.peer.is_open
            end.host.bound(lambda: end.on_message(message) if end.is_open else None)()

    # ---- ending

    def close(self, end: End, reason: str) -> None:
        if not end.is_open:
            return
        end.is_open = False
        is_flushed = self._rng.random() < 0.5  # else the other end hears of the end before it reads what was under way
        wait_s = self._one_way_s(end.host.name, end.peer.host.name)
        if is_flushed:
            wait_s = max(wait_s, end.arrives_after - self.clock.now() + 1e-7)
        if self.is_blocked(end.host.name, end.peer.host.name):
            wait_s = KEEPALIVE_S
        self._tell_closed(end.peer, reason, wait_s)

    def _tell_closed(self, end: End, reason: str, wait_s: float) -> None:
        def tell() -> None:
            if not end.is_open:
                return
            end.is_open = False
            if end.host.incarnation == end.born:
                end.host.bound(lambda: end.on_closed(reason))()

        self.clock.after(wait_s, tell)
        self._connections = [one for one in self._connections if one.ends[0].is_open or one.ends[1].is_open]

    def process_ended(self, host: Host) -> None:
        """Its sockets are closed by its system."""
        for end in self._ends_of(host):
            self.close(end, f"{host.name} is gone")

    def cut(self, first: str, second: str) -> int:
        """Breaks the connections between two machines; the ends notice it at different times."""
        broken = [c for c in self._connections if {c.ends[0].host.name, c.ends[1].host.name} == {first, second}]
        for connection in broken:
            for end in connection.ends:
                self._tell_closed(end, "the connection broke", self._rng.choice((0.0, self._rng.uniform(0.0, 8.0))))
        return len(broken)

    def _ends_of(self, host: Host) -> list[End]:
        return [end for c in list(self._connections) for end in c.ends if end.host is host and end.is_open]

    # ---- faults

    def is_blocked(self, sender: str, receiver: str) -> bool:
        return self._blocks[(sender, receiver)] > 0

    def block(self, sender: str, receiver: str) -> None:
        """Nothing goes from one machine to the other any more."""
        self._blocks[(sender, receiver)] += 1
        self.clock.after(KEEPALIVE_S, lambda: self._give_up(sender, receiver))

    def unblock(self, sender: str, receiver: str) -> None:
        self._blocks[(sender, receiver)] -= 1
        if self.is_blocked(sender, receiver):
            return
        for connection in list(self._connections):
            for end in connection.ends:
                if (end.host.name, end.peer.host.name) == (sender, receiver) and end.is_open:
                    stalled, end.stalled = end.stalled, []
                    for message, size, taken in stalled:
                        self.send(end, message, size, taken)

    def _give_up(self, sender: str, receiver: str) -> None:
        if self.is_blocked(sender, receiver):
            self.cut(sender, receiver)

    def freeze(self, host: Host) -> None:
        """The process is stopped: whoever talks to it notices after a while."""
        host.is_frozen = True
        born = host.incarnation

        def notice() -> None:
            if host.is_frozen and host.incarnation == born:
                for end in self._ends_of(host):
                    self._tell_closed(end.peer, f"{host.name} does not answer", self._rng.uniform(0.0, 2.0))
                    self._tell_closed(end, "the other side gave up", 0.0)

        self.clock.after(KEEPALIVE_S, notice)

    def thaw(self, host: Host) -> None:
        host.thaw()
        for told in self._untaken.pop(host.name, []):
            told()
