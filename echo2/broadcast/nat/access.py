"""Limits the connections of this node's libp2p listener, in total and per address, and how long strangers may stay.

Guarantees: a connection whose peer has not shown its certificate is a stranger's. An address has at most STRANGERS_PER_HOST of
them, each for at most STRANGER_S; the next one evicts the oldest. With members' connections included, an address has at most half
of all places, so that it cannot take those of others. When all places are taken, the oldest stranger is evicted; if there is none,
the newcomer is closed at once. A connection's end frees its place. Waits for the end of each connection, STRANGER_S for the proof.

The library keeps a place and a task for every connection that it ever accepted, until the host ends (0.8.1,
`_handle_inbound_connection` waits for that), so that a relay stops accepting after 2,048 connections; here both end with it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import trio
from libp2p.host.autonat.autonat import AutoNATService
from libp2p.host.autonat.pb.autonat_pb2 import Message
from libp2p.host.basic_host import BasicHost
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from echo2.base.ids import PeerId
from echo2.base.units import address_of
from echo2.broadcast.nat.reach import PROBE_S, shows_certificate
from echo2.broadcast.nat.relay import Members, peer_of_stream, reset
from echo2.broadcast.reachability import is_punchable
from echo2.outside.guard import Refusals
from echo2.trust.ports import RELAY_CONNECTIONS_MAX, RELAY_SHARE, connections_within

STRANGERS_PER_HOST = 32  # members behind one NAT that start together
STRANGER_S = 15.0  # a handshake over a slow link
_log = logging.getLogger("echo2.broadcast")
Remote = tuple[str, int]


@dataclass(slots=True)
class Places:
    """The rule alone, without IO."""

    connections_max: int
    _held: dict[int, tuple[str, bool]] = field(default_factory=dict)  # host, and whether it is a member's; oldest first

    def admit(self, number: int, host: str) -> tuple[bool, int | None]:
        """A connection arrived. Returns whether it may stay, and which other connection to evict for it."""
        strangers = [other for other, (_, is_member) in self._held.items() if not is_member]
        of_host = [other for other in strangers if self._held[other][0] == host]
        in_all = sum(at == host for at, _ in self._held.values())
        victim = None
        if len(of_host) >= STRANGERS_PER_HOST or in_all >= max(1, self.connections_max // 2):
            victim = next(iter(of_host), None)
        elif len(self._held) >= self.connections_max:
            victim = next(iter(strangers), None)
        else:
            self._held[number] = host, False
            return True, None
        if victim is not None:
            del self._held[victim]
            self._held[number] = host, False
        return victim is not None, victim

    def proved(self, number: int) -> None:
        if number in self._held:
            self._held[number] = self._held[number][0], True

    def is_stranger(self, number: int) -> bool:
        return not self._held.get(number, ("", True))[1]

    def ended(self, number: int) -> None:
        self._held.pop(number, None)

    def __len__(self) -> int:
        return len(self._held)


class AcceptGate:
    """Enforces the rule: call `stand_before` with a host that does not listen yet. Runs in trio."""

    def __init__(self) -> None:
        self.places = Places(connections_within(RELAY_SHARE, RELAY_CONNECTIONS_MAX))
        self._scopes: dict[int, trio.CancelScope] = {}
        self._by_remote: dict[Remote, int] = {}
        self._count = 0
        self._refusals = Refusals(_log)

    def stand_before(self, host: BasicHost) -> None:
        """Routes all connections that the host accepts through this gate."""
        manager = host.get_network().transport_manager
        add = manager.add_listen_addr

        def gated(address: Any, handle: Callable[[Any], Awaitable[None]]) -> Any:
            async def accepted(stream: Any) -> None:
                await self._accepted(stream, handle)

            return add(address, accepted)

        manager.add_listen_addr = gated

    def prove(self, stream: Any) -> None:
        number = self._by_remote.get(stream.muxed_conn.get_remote_address())
        if number is not None:
            self.places.proved(number)

    async def _accepted(self, stream: Any, handle: Callable[[Any], Awaitable[None]]) -> None:
        try:
            name = stream.stream.socket.getpeername()
        except OSError:  # it has ended
            return
        remote: Remote = (str(name[0]).removeprefix("::ffff:"), int(name[1]))
        stream._cached_remote_address = remote  # the library has no address for IPv6 callers
        self._count += 1
        number, scope = self._count, trio.CancelScope()
        is_in, victim = self.places.admit(number, remote[0])
        if victim is not None:
            self._scopes[victim].cancel()
        if not is_in or victim is not None:
            self._refusals.warn("libp2p: %s holds more than its share of connections", remote[0])
        if not is_in:
            return
        self._scopes[number], self._by_remote[remote] = scope, number
        close = stream.close

        async def closed() -> None:
            scope.cancel()
            await close()

        stream.close = closed
        try:
            with scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._drop_stranger, number, scope)
                    await handle(stream)
                    nursery.cancel_scope.cancel()
        finally:
            self.places.ended(number)
            del self._scopes[number]
            if self._by_remote.get(remote) == number:
                del self._by_remote[remote]
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream.stream)

    async def _drop_stranger(self, number: int, scope: trio.CancelScope) -> None:
        await trio.sleep(STRANGER_S)
        if self.places.is_stranger(number):
            scope.cancel()


class DialGate:
    """`own_host`: the address at which relays see this node; empty while unknown."""

    def __init__(self, own_host: Callable[[], str]) -> None:
        self._own_host = own_host
        self._relays: set[tuple[str, int]] = set()
        self._dialled: WeakSet[trio.SocketStream] = WeakSet()

    def stand_before(self, host: BasicHost) -> None:
        """Hooks into the host's choice of a transport, which precedes every dial of the library."""
        manager = host.get_network().transport_manager
        choose = manager.transport_for_dialing

        def asked(address: Multiaddr) -> object:
            if not self.lets_through(address):
                raise SwarmException(
                    f"{address}: expected a relay of the run or an address where a hole may be punched"
                )
            return _Dialler(choose(address), address, self._dialled)

        manager.transport_for_dialing = asked

    def know_relay(self, address: Multiaddr) -> None:
        place = _host_and_port(address)
        if place is not None:
            self._relays.add(place)

    def close(self) -> None:
        """Closes what was dialled: the library leaves it open where it is cancelled. In trio."""
        for stream in self._dialled:
            stream.socket.close()

    def lets_through(self, address: Multiaddr) -> bool:
        place = _host_and_port(address)
        return place is not None and (place in self._relays or is_punchable(*place, self._own_host()))


class _Dialler:
    """A library transport that adds each connection to `dialled` and records the remote address on it: for IPv6 the library has
    none (0.8.1), and then ignores addresses observed over it."""

    def __init__(self, transport: Any, address: Multiaddr, dialled: WeakSet[trio.SocketStream]) -> None:
        self._transport, self._other, self._dialled = transport, _host_and_port(address), dialled

    async def dial(self, address: Multiaddr) -> Any:
        return self._named(await self._transport.dial(address))

    async def dial_with_source(self, address: Multiaddr, source: tuple[str, int]) -> Any:
        return self._named(await self._transport.dial_with_source(address, source))

    def _named(self, connection: Any) -> Any:
        connection.stream._cached_remote_address = self._other
        self._dialled.add(connection.stream.stream)
        return connection


def _host_and_port(address: Multiaddr) -> tuple[str, int] | None:
    """Parses `/ip4/HOST/tcp/PORT`, also `/ip6` and with a peer ID appended; None for anything else, such as names and circuits."""
    parts = str(address).strip("/").split("/")
    if (
        len(parts) not in (4, 6)
        or parts[0] not in ("ip4", "ip6")
        or parts[2] != "tcp"
        or parts[4:5] not in ([], ["p2p"])
    ):
        return None
    return parts[1], int(parts[3])


ADDRESSES_MAX = 2  # one of each IP family
PAUSE_S = 1.0  # a check by a peer takes seconds anyway
ANSWER_S = 2 * PROBE_S * ADDRESSES_MAX
PROBES_AT_ONCE = 16  # each holds a thread for up to PROBE_S
_asking: ContextVar[PeerId] = ContextVar("asking")
"""The authenticated peer whose request this task serves; the library passes on only the ID claimed in the request."""


class ReachabilityService(AutoNATService):  # type: ignore[misc]  # untyped library
    """`is_serving` False: only sends requests."""

    def __init__(
        self, host: BasicHost, members: Members, *, is_serving: bool, proven: Callable[[PeerId, str], None]
    ) -> None:
        super().__init__(host, serve=is_serving)
        self._members, self._proven = members, proven
        self._asked_at: dict[PeerId, float] = {}
        self._limit = trio.CapacityLimiter(PROBES_AT_ONCE)

    async def handle_stream(self, stream: Any) -> None:
        member, now = peer_of_stream(stream), trio.current_time()
        is_early = now - self._asked_at.get(member, -PAUSE_S) < PAUSE_S
        if not self._members.is_member(member) or is_early:
            await reset(stream)
            return
        self._asked_at = {peer: at for peer, at in self._asked_at.items() if now - at < PAUSE_S}
        self._asked_at[member] = now
        _asking.set(member)
        await super().handle_stream(stream)

    async def _try_dial(self, peer_id: ID, addrs: list[bytes]) -> bytes | None:
        peer = PeerId(peer_id.to_base58())
        if peer != _asking.get():
            return None
        for raw in addrs[:ADDRESSES_MAX]:
            place = _host_and_port(Multiaddr(raw))
            if place is not None and await trio.to_thread.run_sync(
                shows_certificate, *place, peer, self._members.credentials.authority_pem, limiter=self._limit
            ):
                self._proven(peer, address_of(*place))
                return raw
        return None

    async def is_reachable(self, server: PeerId, host: str, port: int) -> bool | None:
        """Asks `server` whether our port at `host` can be reached; None if it does not answer."""
        kind = "ip6" if ":" in host else "ip4"
        asked = Multiaddr(f"/{kind}/{host}/tcp/{port}").to_bytes()
        status, _ = await self.query_server(ID.from_base58(server), [asked], ANSWER_S)
        return {int(Message.OK): True, int(Message.E_DIAL_ERROR): False}.get(status)
