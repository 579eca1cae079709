"""Every dial of the library asks first: identify, hole punching and new streams all take addresses that a peer names.

Guarantees: the node's own relays are dialled, and of what peers name only what `is_punchable` allows; TCP alone. Leaves to
others: which relays there are (host), the rule (broadcast/dialable).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from libp2p.host.basic_host import BasicHost
from libp2p.network.exceptions import SwarmException
from multiaddr import Multiaddr

from echo2.broadcast.dialable import is_punchable


class DialGate:
    """`own_host`: where relays see this node; empty while none has said."""

    def __init__(self, own_host: Callable[[], str]) -> None:
        self._own_host = own_host
        self._relays: set[tuple[str, int]] = set()

    def stand_before(self, host: BasicHost) -> None:
        """All that the library dials goes by the choice of a transport."""
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
        """One that the coordinator named."""
        found = _host_and_port(address)
        if found is not None:
            self._relays.add(found)

    def lets_through(self, address: Multiaddr) -> bool:
        found = _host_and_port(address)
        return found is not None and (found in self._relays or is_punchable(*found, self._own_host()))


class _Dialler:
    """A transport of the library's that tells a connection its other end: of an IPv6 one the library knows none (0.8.1), and
    believes nothing of what is observed over it."""

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
    """Of `/ip4/HOST/tcp/PORT`, with or without a peer ID behind it; None for all else, names and circuits among it."""
    parts = str(address).strip("/").split("/")
    if (
        len(parts) not in (4, 6)
        or parts[0] not in ("ip4", "ip6")
        or parts[2] != "tcp"
        or parts[4:5] not in ([], ["p2p"])
    ):
        return None
    return parts[1], int(parts[3])
