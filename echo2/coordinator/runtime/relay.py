"""The coordinator's libp2p relay, in a module of its own because its library takes longer to load than all the rest.

Guarantees: it relays for nodes of the run that are not banned, within the limits of its book, and takes part in no broadcast
itself. Leaves to others: when to load it (daemon), what a relay does (broadcast.runtime).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from echo2.base.ids import PeerId
from echo2.broadcast.relay_book import RelayBook, RelayLimits
from echo2.broadcast.runtime.transport import refuse_exchange
from echo2.broadcast.runtime.transport_mixed import MixedTransport, P2pSettings
from echo2.trust.runtime.tls import Credentials


@dataclass(frozen=True, slots=True)
class Relay:
    """A running relay. `port`: the bound port. `is_piped`: whether a node can be reached through byte pipes. `close`: stops it."""

    port: int
    is_piped: Callable[[PeerId], bool]
    close: Callable[[], Awaitable[None]]


async def serve_relay(
    own: Credentials, host: str, port: int, is_barred: Callable[[PeerId], bool], proven: Callable[[PeerId, str], None]
) -> Relay:
    """Starts the relay. It calls `is_barred` and `proven` in its own thread."""
    settings = P2pSettings(host, port, book=RelayBook(RelayLimits()), is_barred=is_barred, proven=proven)
    relay = MixedTransport(own, refuse_exchange, settings)
    try:
        return Relay(await relay.serve(), relay.is_piped, relay.close)
    except BaseException:
        await relay.close()
        raise
