"""The further connections of a node's links: requested by the side that is held back, opened by the side that dialled the link.

Guarantees: only links over TCP connections of their own are widened; all connections of this node together stay within
striping.connections_max; a further connection is accepted only for an existing link, and from that link's peer. Waits:
RETRY_S, doubling to RETRY_MAX_S, after a connection could not be opened. Leaves to others: when more or fewer are better
(striping), carrying chunks (link), authenticating the peer (transport).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field

from echo2.base.errors import ResourceError, Unreachable
from echo2.base.ids import PeerId
from echo2.broadcast.dialable import PORT_MIN
from echo2.broadcast.events import LinkWidened
from echo2.broadcast.policy import SLOTS_PER_PEER
from echo2.broadcast.reachability import LinkKind, LinkWay
from echo2.broadcast.runtime.link import PeerLink
from echo2.broadcast.runtime.progress import LinkStatus
from echo2.broadcast.runtime.sockets import PathSent, SocketTotals
from echo2.broadcast.runtime.transport import Connection, Widenable, way_of
from echo2.broadcast.session import BroadcastSession
from echo2.broadcast.striping import LinkLook, Striping, connections_max
from echo2.wire import broadcast as wire

RETRY_S, RETRY_MAX_S = 2.0, 60.0
LASTING_S = 10.0  # a connection that ends sooner counts as a failure


def is_bulk_offered(link: PeerLink, now: float) -> bool:
    """Whether the peer accepts bulk connections at the address where we dialled it, as far as is known. It names the port itself,
    so ports of system services are excluded."""
    return link.bulk_port >= PORT_MIN and bool(link.address) and now >= link.bulk_next_try


@dataclass(slots=True)
class _Width:
    """The wanted width of one link. `link` identifies it: the state of a replaced link is discarded."""

    link: PeerLink
    striping: Striping = field(default_factory=Striping)
    told: int = 1
    running: int = 0  # further connections that we opened or are opening
    failures: int = 0
    next_try: float = float("-inf")


class Stripes:
    """The widths of all links. `open_one` dials a further connection of a link and serves it until it ends; `spawn` runs that."""

    def __init__(
        self,
        session: BroadcastSession,
        act: Callable[[LinkWidened], None],
        links: Mapping[PeerId, PeerLink],
        open_one: Callable[[PeerLink], Coroutine[None, None, None]],
        spawn: Callable[[Coroutine[None, None, None]], None],
    ) -> None:
        self._session, self._act, self._links = session, act, links
        self._open_one, self._spawn = open_one, spawn
        self._widths: dict[PeerId, _Width] = {}

    def _limit(self, link: PeerLink) -> int:
        others = (
            (one.width, (known := self._widths.get(peer)) is not None and known.link is one and known.striping.is_short)
            for peer, one in self._links.items()
            if one is not link
        )
        return connections_max(max(1, link.width), others)

    def _width(self, link: PeerLink) -> _Width:
        known = self._widths.get(link.peer_id)
        if known is None or known.link is not link:
            known = self._widths[link.peer_id] = _Width(link)
        return known

    def look(self, sent: SocketTotals, now: float) -> None:
        """Takes a sample of all links; called by uplink.UplinkWatch."""
        for peer_id, link in self._links.items():
            peer = self._session.peers.get(peer_id)
            if peer is None or not isinstance(link.connection, Widenable):
                continue
            paths = (sent.paths.get(remote, PathSent()) for remote in link.remotes)
            path = functools.reduce(PathSent.__add__, paths, PathSent())
            held_back = peer.is_held_back(SLOTS_PER_PEER)
            look = LinkLook(path.delivered_bytes, path.lost, held_back)
            self._width(link).striping.look(look, link.width, self._limit(link), now)

    def widened(self, peer_id: PeerId) -> None:
        """Tells the session that a connection of the peer's link was opened, closed or lost."""
        if (link := self._links.get(peer_id)) is not None:
            self._act(LinkWidened(peer_id, link.width))

    def tend(self, now: float) -> None:
        """Opens, closes and requests connections. Call it about every half second."""
        for gone in self._widths.keys() - self._links.keys():
            del self._widths[gone]
        for link in self._links.values():
            if not (isinstance(link.connection, Widenable) or link.pipe):
                continue
            width, peer = self._width(link), self._session.peers.get(link.peer_id)
            if not link.connection.is_outgoing:
                self._ask(link, width)
                continue
            goal = min(self._limit(link), max(width.striping.count, peer.wished_connections if peer is not None else 1))
            has_own = not (
                link.has_bulk or is_bulk_offered(link, now)
            )  # without bulk connections, the link's first connection carries chunks and counts
            if goal < link.width:
                link.narrow()
            elif now >= width.next_try:
                for _ in range(goal - has_own - width.running):
                    width.running += 1  # counted here, because `tend` may be called again before the task starts
                    self._spawn(self._open(link, width))

    def _ask(self, link: PeerLink, width: _Width) -> None:
        if width.striping.count != width.told:
            with contextlib.suppress(ResourceError):  # the peer does not read: keepalive will end the link
                link.send_control(wire.width_wish_to_bytes(width.striping.count))
                width.told = width.striping.count

    async def _open(self, link: PeerLink, width: _Width) -> None:
        now = asyncio.get_running_loop().time
        begun_at = now()
        try:
            await self._open_one(link)
        except Unreachable:
            pass  # the link works without it, and it is tried again
        finally:
            width.running -= 1
            width.failures = width.failures + 1 if now() - begun_at < LASTING_S else 0
            width.next_try = now() + min(RETRY_MAX_S, RETRY_S * 2 ** min(width.failures, 10))

    async def carry(self, connection: Connection, of: PeerLink | None) -> None:
        """Serves a further connection until it ends. `of`: the link for which we opened it; None: the peer opened it for the link
        that it dialled. Unreachable if that link is gone or was replaced, or its limit is reached."""
        peer = connection.peer.peer_id
        link = self._links.get(peer)
        is_for_it = link is not None and (link is of if of is not None else not link.connection.is_outgoing)
        if link is None or not is_for_it or not isinstance(connection, Widenable):
            raise Unreachable(f"peer {peer}: the link of this further connection has ended")
        if link.width >= (limit := self._limit(link)):
            raise Unreachable(
                f"peer {peer}: {link.width} connections are open, of {limit} for one of {len(self._links)} links"
            )
        await link.carry(connection)

    def way_of(self, link: PeerLink) -> LinkWay:
        """The link's kind and reason, including how many connections it has and why."""
        way, width = way_of(link.connection), self._widths.get(link.peer_id)
        if link.pipe and link.address == link.pipe:
            way = LinkWay(
                LinkKind.RELAYED, "the peer cannot be dialled; everything goes through a byte pipe of a relay"
            )
        elif way.kind is LinkKind.RELAYED and link.has_bulk:
            return LinkWay(way.kind, f"{way.reason}; chunks through a byte pipe of the relay")
        if link.width == 1 or width is None:
            return way
        why = width.striping.reason if width.striping.count > 1 else "the peer asked for them"
        return LinkWay(way.kind, f"{way.reason}; {link.width} connections: {why}")

    def statuses(self) -> tuple[LinkStatus, ...]:
        """The status of all links, for the operator."""
        return tuple(
            LinkStatus(peer, self.way_of(link), link.width, link.sent_bytes, link.received_bytes)
            for peer, link in self._links.items()
        )
