"""All links of one node: dials, accepts, and which of several connections to a peer stays.

Guarantees: one link per peer; a banned peer has none; links are limited (giving_way). Waits for: peers, each in a task.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from echo2.base.clock import ceiling_s
from echo2.base.errors import EchoError, Unreachable
from echo2.base.ids import PeerId
from echo2.base.units import LinkShape
from echo2.broadcast.connection import Connection, EmulatedLink
from echo2.broadcast.events import PeerDown, PeerUp
from echo2.broadcast.exchange import Bans, Exchange, deserves_ban
from echo2.broadcast.link import PeerLink, greet
from echo2.broadcast.nat.pipes import PipeMember
from echo2.broadcast.nat.reach import Nat
from echo2.broadcast.plan import BroadcastPlan
from echo2.broadcast.reachability import Access, LinkKind, LinkWay, meeting, relay_of
from echo2.broadcast.stripes import LASTING_S, Stripes
from echo2.broadcast.transport import Transport, first_of
from echo2.outside.guard import FairShares
from echo2.trust.tls import Credentials

# Which peers to dial, when, and which of two connections to the same peer stays. Pure rules; the node acts on them.
#
# Where two nodes meet is decided in broadcast/reachability. If both can dial, the one with the lower peer ID does; the other
# only after GRACE_S. If both dialled, the connection of the lower peer ID stays; a newer connection dialled by the same
# side replaces the older one (its process has restarted).

GRACE_S = 3.0  # for the other side to dial first, with its handshake
PAUSE_FIRST_S, PAUSE_MAX_S = 0.25, 8.0  # a restart is noticed at once; 48 dead peers cost 6 dials a second
STANDBY_NEIGHBOURS = 4  # one or two may be gone or slow


@dataclass(slots=True)
class Target:
    """A peer that we want a connection to. `dials_first`: we do; else the peer has GRACE_S to dial us. `is_to_dial_us`: it cannot
    be dialled, so a relayed link to it is a detour."""

    peer_id: PeerId
    addresses: tuple[str, ...]
    wanted_since: float
    next_try: float
    dials_first: bool = True
    is_to_dial_us: bool = False
    failures: int = 0
    last_error: str = ""
    has_left_detour: bool = False


@dataclass(slots=True)
class Dialling:
    me: PeerId
    publisher: tuple[PeerId, str] | None = None
    plan: BroadcastPlan | None = None
    targets: dict[PeerId, Target] = field(default_factory=dict)

    def refresh(self, now: float) -> None:
        wanted = {target.peer_id: target for target in self._planned(now)}
        if self.publisher is not None and self.publisher[0] != self.me:
            peer, address = self.publisher
            target = wanted.setdefault(peer, Target(peer, (), now, now))
            target.addresses = tuple(dict.fromkeys((*([address] if address else []), *target.addresses)))
        for peer, target in wanted.items():
            known = self.targets.get(peer)
            if known is not None and known.addresses == target.addresses:
                known.dials_first, known.is_to_dial_us = target.dials_first, target.is_to_dial_us
                wanted[peer] = known
        self.targets = wanted

    def _planned(self, now: float) -> Iterator[Target]:
        """The plan's neighbours; for a node outside the plan, a few nodes to pull from."""
        if self.plan is None:
            return
        by_id = {node.peer_id: node for node in self.plan.nodes}
        ours = by_id[self.me].whole_access if self.me in by_id else None
        for peer in self.plan.neighbours(self.me) or self._standby_neighbours():
            theirs = by_id[peer].whole_access
            there = meeting(self.me, ours or Access(), peer, theirs)
            target = Target(peer, there.addresses, now, now)
            if ours is not None:
                target.is_to_dial_us = there.way.kind is LinkKind.REVERSE
                can_be_dialled = bool(meeting(peer, theirs, self.me, ours).addresses)
                target.dials_first = not target.is_to_dial_us and (not can_be_dialled or self.me < peer)
            yield target

    def _standby_neighbours(self) -> tuple[PeerId, ...]:
        assert self.plan is not None
        able = [node.peer_id for node in self.plan.nodes[1:] if node.addresses and node.peer_id != self.me]
        start = sum(self.me.encode()) % len(able) if able else 0
        return tuple((able[start:] + able[:start])[:STANDBY_NEIGHBOURS])

    def is_detour(self, peer: PeerId, address: str) -> bool:
        """Whether to close a link that we dialled at `address`, so that the peer dials us instead. True only once per plan: if
        the peer cannot dial us, the detour stays."""
        target = self.targets.get(peer)
        if target is None or target.has_left_detour or address not in target.addresses or not target.is_to_dial_us:
            return False
        target.has_left_detour = True
        return True

    def due(self, connected: set[PeerId], now: float) -> list[tuple[Target, str]]:
        targets = []
        for target in self.targets.values():
            if target.peer_id in connected:
                target.wanted_since = now
                continue
            is_ours = target.dials_first or now - target.wanted_since >= GRACE_S
            if target.addresses and is_ours and now >= target.next_try:
                targets.append((target, target.addresses[target.failures % len(target.addresses)]))
        return targets

    def waits_for(self) -> str:
        target = min(self.targets.values(), key=lambda target: target.wanted_since)
        return f"a connection to {target.peer_id} ({target.last_error or 'dialling'})"

    def failed(self, target: Target, error: str, now: float) -> None:
        target.failures += 1
        target.last_error = error
        target.next_try = now + ceiling_s(target.failures, PAUSE_FIRST_S, PAUSE_MAX_S)

    def replaces(self, peer: PeerId, new_is_outgoing: bool, old_is_outgoing: bool) -> bool:
        if new_is_outgoing == old_is_outgoing:
            return True
        return new_is_outgoing == (self.me < peer)


LINKS_MAX = 48  # the 32 of a plan, and half as many others
NEWCOMERS_MAX = 24  # of LINKS_MAX, half: the planned ones have theirs
PER_HOST_MAX = 16  # a machine with many GPUs behind one address
PER_TOKEN_MAX = 16  # a third of LINKS_MAX: three tokens must be stolen to fill it


@dataclass(frozen=True, slots=True)
class Slot:
    """One link among those that may be open. `host`: the address that the peer connects from; empty: through a relay. `token`: id
    of the join token that admitted it."""

    peer: PeerId
    host: str
    is_planned: bool
    token: str = ""
    is_proven: bool = False


def giving_way(new: Slot, held: Sequence[Slot], *, has_plan: bool) -> PeerId | None:
    """Which of `held` (oldest first) to evict for `new`; None: no need. Raises Unreachable if there is no room."""
    newcomers = [slot for slot in held if not (slot.is_planned or slot.is_proven)]
    if has_plan and not (new.is_planned or new.is_proven):
        of_its_host = [slot for slot in newcomers if slot.host == new.host]
        of_its_token = [slot for slot in newcomers if slot.token == new.token]
        if len(of_its_host) >= PER_HOST_MAX:
            return _of_the_largest(of_its_host).peer
        if new.token and len(of_its_token) >= PER_TOKEN_MAX:
            return of_its_token[0].peer
        if len(newcomers) >= NEWCOMERS_MAX:
            return _of_the_largest(newcomers).peer
    if len(held) < LINKS_MAX:
        return None
    if not newcomers:
        proven = [slot for slot in held if not slot.is_planned]
        if new.is_planned and proven:
            return proven[0].peer
        raise Unreachable(f"peer {new.peer}: {LINKS_MAX} connections are open, the most allowed")
    victim = _of_the_largest(newcomers)
    if not (has_plan or new.is_planned or new.is_proven) and _share(victim, newcomers) <= _share(new, newcomers) + 1:
        raise Unreachable(f"peer {new.peer}: {LINKS_MAX} connections are open, the most allowed")
    return victim.peer


def _of_the_largest(newcomers: Sequence[Slot]) -> Slot:
    """The oldest newcomer of the token that holds most slots."""
    counts = Counter(slot.token for slot in newcomers)
    return max(newcomers, key=lambda slot: counts[slot.token])


def _share(slot: Slot, newcomers: Sequence[Slot]) -> int:
    return sum(other.token == slot.token for other in newcomers)


log = logging.getLogger("echo2.broadcast")


class Connections:
    """All links of one node."""

    def __init__(
        self,
        credentials: Credentials,
        nat: Nat,
        shape: LinkShape,
        exchange: Exchange,
        dialling: Dialling,
        bans: Bans,
        is_proven: Callable[[PeerId], bool],
    ) -> None:
        """`is_proven`: whether a peer has delivered work."""
        self._run_id, self._nat, self._exchange, self._is_proven = credentials.run_id, nat, exchange, is_proven
        self._dialling, self._bans = dialling, bans
        self._shares, self._emulated = FairShares(), None if shape.is_off else EmulatedLink(shape)
        self.transport = Transport(credentials, self._shares, self._is_refused)
        self.pipe_member = PipeMember(
            self.transport.dial, lambda caller, way: self.transport.take(caller, self.accept, way)
        )
        self.links = exchange.links
        self.links_made = 0
        self.stripes = Stripes(exchange, self._dial_further)
        self._dialling_now: set[PeerId] = set()

    async def accept(self, connection: Connection) -> None:
        """Serves a connection that a peer dialled, or one over a hole that was punched, until it ends."""
        if connection.peer.peer_id not in self._bans:
            await self._serve(connection)
        elif connection.way.kind is not LinkKind.RELAYED:  # else the host is the relay's
            self._bans.refuse(host for host, _ in connection.remotes)

    def _is_refused(self, host: str) -> bool:
        """Whether a banned peer has just come from there, and nobody else is linked to us from there."""
        if not self._bans.is_refused(host):
            return False
        return all(host != other for link in self.links.values() for other, _ in link.connection.remotes)

    def tend(self, now: float) -> None:
        """Dials peers that are due, and widens or narrows existing links."""
        self.stripes.tend(now)
        self.pipe_member.keep(self._nat.pipe_places)
        for link in [link for link in self.links.values() if self._dialling.is_detour(link.peer_id, link.address)]:
            self._exchange.tasks.start(link.close())
        for target, address in self._dialling.due(set(self.links) | self._dialling_now, now):
            if target.peer_id not in self._bans:
                self._dialling_now.add(target.peer_id)
                self._exchange.tasks.start(self._dial(target, address))

    async def _dial(self, target: Target, address: str) -> None:
        ended, now = "the connection ended", asyncio.get_running_loop().time
        begun_at = now()
        try:
            connection, address = await first_of(
                _beside(address, target.addresses), lambda candidate: self._dial_at(candidate, target.peer_id)
            )
            if (relay := relay_of(address)) is not None:
                self._nat.punch(target.peer_id, relay)
            await self._serve(connection, address)
        except EchoError as error:  # includes a malformed peer ID in a plan
            ended = str(error)
            if target.failures == 0:
                log.info("%s", error)
        finally:
            self._dialling_now.discard(target.peer_id)
        if now() - begun_at >= LASTING_S:  # a full peer lets go at once whoever has shaken hands
            target.failures = 0
        self._dialling.failed(target, ended, now())

    async def _dial_at(self, address: str, peer_id: PeerId) -> Connection:
        """At host:port; a peer that is met at a relay through a byte pipe of that relay."""
        pipes, relay = self._nat.pipes, relay_of(address)
        if relay is not None and relay not in pipes:
            raise Unreachable(f"peer {peer_id}: expected to know an address of relay {relay}, where it is met")
        relay = relay or next((known for known, pipe in pipes.items() if pipe == address), None)
        if relay is None:
            return await self.transport.dial(address, peer_id)
        way = LinkWay(LinkKind.RELAYED, f"the peer cannot be dialled; through a byte pipe of relay {relay}")
        return await self.transport.dial(pipes[relay], peer_id, way)

    async def _dial_further(self, link: PeerLink) -> None:
        """Dials and serves a further connection of our link until it ends."""
        await self._serve(await self._dial_at(link.address, link.peer_id), further_of=link)

    async def _serve(self, connection: Connection, address: str = "", *, further_of: PeerLink | None = None) -> None:
        """Serves a connection: hello both ways, then frames until it ends. `further_of`: the link for which we opened it."""
        peer = connection.peer.peer_id
        if self._emulated is not None:
            connection.emulate(self._emulated)
        link = PeerLink(connection, self._exchange, self._shares.of(peer), address)
        try:
            joins = await greet(connection, self._run_id, is_further=further_of is not None)
            if joins or further_of is not None:
                await self.stripes.carry(connection, further_of)
                return
            if peer not in self._bans:  # it may have been banned while its hello was on the way
                await self._replace(link)
            if self.links.get(peer) is link:
                self._exchange.act(PeerUp(peer))
                self.stripes.tend(asyncio.get_running_loop().time())
                await link.run()
        except Unreachable:
            pass  # links end all the time; the side that dialled tries again
        except Exception as error:  # noqa: BLE001 - an error caused by a peer's bytes ends only that peer's link
            self._exchange.accuse(peer, str(error), is_ban=deserves_ban(error, peer))
        finally:
            if self.links.get(peer) is link:
                del self.links[peer]
                self._exchange.act(PeerDown(peer))
            await connection.close()

    async def _replace(self, link: PeerLink) -> None:
        """Registers the link, unless an older link to the same peer takes precedence."""
        while (old := self.links.get(link.peer_id)) is not None:  # another link may have come while one was closing
            if not self._dialling.replaces(link.peer_id, link.connection.is_outgoing, old.connection.is_outgoing):
                return
            del self.links[link.peer_id]
            self._exchange.act(PeerDown(link.peer_id))
            await old.close()
        held = [self._slot_of(other) for other in self.links.values()]
        victim = giving_way(self._slot_of(link), held, has_plan=self._dialling.plan is not None)
        if victim is not None:
            self._exchange.accuse(victim, "gives way to a newcomer", is_ban=False)
        self.links[link.peer_id] = link
        self.links_made += 1

    def _slot_of(self, link: PeerLink) -> Slot:
        host = min((host for host, _ in link.connection.remotes), default="")
        token = link.connection.peer.token_id
        is_planned = link.peer_id in self._dialling.targets
        return Slot(link.peer_id, host, is_planned, token, self._is_proven(link.peer_id))

    def drop_banned(self) -> None:
        """Drops the links of all banned peers; call it after `bans` has changed."""
        for peer in [peer for peer in self.links if peer in self._bans]:
            self._exchange.accuse(peer, "the coordinator has banned it", is_ban=False)

    async def end(self) -> None:
        await asyncio.gather(*(link.close() for link in self.links.values()))
        await self.pipe_member.close()
        await self.transport.close()
        self.links.clear()


def _beside(address: str, known: Sequence[str]) -> list[str]:
    """The given address, then one of the other IP family if the peer has one; circuits are tried alone."""
    others = [other for other in known if relay_of(other) is None and ("[" in other) != ("[" in address)]
    return [address] if relay_of(address) is not None else [address, *others[:1]]
