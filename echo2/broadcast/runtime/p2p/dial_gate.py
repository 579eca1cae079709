"""Vets every dial of the library: identify, hole punching and new streams all use addresses that a peer claims.

Guarantees: only the node's own relays are dialled, and of claimed addresses only those that `is_punchable` allows; only TCP. Leaves
to others: which relays there are (host), the rule (broadcast/dialable).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from libp2p.host.basic_host import BasicHost
from libp2p.network.exceptions import SwarmException
from multiaddr import Multiaddr

from echo2.broadcast.dialable import is_punchable


class DialGate:
    """`own_host`: the address at which relays see this node; empty while unknown."""

    def __init__(self, own_host: Callable[[], str]) -> None:
        self._own_host = own_host
        self._relays: set[tuple[str, int]] = set()

    def stand_before(self, host: BasicHost) -> None:
        """Hooks into the host's choice of a transport, which precedes every dial of the library."""
        manager = host.get_network().transport_manager
        choose = manager.transport_for_dialing

        def asked(address: Multiaddr) -> object:
            if not self.lets_through(address):
                raise SwarmException(
                    f"{address}: expected a relay of the run or an address where a hole may be punched"
                )
            return _Dialler(choose(address), address)

        manager.transport_for_dialing = asked

    def know_relay(self, address: Multiaddr) -> None:
        """Allows a relay that the coordinator named."""
        place = _host_and_port(address)
        if place is not None:
            self._relays.add(place)

    def lets_through(self, address: Multiaddr) -> bool:
        place = _host_and_port(address)
        return place is not None and (place in self._relays or is_punchable(*place, self._own_host()))


class _Dialler:
    """A library transport that also records the remote address on the connection: for IPv6 the library has none (0.8.1), and
    then ignores addresses observed over it."""

    def __init__(self, transport: Any, address: Multiaddr) -> None:
        self._transport, self._other = transport, _host_and_port(address)

    async def dial(self, address: Multiaddr) -> Any:
        return self._named(await self._transport.dial(address))

    async def dial_with_source(self, address: Multiaddr, source: tuple[str, int]) -> Any:
        return self._named(await self._transport.dial_with_source(address, source))

    def _named(self, connection: Any) -> Any:
        connection.stream._cached_remote_address = self._other
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
