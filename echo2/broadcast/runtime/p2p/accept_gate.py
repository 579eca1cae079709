"""Limits the connections of this node's libp2p listener, in total and per address, and how long strangers may stay.

Guarantees: a connection whose peer has not shown its certificate is a stranger's. An address has at most STRANGERS_PER_HOST of
them, each for at most STRANGER_S; the next one evicts the oldest. With members' connections included, an address has at most half
of all places, so that it cannot take those of others. When all places are taken, the oldest stranger is evicted; if there is none,
the newcomer is closed at once. A connection's end frees its place. Waits for the end of each connection, STRANGER_S for the proof.
Leaves to others: what a certificate must say (membership), streams (host).

The library keeps a place and a task for every connection that it ever accepted, until the host ends (0.8.1,
`_handle_inbound_connection` waits for that), so that a relay stops accepting after 2,048 connections; here both end with it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import trio
from libp2p.host.basic_host import BasicHost

from echo2.outside.guard import Refusals
from echo2.trust.runtime.port_limits import RELAY_CONNECTIONS_MAX, RELAY_SHARE, connections_within

STRANGERS_PER_HOST = 32
STRANGER_S = 15.0
_log = logging.getLogger("echo2.broadcast")
Remote = tuple[str, int]


@dataclass(slots=True)
class Places:
    """The rule alone, without IO. All tables are ordered oldest first."""

    connections_max: int
    _strangers: dict[str, dict[int, None]] = field(default_factory=lambda: defaultdict(dict))
    _members: dict[str, dict[int, None]] = field(default_factory=lambda: defaultdict(dict))
    _host_of: dict[int, str] = field(default_factory=dict)

    def came(self, number: int, host: str) -> tuple[bool, int | None]:
        """A connection arrived. Returns whether it may stay, and which other connection to evict for it."""
        strangers, gone = self._strangers[host], None
        full = len(self._host_of) >= self.connections_max
        if len(strangers) >= STRANGERS_PER_HOST:
            gone = next(iter(strangers))
        elif len(strangers) + len(self._members[host]) >= max(1, self.connections_max // 2):
            gone = next(iter(strangers), None)
        elif full:
            gone = next(
                (stranger for stranger in self._host_of if stranger in self._strangers[self._host_of[stranger]]), None
            )
        else:
            self._enter(number, host)
            return True, None
        if gone is not None:
            self.ended(gone)
            self._enter(number, host)
        self._tidy(host)
        return gone is not None, gone

    def _enter(self, number: int, host: str) -> None:
        self._strangers[host][number] = None
        self._host_of[number] = host

    def proved(self, number: int) -> None:
        host = self._host_of.get(number)
        if host is not None and number in self._strangers[host]:
            del self._strangers[host][number]
            self._members[host][number] = None

    def is_stranger(self, number: int) -> bool:
        return number in self._strangers.get(self._host_of.get(number, ""), {})

    def ended(self, number: int) -> None:
        host = self._host_of.pop(number, None)
        if host is not None:
            self._strangers[host].pop(number, None)
            self._members[host].pop(number, None)
            self._tidy(host)

    def _tidy(self, host: str) -> None:
        for held in (self._strangers, self._members):
            if not held.get(host, True):
                del held[host]

    def __len__(self) -> int:
        return len(self._host_of)


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
        """The peer of this stream has shown a certificate of the run."""
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
        is_in, gone = self.places.came(number, remote[0])
        if gone is not None:
            self._scopes[gone].cancel()
        if not is_in or gone is not None:
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
