"""A node's links: one per peer, from dialling to its end.

    due --dial--> open --hello--> linked --+--> ended --pause--> due
                   ^ |              ^      |--> replaced: by another connection of that peer (dialling)
    accepted ------' '-- banned     |      |--> evicted for another peer when all places are taken (places)
                        or refused  |      '--> accused: bad frame or signature, protocol violation, or the coordinator's ban
                                    '-- a further connection of a link joins it (stripes)

Guarantees: at most one link per peer, and the session sees PeerDown of one before PeerUp of the next; a peer that breaks a rule is
logged, dropped and, if that is proven, banned. Waits for: hellos (HELLO_TIMEOUT_S), connections to end. Leaves to others: which
peer to dial and which connection stays (dialling), who is evicted (places), frames (link, inbox).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from echo2.base.errors import EchoError, Unreachable
from echo2.base.ids import PeerId
from echo2.broadcast.events import Event, PeerDown, PeerUp, SendChunk
from echo2.broadcast.link_shape import LinkShape
from echo2.broadcast.manifest import ArtifactKey
from echo2.broadcast.places import Place, giving_way
from echo2.broadcast.reachability import relay_of
from echo2.broadcast.runtime.bans import Bans, deserves_ban
from echo2.broadcast.runtime.dialling import Dialling, Target
from echo2.broadcast.runtime.eyeballs import first_of
from echo2.broadcast.runtime.inbox import Hello
from echo2.broadcast.runtime.link import LinkCalls, PeerLink, hello_of
from echo2.broadcast.runtime.pipe_member import PipeMember
from echo2.broadcast.runtime.shaper import NodeShaper
from echo2.broadcast.runtime.stripes import Stripes, is_bulk_offered
from echo2.broadcast.runtime.transport import Connection, Piped, Transport, Widenable
from echo2.broadcast.runtime.transport_bulk import BulkTransport
from echo2.broadcast.session import BroadcastSession
from echo2.outside import MACHINE, here
from echo2.trust.runtime.tls import Credentials

log = logging.getLogger("echo2.broadcast")
BULK_RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class ConnectionCalls:
    """What connections need from their node. `check_hello` raises if the frame is not a hello of this run. `is_proven`: whether a
    peer has delivered work. `linked`: called for each new link, so that its sockets are sampled."""

    frame: Callable[[ArtifactKey, int], bytes | memoryview | None]
    header: Callable[[ArtifactKey], bytes | None]
    sent: Callable[[SendChunk, int | None], None]
    received: Callable[[PeerId, bytes], bool]
    check_hello: Callable[[PeerId, bytes], Hello]
    is_proven: Callable[[PeerId], bool]
    linked: Callable[[], None]
    act: Callable[[Event], None]
    spawn: Callable[[Coroutine[None, None, None]], None]


class Connections:
    """All links of one node."""

    def __init__(
        self,
        credentials: Credentials,
        transport: Transport,
        shape: LinkShape,
        session: BroadcastSession,
        dialling: Dialling,
        bans: Bans,
        calls: ConnectionCalls,
    ) -> None:
        self._run_id, self._transport, self._calls = credentials.run_id, transport, calls
        self._bulk = BulkTransport(credentials)
        self.pipe_member = PipeMember(self._bulk.dial, lambda raw, host: self._bulk.take(raw, host, self.accept))
        self._dialling, self._bans = dialling, bans
        self._shaper = NodeShaper(shape)
        self.links: dict[PeerId, PeerLink] = {}
        self.stripes = Stripes(session, calls.act, self.links, self._dial_further, calls.spawn)
        self._link_calls = LinkCalls(calls.frame, calls.header, calls.sent, calls.received, self.stripes.widened)
        self._dialling_now: set[PeerId] = set()

    async def accept(self, connection: Connection) -> None:
        """Serves a connection that a peer dialled, until it ends."""
        if connection.peer.peer_id not in self._bans:
            await self._serve(self._shaper.wrap(connection))

    def listen(self, host: str, port: int) -> None:
        """Accepts bulk connections at `port`, or at any port if that is taken. Emulated links and machines have none."""
        if self._shaper.shape.is_off and here() is MACHINE:
            try:
                self._bulk.listen(host, port, self.accept)
            except OSError as error:
                log.warning("no bulk port at %s: %s; chunks go over gRPC", host, error)

    def tend(self, now: float) -> None:
        """Dials peers that are due, and widens or narrows existing links."""
        self.stripes.tend(now)
        if isinstance(self._transport, Piped) and self._bulk.port:
            self.pipe_member.keep(self._transport.pipe_places)
        for link in [link for link in self.links.values() if self._dialling.is_detour(link.peer_id, link.address)]:
            self._calls.spawn(link.close())
        for target, address in self._dialling.due(set(self.links) | self._dialling_now, now):
            if target.peer_id not in self._bans:
                self._dialling_now.add(target.peer_id)
                self._calls.spawn(self._dial(target, address))

    async def _dial(self, target: Target, address: str) -> None:
        try:
            connection, address = await first_of(
                _beside(address, target.addresses), lambda candidate: self._transport.dial(candidate, target.peer_id)
            )
        except EchoError as error:  # includes a malformed peer ID in a plan
            if target.failures == 0:
                log.info("%s", error)
            self._dialling.failed(target, str(error), asyncio.get_running_loop().time())
            return
        finally:
            self._dialling_now.discard(target.peer_id)
        target.failures = 0
        await self._serve(self._shaper.wrap(connection), address)
        self._dialling.failed(target, "the connection ended", asyncio.get_running_loop().time())

    async def _dial_further(self, link: PeerLink) -> None:
        """Dials and serves a further connection of our link until it ends; a bulk connection if the peer accepts those."""
        now = asyncio.get_running_loop().time()
        if not (link.has_bulk or is_bulk_offered(link, now)):
            await self._serve(await self._transport.dial(link.address, link.peer_id), further_of=link)
            return
        try:
            connection = await self._bulk.dial(*link.bulk_place, link.peer_id)
        except Unreachable as error:
            link.bulk_next_try = now + BULK_RETRY_S
            log.info("%s; chunks go over gRPC", error)
            raise
        await self._serve(connection, further_of=link)

    async def _serve(self, connection: Connection, address: str = "", *, further_of: PeerLink | None = None) -> None:
        """Serves a connection: hello both ways, then frames until it ends. `further_of`: the link for which we opened it."""
        peer, link = connection.peer.peer_id, PeerLink(connection, self._link_calls, address)
        try:
            is_further = further_of is not None
            port = 0 if is_further else self._bulk.port
            told = self._calls.check_hello(
                peer, await hello_of(connection, self._run_id, is_further=is_further, bulk_port=port)
            )
            if told.is_further or is_further:
                await self.stripes.carry(connection, further_of)
                return
            link.pipe = self._pipe_of(address)
            link.bulk_port = told.bulk_port if link.pipe or relay_of(address) is None else 0
            if peer not in self._bans:  # it may have been banned while its hello was on the way
                await self._replace(link)
            if self.links.get(peer) is link:
                self._calls.act(PeerUp(peer))
                self.stripes.tend(asyncio.get_running_loop().time())
                await link.run()
        except Unreachable:
            pass  # links end all the time; the side that dialled tries again
        except Exception as error:  # noqa: BLE001 - an error caused by a peer's bytes ends only that peer's link
            self.accuse(peer, str(error), is_ban=deserves_ban(error, peer))
        finally:
            if self.links.get(peer) is link:
                del self.links[peer]
                self._calls.act(PeerDown(peer))
            await connection.close()

    def _pipe_of(self, address: str) -> str:
        """The address of the relay's byte pipes for a peer dialled at `address`; empty: no byte pipes."""
        pipes = self._transport.pipes if isinstance(self._transport, Piped) else {}
        relay = relay_of(address)
        return pipes.get(relay, "") if relay is not None else address if address in pipes.values() else ""

    async def _replace(self, link: PeerLink) -> None:
        """Registers the link, unless an older link to the same peer takes precedence."""
        while (old := self.links.get(link.peer_id)) is not None:  # another link may have come while one was closing
            if not self._dialling.replaces(link.peer_id, link.connection.is_outgoing, old.connection.is_outgoing):
                return
            del self.links[link.peer_id]
            self._calls.act(PeerDown(link.peer_id))
            await old.close()
        held = [self._place_of(other) for other in self.links.values()]
        gone = giving_way(self._place_of(link), held, has_plan=self._dialling.plan is not None)
        if gone is not None:
            self.accuse(gone, "gives way to a newcomer", is_ban=False)
        self.links[link.peer_id] = link
        self._calls.linked()

    def _place_of(self, link: PeerLink) -> Place:
        hosts = link.connection.remotes if isinstance(link.connection, Widenable) else ()
        host, token = min((host for host, _ in hosts), default=""), link.connection.peer.token_id
        is_planned = link.peer_id in self._dialling.targets
        return Place(link.peer_id, host, is_planned, token, self._calls.is_proven(link.peer_id))

    def accuse(self, peer: PeerId, reason: str, *, is_ban: bool) -> None:
        """Drops the peer; `is_ban`: also bans it."""
        self._bans.accused(peer, reason, is_ban=is_ban)
        if (
            link := self.links.pop(peer, None)
        ) is not None:  # removed first, so that no more of its frames are handled while it closes
            self._calls.act(PeerDown(peer))
            self._calls.spawn(link.close())

    def drop_banned(self) -> None:
        """Drops the links of all banned peers; call it after `bans` has changed."""
        for peer in self._bans.among(list(self.links)):
            self.accuse(peer, "the coordinator has banned it", is_ban=False)

    async def close(self) -> None:
        """Closes all links, as a network failure would; they are dialled again."""
        await asyncio.gather(*(link.close() for link in self.links.values()))

    async def end(self) -> None:
        """Closes everything for good."""
        await self.close()
        await self.pipe_member.close()
        await self._bulk.close()
        self.links.clear()


def _beside(address: str, known: Sequence[str]) -> list[str]:
    """The given address, then one of the other IP family if the peer has one; circuits are tried alone."""
    others = [other for other in known if relay_of(other) is None and ("[" in other) != ("[" in address)]
    return [address] if relay_of(address) is not None else [address, *others[:1]]
