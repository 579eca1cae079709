"""All links of one node: dials, accepts, and which of several connections to a peer stays.

Guarantees: one link per peer; a banned peer has none; links are limited (dialling.giving_way). Waits for: peers, each in a task.
Leaves to others: whom to dial and when (dialling), frames (link, exchange), how connections are made (transport, nat).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from echo2.base.errors import EchoError, Unreachable
from echo2.base.ids import PeerId
from echo2.base.link_shape import LinkShape
from echo2.broadcast.connection import Connection
from echo2.broadcast.dialling import Dialling, Slot, Target, giving_way
from echo2.broadcast.events import PeerDown, PeerUp
from echo2.broadcast.exchange import Bans, Exchange, deserves_ban
from echo2.broadcast.link import PeerLink, hello_of
from echo2.broadcast.nat.pipes import PipeMember
from echo2.broadcast.nat.reach import Nat
from echo2.broadcast.reachability import LinkKind, LinkWay, relay_of
from echo2.broadcast.stripes import Stripes
from echo2.broadcast.transport import NodeShaper, Transport, first_of
from echo2.outside.guard import FairShares
from echo2.trust.tls import Credentials

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
        self._shares, self._shaper = FairShares(), NodeShaper(shape)
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
            await self._serve(self._shaper.wrap(connection))
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
            self._exchange.spawn(link.close())
        for target, address in self._dialling.due(set(self.links) | self._dialling_now, now):
            if target.peer_id not in self._bans:
                self._dialling_now.add(target.peer_id)
                self._exchange.spawn(self._dial(target, address))

    async def _dial(self, target: Target, address: str) -> None:
        try:
            connection, address = await first_of(
                _beside(address, target.addresses), lambda candidate: self._dial_at(candidate, target.peer_id)
            )
        except EchoError as error:  # includes a malformed peer ID in a plan
            if target.failures == 0:
                log.info("%s", error)
            self._dialling.failed(target, str(error), asyncio.get_running_loop().time())
            return
        finally:
            self._dialling_now.discard(target.peer_id)
        target.failures = 0
        if (relay := relay_of(address)) is not None:
            self._nat.punch(target.peer_id, relay)
        await self._serve(self._shaper.wrap(connection), address)
        self._dialling.failed(target, "the connection ended", asyncio.get_running_loop().time())

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
        link = PeerLink(connection, self._exchange, self._shares.of(peer), address)
        try:
            frame = await hello_of(connection, self._run_id, is_further=further_of is not None)
            if self._exchange.check_hello(peer, frame) or further_of is not None:
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
        gone = giving_way(self._slot_of(link), held, has_plan=self._dialling.plan is not None)
        if gone is not None:
            self._exchange.accuse(gone, "gives way to a newcomer", is_ban=False)
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
        """Closes everything for good."""
        await asyncio.gather(*(link.close() for link in self.links.values()))
        await self.pipe_member.close()
        await self.transport.close()
        self.links.clear()


def _beside(address: str, known: Sequence[str]) -> list[str]:
    """The given address, then one of the other IP family if the peer has one; circuits are tried alone."""
    others = [other for other in known if relay_of(other) is None and ("[" in other) != ("[" in address)]
    return [address] if relay_of(address) is not None else [address, *others[:1]]
